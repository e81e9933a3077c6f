"""Whether a recurrence's rows, heads and value features are each read from that of its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from attngraph.analysis.recurrence.apart import is_apart, is_tracked, places, with_nan
from attngraph.analysis.recurrence.mixing import Runs, Trace
from attngraph.analysis.recurrence.terms import Operand, Recurrence
from attngraph.ir import Node, Value
from attngraph.ir.slices import backward_slice


def is_of_own(found: Recurrence, runs: Runs, trace: Trace) -> bool:
    """Whether each row, head and value feature is read from that of the operands alone."""
    operands = [found.query, found.key, found.value, found.beta]
    operands += [None if found.decay is None else found.decay.operand]
    parts = [part for part in operands if part is not None]
    values = {part.value for part in parts}
    _, nodes = backward_slice([found.output.value], values.__contains__)
    region = _Region(found.output, nodes, runs, trace)
    for place in (0, 2, 3):
        along = [found.value] if place == 3 else parts
        shaped = [(part, part.of(trace)) for part in along if part is not None]
        counts = {part: x.shape[place] for part, x in shaped if x is not None}
        sizes = sorted({count for count in counts.values() if count > 1})
        for size in sizes:  # values' heads that share a query are apart from each other, too
            wide = [part for part, count in counts.items() if count % size == 0]
            if not region.keeps_apart(place, size, wide, is_only=len(sizes) == 1):
                return False
    return True


@dataclass(frozen=True)
class _Region:
    """The nodes between operands and an output, and a run of them."""

    output: Operand
    nodes: Sequence[Node]
    runs: Runs
    trace: Trace

    def keeps_apart(
        self, place: int, size: int, operands: Sequence[Operand], *, is_only: bool
    ) -> bool:
        """Whether so many rows, heads or features, or groups of them, are each read from their own.

        With `is_only` all operands that have several have so many.
        """
        own = self.output.axis(place)
        if own is None:
            return True
        if is_only and all(part.merged == 1 for part in (*operands, self.output)):
            axes = {part.value: axis for part in operands if (axis := part.axis(place)) is not None}
            if is_tracked(self.nodes, axes, self.output.value, own):
                return True
        for at in places(size):
            poisoned = self._poisoned(place, at, operands)
            o = self.runs.again(self.nodes, self.trace, poisoned)[self.output.value]
            if o is None or not is_apart(o, own, self.output.spread(place, at, o)):
                return False
        return True

    def _poisoned(
        self, place: int, at: torch.Tensor, operands: Sequence[Operand]
    ) -> Mapping[Value, torch.Tensor]:
        poisoned: dict[Value, torch.Tensor] = {}
        for part in operands:
            x = poisoned.get(part.value, self.trace[part.value])
            axis = part.axis(place)
            if x is not None and axis is not None:
                poisoned[part.value] = with_nan(x, axis, part.spread(place, at, x))
        return poisoned
