"""What a router is: how its scores decide which experts a row takes, and with what weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch

from attngraph.analysis.experts.reading import Choice
from attngraph.analysis.experts.uniform import is_sized
from attngraph.analysis.walks import walk
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import (
    ADDITIVE,
    CAST,
    GATHERED,
    LAYOUT,
    MULTIPLICATIVE,
    PART,
    SCALE,
    SHIFT,
    SOFTMAX,
    SUM,
)

_SMOOTH = (  # of scores and the choice made of them
    SOFTMAX | GATHERED | LAYOUT | CAST | SUM | MULTIPLICATIVE | SCALE | ADDITIVE | SHIFT
)

_NEAR = 24  # values in which a softmax is looked for


def softmax_of(choice: Choice, weights: Value) -> Value | None:
    """The scores (…, experts) whose largest are chosen, and whose softmax, over all of them or over
    those, decides their weights, by nothing that may switch; None where something else does too.
    """
    scores = _unmoved(choice.scores)
    softmax = scores.producer
    if softmax is not None and softmax.op in SOFTMAX:
        source = softmax.inputs[0]
        assert source is not None
        if attribute(softmax, "dim") % len(source.shape) != len(source.shape) - 1:
            return None
        scores = source
    cut = {scores, choice.indices}
    leaves, nodes = backward_slice([weights], lambda value: value in cut or value.is_constant)
    if not all(leaf in cut or leaf.is_constant for leaf in leaves):
        return None
    least = torch.finfo(weights.dtype).eps
    for node in nodes:
        if node is choice.node:
            continue
        if node.op in PART or node.op not in _SMOOTH:
            return None
        if node.op not in LAYOUT and is_sized(node):
            return None
        if node.op in CAST and torch.finfo(node.output.dtype).eps > least:
            return None
    return scores


def softmax_near(choice: Choice) -> Node | None:
    """The softmax over all scores before the choice, or over those that were chosen."""

    def above(value: Value) -> Iterator[Value]:
        if value.producer is not None:
            yield from (side for side in value.producer.inputs if side is not None)

    def below(value: Value) -> Iterator[Value]:
        yield from (result for node in value.users for result in node.outputs)

    for start, step, size in (
        (choice.scores, above, choice.experts),
        (choice.node.outputs[0], below, choice.count),
    ):
        for value in islice(walk([start], step), _NEAR):
            node = value.producer
            if node is not None and node.op in SOFTMAX and value.shape[-1] == size:
                return node
    return None


def _unmoved(value: Value) -> Value:
    """What the value is, in other places and in another dtype."""
    node = value.producer
    while node is not None and (node.op in CAST or (node.op in LAYOUT and node.op not in PART)):
        source = node.inputs[0]
        if source is None or not source.dtype.is_floating_point:
            break
        if not source.shape or source.shape[-1] != value.shape[-1]:
            break
        value, node = source, source.producer
    return value
