"""What is known of a size that is a rounded share of another one: int(0.7 · n) is at most n."""

from __future__ import annotations

from typing import Any

import sympy
from torch.utils._sympy import functions as torch_sympy

_DOWN = (torch_sympy.FloorToInt, torch_sympy.TruncToInt)
"""Both are the floor of what isn't below 0."""
_UP, _NEAREST = torch_sympy.CeilToInt, torch_sympy.RoundToInt
_SLACK = sympy.Rational(1, 1 << 52)
"""More than the share of itself by which a product or quotient of floats may be off."""


def without_roundings(condition: sympy.Rel) -> tuple[sympy.Rel, sympy.Expr] | None:
    """(a condition without the rounding, what has to be at least 0 for it), from which it follows.

    The sides are whole numbers, and one of them has a rounded share of a size once: ⌈x⌉ ≤ m where
    x ≤ m, ⌊x⌋ ≤ m where x < m + 1, and so on. None of any other condition.
    """
    if isinstance(condition, (sympy.Eq, sympy.Ne)):
        return None
    is_less = isinstance(condition, (sympy.Le, sympy.Lt))
    left, right = condition.args if is_less else condition.args[::-1]
    strict = isinstance(condition, (sympy.Lt, sympy.Gt))
    total = sympy.expand(left - right) + int(strict)  # is to be at most 0
    found = [term for term in sympy.Add.make_args(total) if term.has(*_DOWN, _UP, _NEAREST)]
    if len(found) != 1:
        return None
    rest = total - found[0]
    sign, rounded = found[0].as_coeff_Mul()
    share = _share(rounded.args[0]) if isinstance(rounded, (*_DOWN, _UP, _NEAREST)) else None
    if share is None or sign not in (1, -1) or not rest.is_integer:
        return None
    factor, size = share
    real = sign * factor * (1 + sign * _SLACK) * size + rest
    is_tight = isinstance(rounded, _UP if sign == 1 else _DOWN)
    if is_tight:
        return sympy.Le(real, 0), size
    room = sympy.Rational(1, 2) if isinstance(rounded, _NEAREST) else 1
    return sympy.Lt(real - room, 0), size


def _share(expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
    """(0.7, n) of 0.7 · n or n / 3 in floats, with the number that the float is."""
    if isinstance(expr, (torch_sympy.IntTrueDiv, torch_sympy.FloatTrueDiv)):
        size, by = expr.args
        number: Any = by
    else:
        number, size = expr.as_coeff_Mul()
        by = None
    if isinstance(size, torch_sympy.ToFloat):
        size = size.args[0]
    if not (number.is_number and number.is_positive and size.is_integer):
        return None
    exact = sympy.Rational(*float(number).as_integer_ratio())
    return (exact if by is None else 1 / exact), size
