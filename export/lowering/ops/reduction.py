"""Reductions, scans and sorting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.products import may_be_empty
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.export.lowering.emission.values import FLOATS
from attngraph.ir import Node, Value
from attngraph.ir.dims import Dim, product
from attngraph.ir.ops import input_of
from attngraph.ir.traits import CAST

_REDUCE = {
    "mean": "ReduceMean", "sum": "ReduceSum", "amax": "ReduceMax", "amin": "ReduceMin",
    "max": "ReduceMax", "min": "ReduceMin", "prod": "ReduceProd", "any": "ReduceMax",
    "all": "ReduceMin",
}  # fmt: skip

_LONG = 4096
"""Terms of a sum from which on their number, not their rounding, makes its error."""


def _reduce(
    ctx: LoweringContext, op_type: str, node: Node, x: ir.Value, dims: object, keep: bool
) -> ir.Value:
    """`x`, of the shape of a node's input; all axes where dims is None or empty, as torch reads it.

    onnxruntime leaves an empty axis as it is where it is counted from the last. A single number is
    its own reduction.
    """
    rank = len(input_of(node, "self").shape)
    if not rank:
        return ctx.op("Identity", x)
    if isinstance(dims, int):
        dims = [dims]
    axes, places = None, list(range(rank))
    if isinstance(dims, (list, tuple)) and dims:
        places = [dim % rank for dim in dims]
        axes = ctx.constant(places)
    elif keep and x.dtype == ir.DataType.INT64:  # others stand for the operator, axis by axis
        axes = ctx.constant(places)
    counted = [input_of(node, "self").shape[place] for place in places]
    if op_type in ("ReduceSum", "ReduceMean") and node.output.dtype == torch.float32:
        x = _in_parts(ctx, op_type, node, x, places)
    reduced = ctx.op(op_type, x, axes, keepdims=int(keep))
    if op_type != "ReduceMean" or not may_be_empty(ctx, counted):
        return reduced
    # The mean of nothing is NaN, and 0 to onnxruntime.
    count = ctx.number(product(counted), torch.int64)
    missing = ctx.constant(math.nan, node.output.dtype)
    return ctx.op("Where", ctx.op("Equal", count, ctx.constant(0)), missing, reduced)


def _in_parts(
    ctx: LoweringContext, op_type: str, node: Node, x: ir.Value, axes: Iterable[int]
) -> ir.Value:
    """`x` with the parts of a long axis reduced, of which the whole is to be reduced yet.

    onnxruntime adds a row up in a few running sums, whose error grows with its length; torch adds
    in pairs. Parts of about √n leave sums of √n terms.
    """
    shape = input_of(node, "self").shape
    sizes = {axis: int(shape[axis]) for axis in axes if isinstance(shape[axis], int)}
    count = math.prod(sizes.values())
    if count < _LONG:
        return x
    axis = max(sizes, key=lambda axis: sizes[axis])
    divisors = [part for part in range(2, sizes[axis] + 1) if sizes[axis] % part == 0]
    part = min(divisors, key=lambda part: abs(part - math.sqrt(count)))
    if part == count:
        return x
    cut = [*shape[:axis], sizes[axis] // part, part, *shape[axis + 1 :]]
    return ctx.op(op_type, ctx.reshape(x, shape, cut), ctx.constant([axis + 1]), keepdims=0)


@register_lowering(
    "aten.mean", "aten.mean.dim", "aten.sum", "aten.sum.dim_IntList", "aten.amax", "aten.amin",
    "aten.max", "aten.min", "aten.prod", "aten.prod.dim_int",
)  # fmt: skip
def lower_reduce(ctx: LoweringContext, node: Node) -> ir.Value | None:
    """None for products of integers, which a formula makes exact."""
    args, dtype = ctx.args(node), node.output.dtype
    dims, keep = args.get("dim"), args.get("keepdim", False)
    op_type = _REDUCE[node.op.split(".")[1]]
    if op_type == "ReduceProd" and not dtype.is_floating_point:
        return None
    if op_type == "ReduceSum" and not dtype.is_floating_point and dtype != torch.int64:
        return ctx.cast(_exact_sum(ctx, node, ctx.cast(args["self"], torch.int64)), dtype)
    x = ctx.cast(args["self"], dtype)
    if op_type in ("ReduceMax", "ReduceMin"):
        return _extremum(ctx, op_type, node, x, dims, keep)
    if op_type == "ReduceSum" and input_of(node, "self").dtype == torch.int64:
        return _exact_sum(ctx, node, x)
    return _reduce(ctx, op_type, node, x, dims, keep)


@register_lowering("aten.logsumexp")
def lower_logsumexp(ctx: LoweringContext, node: Node) -> ir.Value:
    """m + log Σ exp(x − m), with m the largest element, or 0 where that is infinite.

    `ReduceLogSumExp` makes −∞ of a row of −∞ and finfo.min, which is how masks hide one.
    """
    args = ctx.args(node)
    x, dtype = ctx.cast(args["self"], node.output.dtype), node.output.dtype
    rank, dims = len(input_of(node, "self").shape), args["dim"] or None
    if not rank:
        return ctx.op("Identity", x)
    top = _reduce(ctx, "ReduceMax", node, x, dims, True)
    top = ctx.op("Where", ctx.op("IsInf", top), ctx.constant(0.0, dtype), top)
    total = _reduce(ctx, "ReduceSum", node, ctx.op("Exp", ctx.op("Sub", x, top)), dims, True)
    result = ctx.op("Add", ctx.op("Log", total), top)
    if args.get("keepdim", False):
        return result
    return ctx.op(
        "Squeeze", result, ctx.constant(sorted(dim % rank for dim in dims or range(rank)))
    )


def _extremum(
    ctx: LoweringContext, op_type: str, node: Node, x: ir.Value, dims: object, keep: bool
) -> ir.Value:
    """NaN where there is one: onnxruntime's reduction may lose it."""
    found = _reduce(ctx, op_type, node, x, dims, keep)
    if x.dtype not in FLOATS:
        return found
    assert x.dtype is not None
    dtype = ir.tensor_adapters.to_torch_dtype(x.dtype)
    missing = ctx.cast(ctx.op("IsNaN", x), torch.int32)
    lost = ctx.cast(_reduce(ctx, "ReduceMax", node, missing, dims, keep), torch.bool)
    return ctx.op("Where", lost, ctx.constant(math.nan, dtype), found)


