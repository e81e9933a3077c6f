"""Where an element of a layout op's result lies in its input, as integer expressions.

`axes.py` names whole axes; here an index may be any affine expression, so that slices with an
offset, and positions compared with each other, can be followed.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from attngraph.analysis.layout.axes import permutation
from attngraph.analysis.masks.predicates import Domain, Expr
from attngraph.ir import Dim, Node, Value
from attngraph.ir.dims import divide, product, same, same_shape
from attngraph.ir.ops import attribute
from attngraph.ir.traits import COPY, EXPAND, PERMUTE, RESHAPE

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


def source_index(
    node: Node, value: Value, index: Index, domain: Domain
) -> tuple[Value, Index] | None:
    """(input, index into it) of an element of a layout op's result; None at any other op."""
    source = node.inputs[0] if node.inputs else None
    if source is None or not node.op.startswith("aten."):
        return None
    inner: Sequence[Expr] | None
    if node.op in COPY:
        inner = index
    elif node.op in RESHAPE:
        inner = _reshaped(source.shape, value.shape, index, domain)
    elif node.op in EXPAND:
        inner = aligned(source, index)
    elif node.op == "aten.flip":
        back = {dim % len(index) for dim in attribute(node, "dims")}
        inner = [
            size - 1 - place if dim in back else place
            for dim, (place, size) in enumerate(zip(index, source.shape, strict=True))
        ]
    elif node.op in PERMUTE:
        order = permutation(node, len(index))
        inner = [index[order.index(dim)] for dim in range(len(index))]
    else:
        inner = _selected(node, source, value, index, domain)
    return None if inner is None else (source, settled(source, inner))


def _selected(
    node: Node, source: Value, value: Value, index: Index, domain: Domain
) -> Sequence[Expr] | None:
    rank = len(source.shape)
    match node.op:
        case "aten.select.int" | "aten.unbind.int":
            dim = attribute(node, "dim") % rank
            start = attribute(node, "index") if node.op == "aten.select.int" else value.index
            place = _from_start(start, source.shape[dim], domain)
            return None if place is None else (*index[:dim], place, *index[dim:])
        case "aten.slice.Tensor":
            dim, step = attribute(node, "dim") % rank, attribute(node, "step")
            start = _from_start(attribute(node, "start") or 0, source.shape[dim], domain)
            if start is None:
                return None
        case "aten.narrow":
            dim, step = attribute(node, "dim") % rank, 1
            start = _from_start(attribute(node, "start"), source.shape[dim], domain)
            if start is None:
                return None
        case "aten.split.Tensor" | "aten.split_with_sizes" | "aten.chunk":
            dim, step = attribute(node, "dim") % rank, 1
            start = sum((output.shape[dim] for output in node.outputs[: value.index]), ZERO)
        case _:
            return None
    moved = start + step * index[dim]
    return (*index[:dim], moved, *index[dim + 1 :])


def _from_start(start: Expr, size: Dim, domain: Domain) -> Expr | None:
    """A position counted from the front; None where its sign or its clamping isn't known."""
    start = sympy.sympify(start)
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
