"""Loops over the blocks of an axis of which the one at its end may be shorter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attngraph.frontend.rewording.loop_choices import Known, as_tensor
from attngraph.frontend.rewording.loop_lists import Unread
from attngraph.frontend.rewording.loop_ranges import Range, Slices
from attngraph.frontend.rewording.loop_scan import scanned


@dataclass(frozen=True)
class Ends:
    """The results of steps of which one took a shorter block: those of the others, and its own."""

    rows: Any
    shorter: Any


def with_shorter_one(
    steps: Range,
    taken: Sequence[Slices],
    call: Callable[..., Any],
    given: Sequence[Any],
    wanted: Sequence[bool],
    kept: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """The steps of whole blocks in a scan, and the one at the end of the axis as it stands: its
    block has as many rows as are left, from one up to those of the others. It is the last step, or
    the first one of those that go backwards.

    There may be no others, so the scan begins with one more that counts for nothing.
    """
    if any(steps.is_limited(*each) and not steps.is_cut(*each) for each in taken):
        raise Unread("blocks that end where others may be cut")
    check: Callable[[Any], None] = torch._check
    for left, size in steps.left(taken):  # which torch finds in no expression of the length
        check(left >= 1)
        check(left <= size)
    others, least = steps.others(), steps.least(0)

    def shorter(given: Sequence[Any]) -> Any:
        parts = [steps.of_shorter(*each) for each in taken]
        known = Known(least, False, steps.shorter)
        return call(known, as_tensor(steps.shorter), given, parts, kept)

    is_first = steps.step < 0
    if is_first:
        given, own = shorter(given)
    slices = [others.led_by_zeros(*each) for each in taken]
    step = partial(call, Known(least, False))
    after, made = scanned(others.led(), others, step, given, slices, wanted, kept)
    if not is_first:
        after, own = shorter(after)
    return after, [
        () if each == () else Ends(rows, each) for rows, each in zip(made, own, strict=True)
    ]