def _exact_sum(ctx: LoweringContext, node: Node, x: ir.Value) -> ir.Value:
    """Running sums, of which the last is it: `ReduceSum` of int64 adds in double.

    A zero goes first along an axis that may be empty.
    """
    source, args = input_of(node, "self"), ctx.args(node)
    rank, dims = len(source.shape), args.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    axes = sorted({dim % rank for dim in dims}) if dims and rank else list(range(rank))
    if not axes or _is_small(source):
        return _reduce(ctx, "ReduceSum", node, x, dims, args.get("keepdim", False))
    for axis in axes:
        if not _has_elements(ctx, source.shape[axis]):
            before = [int(place == axis) for place in range(rank)]
            x = ctx.op("Pad", x, ctx.constant([*before, *[0] * rank]))
        running = ctx.op("CumSum", x, ctx.constant(axis, torch.int64))
        x = ctx.op("Gather", running, ctx.constant([-1]), axis=axis)
    return x if args.get("keepdim", False) else ctx.op("Squeeze", x, ctx.constant(axes))


_SMALL = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32})


def _is_small(value: Value) -> bool:
    """Whether it is, or was made of, narrower integers, of which fewer than 2²² add up exactly."""
    node = value.producer
    if value.dtype in _SMALL:
        return True
    if node is None or node.op not in CAST:
        return False
    return node.inputs[0] is not None and node.inputs[0].dtype in _SMALL


def _has_elements(ctx: LoweringContext, size: Dim) -> bool:
    if isinstance(size, int):
        return size > 0
    info = ctx.graph.dims.get(str(size))
    return info is not None and info.low > 0


@register_lowering(
    "aten.any", "aten.any.dim", "aten.any.dims", "aten.all", "aten.all.dim", "aten.all.dims"
)
def lower_any(ctx: LoweringContext, node: Node) -> ir.Value:
    """Through int32, whose reductions every provider has. uint8 stays uint8, as in torch."""
    args = ctx.args(node)
    x = ctx.cast(ctx.cast(args["self"], torch.bool), torch.int32)
    dims, keep = args.get("dim"), args.get("keepdim", False)
    found = _reduce(ctx, _REDUCE[node.op.split(".")[1]], node, x, dims, keep)
    # of no elements, the lowest or the largest int32
    return ctx.cast(ctx.op("Greater", found, ctx.constant(0, torch.int32)), node.output.dtype)


