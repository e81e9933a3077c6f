"""Where an element of a layout op's result lies in its input, as integer expressions.

`axes.py` names whole axes; here an index may be any affine expression, so that slices with an
offset, and positions compared with each other, can be followed.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from attngraph.analysis.layout.moves import (
    Broadcast,
    Copied,
    Cut,
    Permuted,
    Regrouped,
    Reversed,
    move_of,
)
from attngraph.analysis.masks.predicates import Domain, Expr
from attngraph.ir import Dim, Value
from attngraph.ir.dims import divide, product, same, same_shape

Index = tuple[Expr, ...]

ZERO = sympy.Integer(0)


def settled(value: Value, index: Sequence[Expr]) -> Index:
    """The index, with 0 for every dim of size 1."""
    return tuple(
        ZERO if size == 1 else place for place, size in zip(index, value.shape, strict=True)
    )


def aligned(source: Value, index: Index) -> Index:
    """The index into an operand that was broadcast to the rank of `index`."""
    rank = len(source.shape)
    return settled(source, index[len(index) - rank :])


def source_index(value: Value, index: Index, domain: Domain) -> tuple[Value, Index] | None:
    """(input, index into it) of an element of a layout op's result; None at any other op."""
    move = move_of(value)
    inner: Sequence[Expr] | None = None
    match move:
        case Copied():
            inner = index
        case Regrouped(source):
            inner = _reshaped(source.shape, value.shape, index, domain)
        case Broadcast(source):
            inner = aligned(source, index)
        case Permuted():
            inner = [index[place] for place in move.inverse]
        case Reversed(source, dims):
            inner = [
                size - 1 - place if dim in dims else place
                for dim, (place, size) in enumerate(zip(index, source.shape, strict=True))
            ]
        case Cut():
            inner = _cut(move, index, domain)
    return None if move is None or inner is None else (move.source, settled(move.source, inner))


def _cut(cut: Cut, index: Index, domain: Domain) -> Sequence[Expr] | None:
    dim, start = cut.dim, sympy.sympify(cut.start)
    first = start if cut.counted else _from_start(start, cut.source.shape[dim], domain)
    if first is None:
        return None
    if cut.single:
        return (*index[:dim], first, *index[dim:])
    return (*index[:dim], first + cut.step * index[dim], *index[dim + 1 :])


def _from_start(start: Expr, size: Dim, domain: Domain) -> Expr | None:
    """A position counted from the front; None where its sign or its clamping isn't known."""
    if domain.never_positive(-start):
        return start
    if domain.never_positive(start + 1) and domain.never_positive(-start - size):
        return start + size
    return None


def _reshaped(
    inner: Sequence[Dim], outer: Sequence[Dim], index: Index, domain: Domain
) -> Sequence[Expr] | None:
    """Row-major regrouping, dim by dim where sizes agree and by groups of equal size elsewhere."""
    found = [ZERO] * len(inner)
    sources = [dim for dim, size in enumerate(inner) if size != 1]
    results = [dim for dim, size in enumerate(outer) if size != 1]
    if same_shape([inner[d] for d in sources], [outer[d] for d in results]):
        for source, result in zip(sources, results, strict=True):
            found[source] = index[result]
        return found
    while sources or results:
        group = _group([inner[d] for d in sources], [outer[d] for d in results])
        if group is None:
            return None
        taken, given = sources[: group[0]], results[: group[1]]
        del sources[: group[0]], results[: group[1]]
        flat = ZERO
        for dim in given:
            flat = flat * outer[dim] + index[dim]
        for dim in reversed(taken[1:]):
            parts = _divided(sympy.expand(flat), inner[dim], domain)
            if parts is None:
                return None
            flat, found[dim] = parts
        found[taken[0]] = flat
    return found


def _group(inner: Sequence[Dim], outer: Sequence[Dim]) -> tuple[int, int] | None:
    """How many leading dims on either side hold the same number of elements; fewest first."""
    for total in range(2, len(inner) + len(outer) + 1):
        for left in range(1, total):
            right = total - left
            fits = left <= len(inner) and right <= len(outer)
            if fits and same(product(inner[:left]), product(outer[:right])):
                return left, right
    return None


def _divided(expr: Expr, size: Dim, domain: Domain) -> tuple[Expr, Expr] | None:
    """(expr // size, expr % size), where the remainder's range is proved."""
    quotient, rest = ZERO, ZERO
    for term in sympy.Add.make_args(expr):
        coefficient, factor = term.as_coeff_Mul()
        part = divide(int(coefficient), size) if isinstance(size, int) else divide(term, size)
        if part is None:
            rest += term
        else:
            quotient += part * factor if isinstance(size, int) else part
    if domain.never_positive(-rest) and domain.never_positive(rest - size + 1):
        return quotient, rest
    return None
