"""Loops over time of a fixed length: traced once more, as scans.

A trace unrolls them, however many steps they have: thousands of nodes, of which a recurrence is
harder to read, and which run no faster than the same steps in a scan.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from attngraph.analysis.recurrence.unrolled import steps_in_a_row
from attngraph.errors import CaptureError
from attngraph.frontend.capture import Captured
from attngraph.ir.graph import Graph

_LEAST = 16
"""Steps from which on a scan takes no longer than the steps one by one."""


def rolled(captured: Captured, trace: Callable[..., Captured]) -> Captured:
    """The model with its loops of many steps as loops, as far as a trace has them so.

    `trace` captures it once more, with loops of so many `steps` as scans.
    """
    steps = _unrolled(captured.graph)
    if steps:
        with suppress(CaptureError):
            found = trace(steps=steps | {each - 1 for each in steps})  # some begin with a second
            if len(found.graph) < len(captured.graph) and _unrolled(found.graph) < steps:
                return found
    return captured


def _unrolled(graph: Graph) -> frozenset[int]:
    """How many steps the loops have that were unrolled, those of few left out."""
    told = steps_in_a_row(graph, _LEAST - 1)  # the first or the last may be left out
    return frozenset(steps for steps, _ in told if steps >= _LEAST)
