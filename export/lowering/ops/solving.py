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
from attngraph.ir.ops import attribute, input_of, inputs_of


@register_lowering("aten.linalg_lu")
def lower_lu(ctx: LoweringContext, node: Node) -> Sequence[ir.Value] | None:
    """A = P L U by partial pivoting, as LAPACK has it: step k exchanges row k with the first of
    those below it that has the largest number in column k, and takes multiples of it from the
    others. The multiples stand where they leave zeros.
    """
    matrix = input_of(node, "A")
    if not attribute(node, "pivot") or not _is_square(matrix):
        return None
    type = matrix.tensor_type
    *batch, size, _ = type.shape
    row, places = TensorType(type.dtype, (size,)), TensorType(torch.int64, (*batch, size, 1))

    def step(rest: Tensor, places: Tensor, unit: Tensor, below: Tensor) -> Sequence[Tensor]:
        is_own, is_below = unit[:, None] > 0, below[:, None]
        weight = torch.where(is_own | is_below, (rest @ unit[:, None]).abs(), -1)
        is_pivot = torch.arange(rest.shape[-1])[:, None] == weight.argmax(-2, keepdim=True)
        own, pivot = unit[None] @ rest, is_pivot.to(rest.dtype).mT @ rest
        rest = torch.where(is_own, pivot, torch.where(is_pivot, own, rest))
        ahead = rest @ unit[:, None]
        # Where the pivot is 0, so is all below it, and nothing is to be taken.
        factor = torch.where(is_below & (ahead != 0), ahead / (pivot @ unit[:, None]), 0)
        left = rest - factor * torch.where(below, pivot, 0)
        first, second = (
            torch.where(each, places, 0).sum(-2, keepdim=True) for each in (is_own, is_pivot)
        )
        places = torch.where(is_own, second, torch.where(is_pivot, first, places))
        return torch.where(is_below & (unit > 0), factor, left), places

    numbers = ctx.op("Range", *(ctx.number(each, torch.int64) for each in (0, size, 1)))
    column = ctx.reshape(numbers, [size], [size, 1])
    both, order = _loop(
        ctx,
        step,
        {
            "rest": (type, ctx.value(matrix)),
            "places": (places, ctx.expand(column, [size, 1], places.shape)),
        },
        {"unit": (row, _unit(ctx, type)), "below": (_flags(row), _triangle(ctx, type, 1))},
    )
    rank = len(type.shape)
    turned = ctx.op("Transpose", order, perm=[*range(rank - 2), rank - 1, rank - 2])
    return [
        ctx.cast(ctx.op("Equal", column, turned), type.dtype),
        ctx.op("Add", ctx.op("Trilu", both, ctx.constant(-1), upper=0), _unit(ctx, type)),
        ctx.op("Trilu", both, upper=1),
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

    order = [*range(len(type.shape))]
    order = [order.pop(-2 if is_upper else -1), *order]
    columns = ctx.op("Transpose", ctx.value(matrix), perm=order)
    lower, corners = _loop(
        ctx,
        step,
        {"lower": (type, _filled(ctx, 0.0, type))},
        {
            "unit": (row, _unit(ctx, type)),
            "below": (_flags(row), _triangle(ctx, type, 0)),  # and the corner itself
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
    matrix, given = inputs_of(node, "self", "B")
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


def _triangle(ctx: LoweringContext, type: TensorType, first: int) -> ir.Value:
    """A row for each column of a matrix that is true from `first` places behind it on."""
    size = type.shape[-1]
    ones = _filled(ctx, 1.0, TensorType(type.dtype, (size, size)))
    return ctx.cast(ctx.op("Trilu", ones, ctx.constant(first), upper=1), torch.bool)


def _flags(type: TensorType) -> TensorType:
    return TensorType(torch.bool, type.shape)


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
