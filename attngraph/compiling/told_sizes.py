"""Sizes as a note tells them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import sympy

from attngraph.ir.conditions import Condition, at_sizes, shown
from attngraph.ir.dims import DIVIDING, EXTREMES, DimInfo, functions_of, symbol, symbols_of

_HARD = DIVIDING | {each.__name__ for each in EXTREMES}
_LISTED = 64
_FEW = 4  # runs of sizes that are listed one by one


def where(conditions: Sequence[Condition], dims: Mapping[str, DimInfo]) -> str:
    """Where all conditions hold, for people.

    Those of one dim that divide it, or take the smaller of two sizes, as torch's own questions do,
    are hard to read: the sizes that they leave out are listed.
    """
    names = {name for condition in conditions for name in symbols_of(condition)}
    if len(names) != 1 or not functions_of([*conditions]) & _HARD:
        return " and ".join(map(shown, conditions))
    (name,) = names
    low = dims[name].low if name in dims else 1
    tried = range(low, low + _LISTED)
    left_out = [size for size in tried if not _hold(conditions, name, size)]
    if not left_out or len(left_out) == len(tried):
        return " and ".join(map(shown, conditions))
    return f"{name} is none of {_listed(left_out, tried[-1])}"


def _hold(conditions: Iterable[Condition], name: str, size: int) -> bool:
    at = {symbol(name): sympy.Integer(size)}
    return all(at_sizes(condition, at) == sympy.true for condition in conditions)


def _listed(sizes: Sequence[int], last: int) -> str:
    """`1 to 8, 16, 24, …`: a run that reaches the last size, or more than a few runs, go on."""
    starts = [sizes[0], *(b for a, b in pairwise(sizes) if b > a + 1)]
    ends = [*(a for a, b in pairwise(sizes) if b > a + 1), sizes[-1]]
    runs = [
        str(a) if a == b else f"{a} and more" if b == last else f"{a} to {b}"
        for a, b in zip(starts, ends, strict=True)
    ]
    return ", ".join([*runs[:_FEW], "…"] if len(runs) > _FEW else runs)
