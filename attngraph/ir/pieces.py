"""Conditions on one size that are proved piece by piece of its range.

Of 2·(steps that n has passed) < n, bounds over the whole range know only that there are no more
than all steps. Between two sizes that are close to each other they are exact.
"""

from __future__ import annotations

from contextlib import suppress

import sympy
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

_MOST = 300
"""Pieces that are tried; a condition with more is left open."""
_FAR = 2**31


def holds_in_pieces(condition: sympy.Basic, low: int, high: int | None) -> bool:
    """Whether a relation of one size is proved at each from `low` to `high`, or without an end."""
    if not isinstance(condition, sympy.Rel) or len(condition.free_symbols) != 1:
        return False
    (size,) = condition.free_symbols
    difference = condition.lhs - condition.rhs
    left: list[tuple[int, int | None]] = [(low, high)]
    for _ in range(_MOST):
        if not left:
            return True
        first, last = left.pop()
        if _is_proved(condition, difference, size, first, last):
            continue
        if first == last or first > _FAR:
            return False
        middle = 2 * first + 1 if last is None else (first + last) // 2
        left += [(middle + 1, last), (first, middle)]
    return False


def _is_proved(
    condition: sympy.Rel, difference: sympy.Expr, size: sympy.Symbol, first: int, last: int | None
) -> bool:
    with suppress(Exception):  # torch bounds what it knows; of anything else nothing is known
        end = sympy.oo if last is None else sympy.Integer(last)
        found = bound_sympy(difference, {size: ValueRanges(sympy.Integer(first), end)})
        ends = [condition.func(each, 0) for each in (found.lower, found.upper)]
        if isinstance(condition, sympy.Ne):
            return bool(found.lower > 0) or bool(found.upper < 0)
        return all(each == sympy.true for each in ends)
    return False
