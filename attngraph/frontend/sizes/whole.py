"""Roots of squares and quotients without a remainder, which torch leaves as they are written.

Vision models find the sides of an image in its number of patches: where an input has sides of 2·s,
`int(math.sqrt(x.shape[1]))` is trunc(√(4·s²)), and torch then can't tell that it is 2·s. Nor does
its quotient tell that s²·t² // (s·t) is s·t, as einsum has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import sympy
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy import functions as torch_sympy
from torch.utils._sympy.value_ranges import bound_sympy

from attngraph.ir.dims import as_dim, divide

_ROUNDING = ("_trunc", "_floor", "_ceil", "_round")


@contextmanager
def whole_quotients() -> Iterator[None]:
    """Within it, a quotient without a remainder is what it comes to, at every size."""
    quotient: Callable[[Any, Any], Any] = torch_sympy.FloorDiv.eval

    def divided(cls: type, base: Any, divisor: Any) -> Any:
        found = quotient(base, divisor)
        if found is not None or divisor.is_number or not _share_a_name(base, divisor):
            return found
        exact = divide(as_dim(base), as_dim(divisor))
        return None if exact is None else sympy.sympify(exact)

    with patch.object(torch_sympy.FloorDiv, "eval", classmethod(divided)):
        yield


@contextmanager
def whole_roots(settle: Callable[[Any], None]) -> Iterator[None]:
    """Within it, the rounded root of a square is what was squared.

    In float64 it is exact for squares below 2⁵³, beyond which no tensor's size is. `settle` takes
    an expression, and has those of its sizes be one that are equal: the sides of a square.
    """

    def of(plain: Callable[..., Any]) -> Callable[..., Any]:
        def rounded(node: Any, *args: Any) -> Any:
            if _under_a_root(node.expr) is not None:
                settle(node.expr)
            squared = None if args else _under_a_root(node.expr)
            found = plain(node, *args)
            if squared is not None and (root := _root(squared, node.shape_env)) is not None:
                found._expr = root
            return found

        return rounded

    with ExitStack() as stack:
        for name in _ROUNDING:
            if plain := getattr(SymNode, name, None):
                stack.enter_context(patch.object(SymNode, name, of(plain)))
        yield


def _share_a_name(base: Any, divisor: Any) -> bool:
    return not base.free_symbols.isdisjoint(divisor.free_symbols)


def _under_a_root(expr: Any) -> Any:
    """The size n of `float(n) ** 0.5` or `sqrt(float(n))`; None of others."""
    if isinstance(expr, torch_sympy.FloatPow) and expr.args[1] == 0.5:
        inner = expr.args[0]
    elif isinstance(expr, torch_sympy.OpaqueUnaryFn_sqrt):
        (inner,) = expr.args
    else:
        return None
    return inner.args[0] if isinstance(inner, torch_sympy.ToFloat) else None


def _root(squared: Any, shape_env: Any) -> Any:
    """The expression of integers whose square it is, and that is never negative; None without."""
    try:
        factor, powers = sympy.sqf_list(sympy.expand(squared))
    except sympy.PolynomialError:
        return None
    root = sympy.sqrt(factor) * sympy.Mul(*(base ** (times // 2) for base, times in powers))
    if not sympy.sqrt(factor).is_Integer or any(times % 2 for _, times in powers):
        return None
    for signed in (root, sympy.expand(-root)):
        if bound_sympy(signed, shape_env.var_to_range).lower >= 0:
            return sympy.expand(signed)
    return None
