"""Sizes as a note tells them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from attngraph.ir.conditions import Condition, shown
from attngraph.ir.dims import DIVIDING, EXTREMES, DimInfo, functions_of, symbols_of
from attngraph.ir.ranges import Ranges

_HARD = DIVIDING | {each.__name__ for each in EXTREMES}
_TRIED = 1024
_FEW = 4  # runs of sizes that are listed one by one


def where(conditions: Sequence[Condition], dims: Mapping[str, DimInfo]) -> str:
    """Where all conditions hold, for people.

    Those of one dim that divide it, or take the smaller of two sizes, as torch's own questions do,
    are hard to read: the sizes that they leave out are listed, if all are seen to end.
    """
    names = {name for condition in conditions for name in symbols_of(condition)}
    if len(names) == 1 and functions_of([*conditions]) & _HARD:
        (name,) = names
        low = dims[name].low if name in dims else 1
        known = Ranges({}, tuple(conditions))
        left_out = [n for n in range(low, low + _TRIED) if known.broken({name: n})]
        runs = _runs(left_out)
        if len(runs) > _FEW:
            runs = [*runs[:_FEW], "…"]
        elif left_out[-1:] == [low + _TRIED - 1]:
            runs = []  # the last of them may not end there
        if runs:
            return f"{name} is none of {', '.join(runs)}"
    return " and ".join(map(shown, conditions))


def _runs(sizes: Sequence[int]) -> list[str]:
    """`1 to 8`, `16`, `24`."""
    starts = [*sizes[:1], *(b for a, b in pairwise(sizes) if b > a + 1)]
    ends = [*(a for a, b in pairwise(sizes) if b > a + 1), *sizes[-1:]]
    return [str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
