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
_LEAST_THAT_CHOOSE = 4
"""The same where each step chooses by values: one by one they go more ways than can be joined."""


def rolled(captured: Captured, trace: Callable[..., Captured]) -> Captured:
    """The model with its loops of many steps as loops, as far as a trace has them so.

    `trace` captures it once more, with loops of so many `steps` as scans.
    """
    leasts = (_LEAST_THAT_CHOOSE, _LEAST) if captured.branches else (_LEAST,)
    for least in leasts:
        if not (steps := _unrolled(captured.graph, least)):
            continue
        with suppress(CaptureError):
            found = trace(steps=steps | {each - 1 for each in steps})  # some begin with a second
            is_rolled = _unrolled(found.graph, least) < steps
            is_better = least == _LEAST or found.branches.keys() < captured.branches.keys()
            if is_rolled and is_better and len(found.graph) < len(captured.graph):
                return found
    return captured


def _unrolled(graph: Graph, least: int) -> frozenset[int]:
    """How many steps the loops have that were unrolled, those of fewer than `least` left out."""
    told = steps_in_a_row(graph, least - 1)  # the first or the last may be left out
    return frozenset(steps for steps, _ in told if steps >= least)