@register_lowering("aten.max.dim", "aten.min.dim")
def lower_extremum_along(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    """Of bools as integers, which each of these operators takes."""
    args, dtype = ctx.args(node), node.outputs[0].dtype
    x = ctx.cast(args["self"], torch.int32) if dtype == torch.bool else args["self"]
    reduction, place = ("ReduceMax", "ArgMax") if "max" in node.op else ("ReduceMin", "ArgMin")
    values = _extremum(ctx, reduction, node, x, args["dim"], args["keepdim"])
    rank = len(input_of(node, "self").shape)
    if not rank:
        return values, ctx.constant(0, torch.int64)
    return values, ctx.op(place, x, axis=args["dim"] % rank, keepdims=int(args["keepdim"]))


@register_lowering("aten.argmax", "aten.argmin")
def lower_arg(ctx: LoweringContext, node: Node) -> ir.Value:
    """Along an axis that is counted from the first: of no rows onnxruntime leaves another long."""
    args, rank = ctx.args(node), len(input_of(node, "self").shape)
    x, dim, keep = args["self"], args["dim"], int(args["keepdim"])
    if not rank:
        return ctx.constant(0, torch.int64)
    if dim is None:
        x, dim, keep = ctx.op("Reshape", x, ctx.constant([-1])), 0, 0
    return ctx.op("ArgMax" if "max" in node.op else "ArgMin", x, axis=dim % rank, keepdims=keep)


@register_lowering("aten.cumsum")
def lower_cumsum(ctx: LoweringContext, node: Node) -> ir.Value:
    """Narrow integers are added as wide ones: what is left of them is the same."""
    args, dtype = ctx.args(node), node.output.dtype
    if not dtype.is_floating_point and dtype.itemsize < torch.int32.itemsize:
        dtype = torch.int32
    x = ctx.cast(args["self"], dtype)
    if not node.output.shape:
        return ctx.cast(ctx.op("Identity", x), node.output.dtype)
    running = ctx.op("CumSum", x, ctx.constant(args["dim"], torch.int64))
    return ctx.cast(running, node.output.dtype)


@register_lowering("aten.topk")
def lower_topk(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    args = ctx.args(node)
    x, size = args["self"], ctx.shape([args["k"]])
    how = {name: int(args[name]) for name in ("largest", "sorted")}
    values, places = _top(ctx, x, node.outputs[0].dtype, size, axis=args["dim"], **how)
    if values is None:
        values = ctx.op("GatherElements", x, places, axis=args["dim"])
    return values, places


_LAST = {torch.float32: 3.4028232e38, torch.float64: 1.7976931348623155e308}
"""A number before the largest one of a dtype, which is beyond all of a narrower one."""


def _top(
    ctx: LoweringContext, keys: ir.Value, dtype: torch.dtype, size: ir.Value, **how: Any
) -> tuple[ir.Value | None, ir.Value]:
    """The first keys, where they are as they were, and their places.

    CUDA's kernel fills an axis up to a power of two with the lowest number (the highest one where
    the smallest are wanted), and of those and an infinity that comes after them it may take the
    filler, with a place that the axis doesn't have. So there keys are in a wider dtype, in which an
    infinity is a number between them and the filler: exactly, but for the last two of float64.
    """
    if ctx.target.provider != "cuda" or not dtype.is_floating_point:
        values, places = ctx.ops("TopK", keys, size, outputs=2, **how)
        return values, places
    wide = torch.float32 if dtype.itemsize < torch.float32.itemsize else torch.float64
    last = ctx.constant(-_LAST[wide] if how["largest"] else _LAST[wide], wide)
    kept = ctx.op("Max" if how["largest"] else "Min", ctx.cast(keys, wide), last)
    return None, ctx.ops("TopK", kept, size, outputs=2, **how)[1]


_SORTED_AS = {torch.bool: torch.int32, torch.int8: torch.int32, torch.int16: torch.int32}
"""The dtype in which to sort one that TopK has no kernel for."""


@register_lowering("aten.sort", "aten.sort.stable", "aten.argsort", "aten.argsort.stable")
def lower_sort(ctx: LoweringContext, node: Node) -> ir.Value | Sequence[ir.Value]:
    """TopK of all: of equal elements it takes the one of the lower index first."""
    args, x = ctx.args(node), input_of(node, "self")
    data, dim = args["self"], args["dim"]
    if not x.shape:
        places = ctx.constant(0, torch.int64)
        return places if "argsort" in node.op else (ctx.op("Identity", data), places)
    keys = ctx.cast(data, _SORTED_AS.get(x.dtype, x.dtype))
    if x.dtype.is_floating_point:  # NaN is the largest; TopK leaves it open
        infinity = ctx.constant(math.inf, x.dtype)
        keys = ctx.op("Where", ctx.op("IsNaN", data), infinity, data)
    size, down = ctx.shape([x.shape[dim]]), int(args["descending"])
    values, places = _top(ctx, keys, x.dtype, size, axis=dim, largest=down)
    if "argsort" in node.op:
        return places
    if values is None or x.dtype.is_floating_point:
        values = ctx.op("GatherElements", data, places, axis=dim)
    return values, places


@register_lowering(
    "aten.var.correction",
    "aten.std.correction",
    "aten.var.dim",
    "aten.std.dim",
    "aten.var",
    "aten.std",
)
def lower_variance(ctx: LoweringContext, node: Node) -> ir.Value:
    """Σ (x − mean)² / (n − correction), and its root for std."""
    args, dtype = ctx.args(node), node.output.dtype
    x: Value = input_of(node, "self")
    dims = args.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or []
    dims = dims if dims and x.shape else list(range(len(x.shape)))
    correction = args.get("correction", 1 if args.get("unbiased", True) else 0)
    correction = 1 if correction is None else correction
    centred = ctx.op(
        "Sub", args["self"], _reduce(ctx, "ReduceMean", node, args["self"], dims, True)
    )
    squares = ctx.op("Mul", centred, centred)
    total = _reduce(ctx, "ReduceSum", node, squares, dims, args.get("keepdim", False))
    counted = [x.shape[dim] for dim in dims]
    divisor = ctx.number(product(counted) - correction, dtype)
    if may_be_empty(ctx, counted):  # of nothing it is NaN
        divisor = ctx.op("Max", divisor, ctx.constant(0.0, dtype))
    variance = ctx.op("Div", total, divisor)
    return ctx.op("Sqrt", variance) if node.op.startswith("aten.std") else variance
