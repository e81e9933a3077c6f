"""A loop's state that keeps the last inputs of a convolution over the steps.

A step moves them up by one place and puts its own input behind; the convolution reads them and
gives this step's result. That only elements are moved shows on numbers that are all different: each
op between gives its elements' places whatever they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attngraph.analysis.values.running import run_nodes
from attngraph.ir import Node, Value
from attngraph.ir.dims import product, same, substitute, symbols_of
from attngraph.ir.ops import attribute, input_of
from attngraph.ir.slices import backward_slice, forward_slice
from attngraph.ir.traits import CAUSAL_CONVOLUTION, JOIN, LAYOUT

_MOVES = LAYOUT | JOIN
_LEAST = (2, 5)  # a place may be one that is counted by an open size


@dataclass(frozen=True)
class Register:
    """`result` is the convolution of `item`, with a step's elements (B, C), and of the `reach`
    inputs before it; `attrs` are those of `attn.causal_conv`."""

    item: Value
    result: Value
    weight: Value
    bias: Value | None
    reach: int
    attrs: Mapping[str, Any]


def read_register(state: Value, after: Value, rest: Sequence[Value]) -> Register | None:
    """What the step does with a state (B, C, L), next `after`; `rest` are its other results."""
    if len(state.shape) != 3 or not all(isinstance(size, int) for size in state.shape[1:]):
        return None
    item = _item(state, after)
    if item is None:
        return None
    convolutions = [
        node
        for node in backward_slice(rest, lambda value: False)[1]
        if node.op in CAUSAL_CONVOLUTION and _reads(node, state, item)
    ]
    if len(convolutions) != 1:
        return None
    (node,) = convolutions
    leaves, _ = backward_slice(rest, lambda value: value is node.outputs[0])
    if state in leaves:
        return None
    reach = int(node.outputs[1].shape[2])
    weight, bias = input_of(node, "weight"), node.inputs[2] if len(node.inputs) > 2 else None
    return Register(item, node.outputs[0], weight, bias, reach, dict(node.attrs))


def _item(state: Value, after: Value) -> Value | None:
    """What a step appends, where it, or its convolution, moves the rest up by one place."""
    node = after.producer
    if node is not None and node.op in CAUSAL_CONVOLUTION:
        is_next = after is node.outputs[1] and node.inputs[3:] == (state,)
        return input_of(node, "x") if is_next and same(after.shape[2], state.shape[2]) else None
    reached = forward_slice([state], backward_slice([after], lambda value: value is state)[1])
    leaves, nodes = _moved([after], lambda value: value is state or value not in reached)
    items = [leaf for leaf in leaves if leaf is not state]
    if len(items) != 1 or not _is_item(items[0], state):
        return None
    for least in _LEAST:
        found = _run([after, state, items[0]], nodes, leaves, least)
        if found is None:
            return None
        moved, s, x = found
        if not torch.equal(moved, torch.cat([s[..., 1:], x.reshape(*s.shape[:2], 1)], -1)):
            return None
    return items[0]


def _reads(node: Node, state: Value, item: Value) -> bool:
    """Whether a convolution is of the item behind the last places of the state."""
    x, past = input_of(node, "x"), node.inputs[3] if len(node.inputs) > 3 else None
    if past is None or attribute(node, "dilation") != 1 or x.shape[2] != 1:
        return False
    leaves, nodes = _moved([x, item, past, state], lambda value: value is state)
    for least in _LEAST:
        found = _run([x, item, past, state], nodes, leaves, least)
        if found is None:
            return False
        given, own, before, s = found
        is_item = torch.equal(given, own.reshape(*s.shape[:2], 1))
        if not is_item or not torch.equal(before, s[..., s.shape[-1] - before.shape[-1] :]):
            return False
    return True


def _is_item(item: Value, state: Value) -> bool:
    return item.dtype == state.dtype and same(product(item.shape), product(state.shape[:2]))


def _moved(
    values: Sequence[Value], is_cut: Callable[[Value], bool]
) -> tuple[list[Value], list[Node]]:
    """What the values' elements come from, through ops that only move them."""

    def is_leaf(each: Value) -> bool:
        return is_cut(each) or each.producer is None or each.producer.op not in _MOVES

    return backward_slice(values, is_leaf)


def _run(
    wanted: Sequence[Value], nodes: Sequence[Node], leaves: Sequence[Value], least: int
) -> list[torch.Tensor] | None:
    """The wanted values, from numbers that are all different; open sizes begin at `least`."""
    names = sorted(
        {str(each) for leaf in leaves for size in leaf.shape for each in symbols_of(size)}
    )
    sizes = {name: least + at for at, name in enumerate(names)}
    memory: dict[Value, Any] = {}
    start = 0
    for leaf in leaves:
        shape = [int(size) for size in substitute(list(leaf.shape), sizes)]
        count = torch.Size(shape).numel()
        memory[leaf] = torch.arange(start, start + count).reshape(shape)
        start += count
    made = run_nodes(nodes, memory, sizes)
    return None if made is None else [made[value] for value in wanted]
