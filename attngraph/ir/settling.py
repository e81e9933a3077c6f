"""Sizes as simple as the ranges of their dims make them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import sympy
from torch.utils._sympy import functions as torch_sympy

from attngraph.ir.dims import EXTREMES, LARGEST, Dim, DimInfo, as_dim, range_of

_MOST_TERMS = 64  # of a sum that is factored, which takes long for more


def _is_never_below_zero(total: sympy.Expr, infos: Mapping[str, DimInfo]) -> bool:
    """Whether a sum is provably never below 0, as it is or as a product: b·s − b is b·(s − 1)."""
    if range_of(total, infos).lower >= 0:
        return True
    if not total.is_Add or len(total.args) > _MOST_TERMS:
        return False
    product = sympy.factor_terms(total)
    return bool(product.is_Mul and range_of(product, infos).lower >= 0)


def bounded(infos: Mapping[str, DimInfo], conditions: Iterable[Any]) -> dict[str, DimInfo]:
    """The dims, none larger than a condition of it alone leaves it: n ≤ 32, as a table of as many
    rows has it.
    """
    found = dict(infos)
    for condition in conditions:
        if not isinstance(condition, sympy.Le | sympy.Ge):
            continue
        dim, most = condition.lts, condition.gts
        if dim.is_Symbol and most.is_Integer and (info := found.get(dim.name)) is not None:
            high = int(most) if info.high is None else min(int(most), info.high)
            found[dim.name] = replace(info, high=high)
    return found


def settled(value: Any, infos: Mapping[str, DimInfo], known: dict[Any, Dim] | None = None) -> Any:
    """An attribute or size without each `max`, `min` and quotient that the dims' ranges decide.

    `known` is what was found of expressions before, which are many times in a graph; it is
    extended.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(settled(item, infos, known) for item in value)
    if not isinstance(value, sympy.Expr) or not value.has(*EXTREMES, torch_sympy.FloorDiv):
        return value
    known = {} if known is None else known
    if value not in known:
        known[value] = _settled(value, infos)
    return known[value]


def _settled(value: sympy.Expr, infos: Mapping[str, DimInfo]) -> Dim:
    def decided(expr: Any) -> sympy.Expr:
        largest = isinstance(expr, LARGEST)
        kept = list(expr.args)
        for term in expr.args:
            others = [other for other in kept if other is not term]
            gaps = [other - term if largest else term - other for other in others]
            if any(_is_never_below_zero(sympy.expand(gap), infos) for gap in gaps):
                kept.remove(term)
        return expr.func(*kept) if len(kept) > 1 else kept[0]

    # A range that begins at 2 is torch.export's own, of a dim that 1 is checked for.
    from_one = {n: replace(i, low=1) if i.low == 2 else i for n, i in infos.items()}

    def counted(quotient: Any) -> sympy.Expr:
        found = range_of(quotient, from_one)
        return found.lower if found.lower == found.upper else quotient

    found = value.replace(lambda expr: isinstance(expr, EXTREMES), decided)
    found = found.replace(lambda expr: isinstance(expr, torch_sympy.FloorDiv), counted)
    return as_dim(sympy.expand(found)) if found != value else value
