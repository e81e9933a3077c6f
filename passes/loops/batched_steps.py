"""Batches the nodes of one step of a loop over all steps: values (…) become (T, …)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attngraph.analysis.rows.batching import batched
from attngraph.analysis.rows.batching_rules import Batched
from attngraph.ir import Builder, Dim, Node, Value
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import RESHAPE


@dataclass(frozen=True)
class Plan:
    """How to build `root` for all steps. `leaves` are loop-invariant: every step reads the same."""

    root: Value
    leaves: tuple[Value, ...]
    nodes: tuple[tuple[Node, str, Mapping[str, Any]], ...]

    def make(
        self, build: Builder, known: dict[Value, Value], outside: Callable[[Value], Value]
    ) -> Value:
        """The root for all steps. `known` maps values of one step to batched ones; it is extended.

        `outside` maps a leaf to its value in the graph. Raises IRError where an op rejects its
        batched operands.
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
    """A plan for that many steps; None where an op has no batching rule, or the root depends on
    something that is neither `varying` (it differs from step to step) nor `outside` the loop.
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
        behind = [len(v.shape) if v is not None and v in stacked else None for v in node.inputs]
        rule = _in_front(node, behind, steps) or batched(node, behind, steps)
        if rule is None or any(rule.behind != len(value.shape) for value in node.outputs):
            return None
        made.append((node, rule.op, rule.attrs))
        stacked.update(node.outputs)
    return Plan(root, tuple(fixed), tuple(made))


def _in_front(node: Node, behind: Sequence[int | None], steps: Dim) -> Batched | None:
    """A reshape of a value with all steps in front: they stay there, whatever the other axes."""
    source = node.inputs[0] if node.op in RESHAPE and len(node.inputs) == 1 else None
    if source is None or behind[0] != len(source.shape):
        return None
    shape = node.output.shape
    return Batched("aten.reshape", {"shape": [steps, *shape]}, len(shape))
