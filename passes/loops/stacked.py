"""Nodes of one step of a loop, made for all steps at once: on (T, …) in place of (…)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from attngraph.analysis.attention.strays import is_pointwise
from attngraph.ir import Builder, Dim, Node, TensorType, Value
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice

_NAMES = "cat select.int slice.Tensor split.Tensor split_with_sizes chunk softmax.int squeeze.dim"
_ALONG = frozenset(f"aten.{name}" for name in [*_NAMES.split(), "log_softmax.int"])
_MAKES_AXIS = frozenset(["aten.stack", "aten.unsqueeze"])
_LAST_AXES = frozenset(["aten.layer_norm", "aten.rms_norm", "attn.rms_norm"])
_SIZES = {"aten.reshape": "shape", "aten.expand": "size"}
_PRODUCTS = {"aten.linear": "aten.linear", "aten.matmul": "aten.matmul", "aten.mm": "aten.matmul"}


@dataclass(frozen=True)
class Plan:
    """How to make `root` from values of a step and from `leaves`, which every step reads alike."""

    root: Value
    leaves: tuple[Value, ...]
    nodes: tuple[tuple[Node, str, Mapping[str, Any]], ...]

    def make(
        self, build: Builder, known: dict[Value, Value], outside: Callable[[Value], Value]
    ) -> Value:
        """The root for all steps. `known` maps values of a step to stacked ones, and grows.

        `outside` gives what a leaf is in the graph. Raises IRError where an op rejects the stack.
        """
        for leaf in self.leaves:
            if leaf not in known:
                known[leaf] = outside(leaf)
        for node, op, attrs in self.nodes:
            if node.outputs[0] not in known:
                inputs = [None if value is None else known[value] for value in node.inputs]
                made = build.node(op, *inputs, **attrs)
                known.update(zip(node.outputs, made.outputs, strict=True))
        return known[self.root]


def plan(
    root: Value, varying: Collection[Value], steps: Dim, outside: Callable[[Value], bool]
) -> Plan | None:
    """For so many steps; None where the root needs anything else, or an op can't be made so.

    `varying` are the values that have a place per step, and `outside` says what has none.
    """
    leaves, nodes = backward_slice([root], varying.__contains__)
    fixed = [leaf for leaf in leaves if leaf not in varying]
    if not all(map(outside, fixed)) or not any(leaf in varying for leaf in leaves):
        return None
    stacked = {leaf for leaf in leaves if leaf in varying}
    made: list[tuple[Node, str, Mapping[str, Any]]] = []
    for node in nodes:
        if stacked.isdisjoint(node.inputs):
            made.append((node, node.op, node.attrs))
            continue
        attrs = _attrs(node, stacked, steps)
        if attrs is None:
            return None
        made.append((node, _PRODUCTS.get(node.op, node.op), attrs))
        stacked.update(node.outputs)
    return Plan(root, tuple(fixed), tuple(made))


def _attrs(node: Node, stacked: set[Value], steps: Dim) -> Mapping[str, Any] | None:
    """The attributes with a step's axes one further right; None where that isn't known."""
    operands = [value for value in node.inputs if value is not None]
    if not all(isinstance(value.type, TensorType) for value in operands):
        return None
    varying = [value for value in operands if value in stacked]
    ranks = {len(value.shape) for value in varying}
    if is_pointwise(node):
        return node.attrs if ranks == {len(node.outputs[0].shape)} else None
    if node.op in _PRODUCTS or node.op in _LAST_AXES:
        return node.attrs if varying == [node.inputs[0]] else None
    if node.op == "aten.embedding":
        return node.attrs if varying == [node.inputs[1]] else None
    if node.op in _SIZES:
        name = _SIZES[node.op]
        sizes = attribute(node, name)
        return None if -1 in sizes else {**node.attrs, name: [steps, *sizes]}
    if node.op == "aten.permute":
        dims = [dim % len(operands[0].shape) + 1 for dim in attribute(node, "dims")]
        return {"dims": [0, *dims]}
    makes = node.op in _MAKES_AXIS
    if not makes and node.op not in _ALONG:
        return None
    if len(varying) != len(operands) or len(ranks) != 1:
        return None
    rank, dim = ranks.pop() + makes, attribute(node, "dim")
    return {**node.attrs, "dim": dim % rank + 1} if isinstance(dim, int) else None
