"""Which form is faster at which number of queries, from times that were measured."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TypeAlias

from attngraph.export.families import nearest, own_family
from attngraph.export.kernels.facts import BIAS, BOOL, CAUSAL, LENGTHS, SINKS, Facts

Times: TypeAlias = Mapping[str, Mapping[int, float]]
"""Milliseconds by the name of a form, then by the number of queries."""

MARGIN = 1.05
"""The gain for which a form replaces one that the table lists before it, or is worth a branch."""

_NARROW = 512
"""The widest window for which the times at 128 say more than those without any."""


@dataclass(frozen=True)
class Split:
    """The fastest form from `start` queries on, and the one for fewer ("" where start is 0)."""

    long: str
    start: int = 0
    short: str = ""


@functools.cache
def _measured() -> Mapping[str, Mapping[str, Times]]:
    """What bench/block_causal.py measured, by the family and the case that `case_of` names."""
    text = files("attngraph.export.kernels").joinpath("measured.json").read_text()
    return {
        family: {
            case: {form: {int(n): ms for n, ms in row.items()} for form, row in rows.items()}
            for case, rows in found["milliseconds"].items()
        }
        for family, found in json.loads(text)["families"].items()
    }


def timed_family(family: str | None) -> str:
    """The family whose times decide for another, by default for this machine's."""
    return nearest(family or own_family(), _measured())


def case_of(facts: Facts) -> str:
    """The measured case that a site is nearest to."""
    what = ""
    if SINKS in facts.features:
        what = "sinks"
    elif LENGTHS in facts.features:
        what = "lengths"
    elif {BOOL, BIAS} & facts.features:
        what = "masked"
    elif 0 < facts.window <= _NARROW:
        what = "window"
    if CAUSAL in facts.features:
        return f"causal, {what}" if what else "causal"
    return what or "unmasked"


def measured(facts: Facts, family: str | None = None) -> Times:
    """Times of the forms on the CPU for sites like this one; empty where none were measured.

    `family` is that of the CPU it will run on, None for this machine's.
    """
    return _measured()[timed_family(family)].get(case_of(facts), {})


def split(times: Times, lengths: tuple[int, int | None]) -> Split | None:
    """The fastest forms over a range of lengths; None where none of them has been timed.

    At most one branch, where the time over the whole range is least, each length counting the same;
    none unless it gains MARGIN, on the average, at the lengths that it gives another form.
    """
    known = sorted({length for row in times.values() for length in row})
    grid = within(known, lengths)
    forms = [form for form, row in times.items() if all(length in row for length in grid)]
    if not forms or not grid:
        return None
    whole = _best(times, forms, grid)
    found, gain = Split(whole), 0.0
    for start in range(1, len(grid)):
        short, long = _best(times, forms, grid[:start]), _longest(times, forms, grid[start:])
        spent = _total(times, short, grid[:start]) + _total(times, long, grid[start:])
        saved = _total(times, whole, grid) - spent
        changed = start * (short != whole) + (len(grid) - start) * (long != whole)
        needed = math.log(MARGIN) * changed
        if short != long and saved > max(needed, gain):
            found, gain = Split(long, grid[start], short), saved
    return found


def _best(times: Times, forms: list[str], lengths: list[int]) -> str:
    """The fastest form over some lengths, or an earlier one that is hardly slower."""
    return _fast(times, forms, lengths)[0]


def _longest(times: Times, forms: list[str], lengths: list[int]) -> str:
    """Among the forms that are fast over some lengths, the fastest at the longest of them."""
    return min(_fast(times, forms, lengths), key=lambda form: times[form][lengths[-1]])


def _fast(times: Times, forms: list[str], lengths: list[int]) -> list[str]:
    """The forms that are within MARGIN of the fastest over some lengths."""
    least = min(_total(times, form, lengths) for form in forms)
    bound = least + math.log(MARGIN) * len(lengths)
    return [form for form in forms if _total(times, form, lengths) <= bound]


def _total(times: Times, form: str, lengths: list[int]) -> float:
    """The sum of the logarithms, so that each length counts the same."""
    return sum(math.log(times[form][length]) for length in lengths)


def within(known: list[int], lengths: tuple[int, int | None]) -> list[int]:
    """The measured lengths of a range, and the one that its lower end is nearest to from above."""
    low, high = lengths
    if not known:
        return []
    first = max((length for length in known if length <= low), default=known[0])
    return [n for n in known if n >= first and (high is None or n <= high or n == first)]
