"""What a router is: how its scores decide which experts a row takes, and with what weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from attngraph.analysis.experts.gates import is_one_hot, others_in
from attngraph.analysis.experts.reading import Choice
from attngraph.analysis.experts.uniform import is_sized
from attngraph.analysis.masks.row_policy import WEAKEST_FILL
from attngraph.analysis.values.intervals import Intervals
from attngraph.analysis.values.scalars import keeps_values, uniform, widens
from attngraph.analysis.walks import ahead, made_of
from attngraph.ir import Node, TensorType, Value
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import (
    ADDITIVE,
    CAST,
    CHOICE,
    COMPARISON,
    COMPLEMENT,
    FILL,
    GATHERED,
    LAYOUT,
    MULTIPLICATION,
    ONE_HOT,
    PART,
    SCATTER,
    SHIFT,
    SOFTMAX,
    SUM,
    TRUTH,
)

_SMOOTH = (  # of scores and the choice made of them
    SOFTMAX | GATHERED | LAYOUT | CAST | SUM | MULTIPLICATION | ADDITIVE | SHIFT
)

_NEAR = 24  # values in which a softmax is looked for


def softmax_of(choice: Choice, weights: Value) -> Value | None:
    """The scores (…, experts) whose largest are chosen, and whose softmax, over all of them or over
    those, decides their weights, by nothing that may switch; None where something else does too.

    The weights are of each choice, or a gate.
    """
    scores = _unmoved(choice.scores)
    softmax = scores.producer
    if softmax is not None and softmax.op in SOFTMAX:
        source = softmax.source
        if attribute(softmax, "dim") % len(source.shape) != len(source.shape) - 1:
            return None
        scores = _narrowest(source)
    cut = {scores, choice.indices}
    leaves, nodes = backward_slice([weights], lambda value: value in cut or value.is_constant)
    if not all(leaf in cut or leaf.is_constant for leaf in leaves):
        return None
    for node in nodes:
        if node is choice.node or _sets_others(choice, node):
            continue
        if node.op in PART or node.op not in _SMOOTH:
            return None
        if node.op not in LAYOUT and is_sized(node):
            return None
        if node.op in CAST and not keeps_values(weights.dtype, node.output.dtype):
            return None
    return scores


def fill_of(choice: Choice) -> float | None:
    """A number that some scores are filled with although others may be below it."""
    node = choice.scores.producer
    if node is None or node.op not in CHOICE:
        return None
    sides = [value for value in node.operands if value.dtype != torch.bool]
    fills = [fill for value in sides if (fill := uniform(value)) is not None]
    least = min((Intervals().of(value)[0] for value in sides if uniform(value) is None), default=0)
    return next((fill for fill in fills if max(least, WEAKEST_FILL) < fill), None)


def decides(choice: Choice, gate: Value) -> Value | None:
    """The last scores (…, experts) that both the choice and a gate are functions of."""
    _, nodes = backward_slice([gate, choice.scores], lambda value: value.is_constant)
    for node in reversed(nodes):
        for value in node.outputs:
            if not value.shape or value.shape[-1] != choice.experts:
                continue
            if not isinstance(value.type, TensorType) or not value.dtype.is_floating_point:
                continue
            if _follow_from(value, [gate, choice.scores]):
                return value
    return None


def _follow_from(source: Value, values: Sequence[Value]) -> bool:
    leaves, _ = backward_slice(values, lambda value: value is source or value.is_constant)
    return all(leaf is source or leaf.is_constant for leaf in leaves)


def _sets_others(choice: Choice, node: Node) -> bool:
    """Whether a node of a gate does no more than tell the experts that a row takes from others."""
    if node.op in FILL:
        return True
    if node.op in SCATTER | CHOICE and others_in(choice, node.output) is not None:
        return True
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    if all(value.dtype.is_floating_point for value in values):
        return False
    if node.op not in ONE_HOT | COMPLEMENT | COMPARISON | TRUTH | SUM | CAST | LAYOUT:
        return False
    leaves, _ = backward_slice(node.outputs, lambda value: value is choice.indices)
    if not all(leaf is choice.indices or leaf.is_constant for leaf in leaves):
        return False
    return is_one_hot(choice, node.output) or others_in(choice, node.output) is not None


def softmax_near(choice: Choice) -> Node | None:
    """The softmax over all scores before the choice, or over those that were chosen."""
    for near, size in (
        (made_of(choice.scores), choice.experts),
        (ahead(choice.node.outputs[0], lambda node: True, None), choice.count),
    ):
        for value in islice(near, _NEAR):
            node = value.producer
            if node is not None and node.op in SOFTMAX and value.shape[-1] == size:
                return node
    return None


def _narrowest(value: Value) -> Value:
    """The value before any cast that keeps its numbers."""
    while (node := value.producer) is not None and widens(node) and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


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
