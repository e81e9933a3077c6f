"""Factors of matrices and triangular systems, as loops over columns: ONNX has no operators of them.

The sums are those of LAPACK's unblocked routines, with its pivots, so the errors are of eager's
size. What is made of the factors (systems, inverses, determinants) is in solving_formulas.py. Where
torch raises an error, for a matrix without an inverse or one that isn't positive definite, these
divide by 0 or take the root of a negative number, and give infinities or NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.export.lowering.fallback.decompose import as_graph
from attngraph.export.lowering.fallback.solving_formulas import is_small
from attngraph.ir import Node, TensorType, Value
from attngraph.ir.ops import attribute, input_of


@register_lowering("aten.linalg_lu")
def lower_lu(ctx: LoweringContext, node: Node) -> Sequence[ir.Value] | None:
    """A = P L U, by partial pivoting that leaves each row at its place and marks those it took.

    The pivots in their order are U, where they stood is P, and the multiples of them that were
    taken from the rows that were free are the columns of L.
    """
    matrix = input_of(node, "A")
    if not attribute(node, "pivot") or not _is_square(matrix):
        return None
    type = matrix.tensor_type
    *batch, size, _ = type.shape

    def step(rest: Tensor, free: Tensor, column: Tensor) -> Sequence[Tensor]:
        ahead = rest @ column[:, None]
        largest = torch.where(free, ahead.abs(), -1).argmax(-2, keepdim=True)
        is_pivot = torch.arange(rest.shape[-1])[:, None] == largest
        chosen = is_pivot.to(rest.dtype)
        pivot = chosen.mT @ rest
        free = free & ~is_pivot
        factor = torch.where(free, ahead / (pivot @ column[:, None]), 0)
        rows = (pivot.squeeze(-2), chosen.squeeze(-1), (factor + chosen).squeeze(-1))
        return (rest - factor * pivot, free, *rows)

    free = TensorType(torch.bool, (*batch, size, 1))
    _, _, upper, chosen, factors = _loop(
        ctx,
        step,
        {"rest": (type, ctx.value(matrix)), "free": (free, _filled(ctx, True, free))},
        {"column": (TensorType(type.dtype, (size,)), _unit(ctx, type))},
        gives=3,
    )
    by_row = [*range(1, len(batch) + 1), 0, len(batch) + 1]  # of (n, *batch, n), steps first
    by_column = [*range(1, len(batch) + 2), 0]
    order = ctx.op("Transpose", chosen, perm=by_row)
    return [
        ctx.op("Transpose", chosen, perm=by_column),
        ctx.op("MatMul", order, ctx.op("Transpose", factors, perm=by_column)),
        ctx.op("Trilu", ctx.op("Transpose", upper, perm=by_row), upper=1),  # the rest is rounding
    ]


@register_lowering("aten.linalg_cholesky_ex")
def lower_cholesky(ctx: LoweringContext, node: Node) -> Sequence[ir.Value] | None:
    """L of A = L Lᵀ, a column at a time, and the number of the first that has no root, or 0.

    Of A only the lower triangle is read; `upper` gives Lᵀ, and reads the upper one.
    """
    matrix, is_upper = input_of(node, "self"), attribute(node, "upper")
    if not _is_square(matrix):
        return None
    type = matrix.tensor_type
    row = TensorType(type.dtype, (type.shape[-1],))

    def step(lower: Tensor, unit: Tensor, below: Tensor, column: Tensor) -> Sequence[Tensor]:
        rest = column[..., None] - lower @ (lower.mT @ unit[:, None])
        corner = unit[None] @ rest
        made = torch.where(below[:, None], rest / torch.sqrt(corner), 0)
        return (lower + made * unit, corner[..., 0, 0])

    unit = _unit(ctx, type)
    ones = ctx.cast(_filled(ctx, 1.0, TensorType(type.dtype, type.shape[-2:])), type.dtype)
    below = ctx.cast(ctx.op("Trilu", ones, upper=1), torch.bool)  # row k: the places from k on
    order = [*range(len(type.shape))]
    order = [order.pop(-2 if is_upper else -1), *order]
    columns = ctx.op("Transpose", ctx.value(matrix), perm=order)
    lower, corners = _loop(
        ctx,
        step,
        {"lower": (type, _filled(ctx, 0.0, type))},
        {
            "unit": (row, unit),
            "below": (TensorType(torch.bool, row.shape), below),
            "column": (TensorType(type.dtype, type.shape[:-1]), columns),
        },
        gives=1,
    )
    positive = ctx.op("Greater", corners, ctx.constant(0.0, type.dtype))
    failed = ctx.cast(ctx.op("Not", positive), torch.int32)
    first = ctx.op("Add", ctx.op("ArgMax", failed, axis=0, keepdims=0), ctx.constant(1))
    some = ctx.cast(ctx.op("ReduceMax", failed, ctx.constant([0]), keepdims=0), torch.int64)
    info = ctx.cast(ctx.op("Mul", first, some), torch.int32)
    if is_upper:
        order = [*range(len(type.shape))]
        lower = ctx.op("Transpose", lower, perm=[*order[:-2], *order[:-3:-1]])
    return [lower, info]


@register_lowering("aten.linalg_qr")
def lower_qr(ctx: LoweringContext, node: Node) -> Sequence[ir.Value] | None:
    """A = Q R by Householder's reflections, with LAPACK's signs: a column that is 0 below its
    diagonal stays as it is, and any other gets a diagonal of the sign that its own hadn't.
    """
    matrix, mode = input_of(node, "A"), attribute(node, "mode")
    *batch, height, width = matrix.shape
    if not (isinstance(height, int) and isinstance(width, int) and height and width):
        return None
    if mode == "r" or not matrix.dtype.is_floating_point:
        return None
    type, count = matrix.tensor_type, min(height, width)
    square = TensorType(type.dtype, (*batch, height, height))
    places = torch.eye(height, dtype=type.dtype)[:count]
    columns = torch.eye(width, dtype=type.dtype)[:count]

    def step(rest: Tensor, turns: Tensor, place: Tensor, below: Tensor, column: Tensor) -> Any:
        ahead = rest @ column[:, None]
        number = place[None] @ ahead
        tail = torch.where(below[:, None], ahead, 0)
        length = torch.linalg.vector_norm(tail, dim=-2, keepdim=True)
        diagonal = -torch.copysign(torch.hypot(number, length), number)
        is_zero = length == 0
        direction = place[:, None] + tail / torch.where(is_zero, 1, number - diagonal)
        factor = torch.where(is_zero, 0, (diagonal - number) / torch.where(is_zero, 1, diagonal))
        return (
            rest - factor * direction * (direction.mT @ rest),
            turns - factor * (turns @ direction) * direction.mT,
        )

    unit = ctx.constant(torch.eye(height, dtype=type.dtype), name="unit")
    below = ctx.constant(torch.ones(count, height).triu(1).bool(), name="below")
    upper, turns = _loop(
        ctx,
        step,
        {
            "rest": (type, ctx.value(matrix)),
            "turns": (square, ctx.expand(unit, square.shape[-2:], square.shape)),
        },
        {
            "place": (TensorType(type.dtype, (height,)), ctx.constant(places)),
            "below": (TensorType(torch.bool, (height,)), below),
            "column": (TensorType(type.dtype, (width,)), ctx.constant(columns)),
        },
    )
    upper = ctx.op("Trilu", upper, upper=1)  # what is left below by rounding is no part of it
    if mode == "complete" or height <= width:
        return [turns, upper]
    first = (ctx.constant([0]), ctx.constant([width]))
    return [
        ctx.op("Slice", turns, *first, ctx.constant([-1])),
        ctx.op("Slice", upper, *first, ctx.constant([-2])),
    ]


@register_lowering("aten.linalg_solve_triangular")
def lower_triangular(ctx: LoweringContext, node: Node) -> ir.Value | None:
    """Substitution in a lower triangle, a row at a time. A small one is solved by halves."""
    matrix, given = input_of(node, "self"), input_of(node, "B")
    if is_small(matrix.shape[-1]) or not _is_square(matrix):
        return None
    if attribute(node, "upper") or not attribute(node, "left"):
        return None  # a formula turns it round
    type, result = matrix.tensor_type, node.output.tensor_type
    size = type.shape[-1]

    def step(found: Tensor, unit: Tensor, row: Tensor, right: Tensor) -> Sequence[Tensor]:
        rest = right[..., None, :] - row[..., None, :] @ found
        if not attribute(node, "unitriangular"):
            rest = rest / (row @ unit[:, None])[..., None]
        return (found + unit[:, None] * rest,)

    lower = ctx.op("Trilu", ctx.value(matrix), upper=0)  # above may be infinities, and 0 · ∞ is NaN
    (found,) = _loop(
        ctx,
        step,
        {"found": (result, _filled(ctx, 0.0, result))},
        {
            "unit": (TensorType(type.dtype, (size,)), _unit(ctx, type)),
            "row": _rows(ctx, lower, type),
            "right": _rows(ctx, ctx.value(given), given.tensor_type),
        },
    )
    return found


def _rows(ctx: LoweringContext, value: ir.Value, type: TensorType) -> tuple[TensorType, ir.Value]:
    """(…, n, m) as n steps of (…, m), and the type of one."""
    *batch, _, width = type.shape
    order = [len(batch), *range(len(batch)), len(batch) + 1]
    return TensorType(type.dtype, (*batch, width)), ctx.op("Transpose", value, perm=order)


def _is_square(matrix: Value) -> bool:
    """Whether a tensor holds square matrices of real numbers, with at least one row."""
    shape = matrix.shape
    return shape[-1] == shape[-2] and shape[-1] != 0 and matrix.dtype.is_floating_point


def _unit(ctx: LoweringContext, type: TensorType) -> ir.Value:
    """The unit matrix of a matrix's width and dtype."""
    size = type.shape[-1]
    if isinstance(size, int):
        return ctx.constant(torch.eye(size, dtype=type.dtype), name="unit")
    ones = _filled(ctx, 1.0, TensorType(type.dtype, (size, size)))
    return ctx.op("Trilu", ctx.op("Trilu", ones, upper=1), upper=0)


def _filled(ctx: LoweringContext, number: float | bool, type: TensorType) -> ir.Value:
    return ctx.expand(ctx.constant(number, type.dtype), [], type.shape)


_Operands = Mapping[str, tuple[TensorType, ir.Value]]


def _loop(
    ctx: LoweringContext,
    step: Callable[..., Sequence[Tensor]],
    carried: _Operands,
    scanned: _Operands,
    *,
    gives: int = 0,
) -> Sequence[ir.Value]:
    """A Scan of `step`: the last of what is carried, then what the steps give, stacked."""
    both = {**carried, **scanned}
    body = as_graph(step, {name: type for name, (type, _) in both.items()}, ctx.graph)
    return ctx.ops(
        "Scan",
        *(value for _, value in both.values()),
        outputs=len(carried) + gives,
        body=ctx.loop_body(body, {}),
        num_scan_inputs=len(scanned),
    )
