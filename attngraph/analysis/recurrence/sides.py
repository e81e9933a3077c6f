"""Whether trials of a step saw all that it may do.

That a step makes of drawn rows what a cell makes of them says something of all others only where
nothing in it can switch. An analytic function that agrees on drawn rows agrees everywhere. One that
is pieced together of a few such, as relu, a clamp or a choice by a comparison, may stand in a step
too, but each of its pieces has to be seen: a memory that is cut at 1000 is as good as one that
isn't, on rows that never come so far. What has more pieces, as a rounding has, or looks for NaN,
isn't known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attngraph.analysis.recurrence.steps import Step
from attngraph.analysis.recurrence.uniform import is_analytic
from attngraph.analysis.values.scalars import keeps_values
from attngraph.ir import Node
from attngraph.ir.slices import forward_slice
from attngraph.ir.traits import (
    ADDMM,
    CAST,
    CHOICE,
    CLAMP,
    COMPARISON,
    GATHERED,
    LINEAR,
    LOGICAL,
    MAGNITUDE,
    MAXIMUM,
    MINIMUM,
    RANDOM,
    SMOOTH,
)

_SWITCHES = CLAMP | COMPARISON | LOGICAL | MAGNITUDE | MAXIMUM | MINIMUM


class Sides:
    """The sides of each node of a step at which it switches, and which of them were seen."""

    def __init__(self, step: Step) -> None:
        varying = forward_slice([*step.states, *step.inputs], step.nodes)
        self._nodes = [node for node in step.nodes if not varying.isdisjoint(node.outputs)]
        given = {value for node in step.nodes for value in node.inputs if value is not None}
        self._fixed = given - varying
        self._dtype = step.states[0].dtype
        self._seen: dict[Node, list[bool]] = {node: [] for node in self._nodes if _switches(node)}
        self.are_known = not any(node.op in RANDOM for node in step.nodes)
        self.are_known &= all(node in self._seen or self._is_one(node) for node in self._nodes)

    def note(self, node: Node, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Records which sides of a node a trial reached."""
        if node in self._seen:
            sides = [bool(side.any()) for side in _sides(node, operands, results[0])]
            before = self._seen[node] or [False] * len(sides)
            self._seen[node] = [a or b for a, b in zip(before, sides, strict=True)]

    def are_seen(self) -> bool:
        """Whether the trials reached every side."""
        return self.are_known and all(sides and all(sides) for sides in self._seen.values())

    def _is_one(self, node: Node) -> bool:
        """Whether a node is one function of what varies, wherever that is."""
        if node.op in CAST:  # also one of a bool
            dtype = node.output.dtype
            return dtype.is_floating_point and keeps_values(self._dtype, dtype)
        if node.op in CHOICE:
            return True  # by a predicate whose sides are counted where it is made
        if node.op in GATHERED:
            return all(value in self._fixed for value in node.inputs[1:])
        return node.op in SMOOTH | LINEAR | ADDMM or is_analytic(node, self._fixed, self._dtype)


def _switches(node: Node) -> bool:
    """Whether it has two sides or three, told by its operands and its result."""
    if node.op in CLAMP and len(node.inputs) > 1:
        return False
    return node.op in _SWITCHES or node.op == "aten.relu"


def _sides(node: Node, operands: Sequence[Any], result: Any) -> list[torch.Tensor]:
    """Where each side is taken."""
    x = operands[0]
    if node.op in COMPARISON | LOGICAL:
        return [result.bool(), ~result.bool()]
    if node.op in MAXIMUM | MINIMUM:
        return [x < operands[1], x > operands[1]]
    if node.op in CLAMP:
        low, high = (node.attrs.get(name) for name in ("min", "max"))
        below = [] if low is None else [x < low]
        above = [] if high is None else [x > high]
        return [*below, *above, ~torch.stack([*below, *above]).any(0)]
    return [x < 0, x > 0]
