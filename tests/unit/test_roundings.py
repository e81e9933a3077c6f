"""Rounded shares of a size: what follows is true of Python's numbers, at every size."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import pytest
import sympy
from torch.utils._sympy import functions as torch_sympy

from attngraph.ir.conditions import always
from attngraph.ir.dims import DimInfo

N = sympy.Symbol("n", integer=True, positive=True)
INFOS = {"n": DimInfo(low=1)}
ROUNDINGS: dict[Callable[[sympy.Expr], sympy.Expr], Callable[[float], int]] = {
    torch_sympy.TruncToInt: math.trunc,
    torch_sympy.FloorToInt: math.floor,
    torch_sympy.CeilToInt: math.ceil,
    torch_sympy.RoundToInt: round,
}
RELATIONS = {
    sympy.Le: operator.le,
    sympy.Lt: operator.lt,
    sympy.Ge: operator.ge,
    sympy.Gt: operator.gt,
}
FACTORS = (0.1, 0.3, 0.5, 0.7, 0.999, 1.1, 2.5)


def _share(factor: float) -> sympy.Expr:
    return sympy.Float(factor, precision=53) * torch_sympy.ToFloat(N)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("relation", RELATIONS)
def test_no_size_is_against_what_is_decided(
    rounding: type[sympy.Expr], relation: type[sympy.Rel]
) -> None:
    decided = 0
    for factor in FACTORS:
        for offset in (-1, 0, 1):
            for sign in (1, -1):
                side = sign * rounding(_share(factor)) + offset
                if always(relation(side, sign * N), INFOS) is not True:
                    continue
                decided += 1
                for n in range(1, 300):
                    number = sign * ROUNDINGS[rounding](factor * n) + offset
                    assert RELATIONS[relation](number, sign * n), (factor, offset, sign, n)
    assert decided > 3


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_share_is_no_more_than_the_whole(rounding: type[sympy.Expr]) -> None:
    kept = rounding(_share(0.7))
    assert always(sympy.Le(kept, N), INFOS) is True
    assert always(sympy.Ge(N, rounding(torch_sympy.IntTrueDiv(N, 3))), INFOS) is True
    assert always(sympy.Le(rounding(_share(1.1)), N), INFOS) is not True


def test_what_may_be_below_zero_is_left_open() -> None:
    """int() of what is below 0 rounds up."""
    cut = torch_sympy.TruncToInt(sympy.Float(0.5) * torch_sympy.ToFloat(N - 9))
    assert always(sympy.Le(2 * N + cut, 3 * N - 5), INFOS) is not True
    assert always(sympy.Le(cut, N - 6), INFOS) is not True
