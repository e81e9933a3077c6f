"""Counts: of what falls into bins, and of runs of equal elements."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from attngraph.errors import LoweringError
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.export.lowering.fallback.torchlib import torchlib_lowering
from attngraph.ir import Node
from attngraph.ir.ops import input_of


@register_lowering("aten.histc")
def lower_histc(ctx: LoweringContext, node: Node) -> ir.Value:
    """Equal bins from min to max, of which the last holds max too; what lies outside isn't counted.

    Numbers are compared in float32, as in torch. Without a range it is that of the values.
    """
    args, dtype = ctx.args(node), node.output.dtype
    bins, low, high = args["bins"], args["min"], args["max"]
    if not all(isinstance(number, (int, float)) for number in (bins, low, high)):
        raise LoweringError("its number of bins and its range have to be known")
    flat = ctx.op("Reshape", args["self"], ctx.constant([-1]))
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    values = ctx.cast(flat, kind)
    first, last = ctx.constant(float(low), kind), ctx.constant(float(high), kind)
    width = ctx.constant(float(high - low), kind)
    if low == high:
        first, last, width = _range_of(ctx, values, kind)
    inside = ctx.op(
        "And",
        ctx.op("GreaterOrEqual", values, first),
        ctx.op("LessOrEqual", values, last),
    )
    scaled = ctx.op("Mul", ctx.op("Sub", values, first), ctx.constant(float(bins), kind))
    position = ctx.op("Floor", ctx.op("Div", scaled, width))
    position = ctx.op("Where", inside, position, ctx.constant(0.0, kind))
    position = ctx.op("Min", ctx.cast(position, torch.int64), ctx.constant(bins - 1, torch.int64))
    # Counted in float32, which every provider scatters; exact below 2²⁴ values in a bin.
    ones = ctx.cast(inside, torch.float32)
    empty = ctx.constant(torch.zeros(bins))
    counts = ctx.op("ScatterElements", empty, position, ones, axis=0, reduction="add")
    return ctx.cast(counts, dtype)


def _range_of(
    ctx: LoweringContext, values: ir.Value, kind: torch.dtype
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The least and the largest of a row, one apart from them where these are equal; the width."""
    first, last = (ctx.op(each, values, keepdims=0) for each in ("ReduceMin", "ReduceMax"))
    apart = ctx.cast(ctx.op("Equal", first, last), kind)
    first, last = ctx.op("Sub", first, apart), ctx.op("Add", last, apart)
    return first, last, ctx.op("Sub", last, first)


@register_lowering("aten.bincount")
def lower_bincount(ctx: LoweringContext, node: Node) -> ir.Value:
    """Ones, or weights, added up by bin; there are as many as the largest number needs."""
    args, dtype = ctx.args(node), node.output.dtype
    x = ctx.cast(args["self"], torch.int64)
    least = ctx.op("Unsqueeze", ctx.dim(args["minlength"]), ctx.constant([0]))
    one = ctx.constant([1])
    needed = ctx.op("Concat", least, ctx.op("Add", x, one), axis=0)
    size = ctx.op("ReduceMax", needed, ctx.constant([0]), keepdims=1)
    added = args["weights"]
    if added is None:
        added = ctx.op("Expand", one, ctx.op("Shape", x))
    empty = ctx.op("Expand", ctx.constant(0, dtype), size)
    added = ctx.cast(added, dtype)
    return ctx.op("ScatterElements", empty, x, added, axis=0, reduction="add")


_UNIQUE = {torch.float32, torch.float64, torch.int8, torch.int64}
"""The dtypes that `Unique` has a kernel for."""


@register_lowering("aten._unique2")
def lower_unique(ctx: LoweringContext, node: Node) -> Sequence[ir.Value] | ir.Value | None:
    x, fallback = input_of(node, "self"), torchlib_lowering(node.op)
    if x.dtype in _UNIQUE and fallback is not None:
        return fallback(ctx, node)
    wide = torch.float32 if x.dtype.is_floating_point else torch.int64
    flat = ctx.op("Reshape", ctx.cast(ctx.value(x), wide), ctx.constant([-1]))
    values, _, inverse, counts = ctx.ops("Unique", flat, outputs=4, sorted=1)
    return ctx.cast(values, x.dtype), ctx.reshape(inverse, [-1], x.shape), counts


@register_lowering("aten.unique_consecutive")
def lower_unique_consecutive(
    ctx: LoweringContext, node: Node
) -> Sequence[ir.Value] | ir.Value | None:
    """The first of each run, which run an element is in, and how long they are.

    NaN is a run of its own each.
    """
    args, x = ctx.args(node), input_of(node, "self")
    if args["dim"] is not None and len(x.shape) != 1:
        raise LoweringError("whole slices are compared by it, which has no form; flatten them")
    wide = torch.int64 if x.dtype in (torch.bool, torch.int64, torch.int32) else x.dtype
    flat = ctx.op("Reshape", args["self"], ctx.constant([-1]))
    compared = ctx.cast(flat, wide)
    begin, behind, axis = ctx.constant([0]), ctx.constant([1]), ctx.constant([0])
    count = ctx.op("Shape", flat)
    later = ctx.op("Slice", compared, behind, count, axis)
    earlier = ctx.op("Slice", compared, begin, ctx.constant([-1]), axis)
    changes = ctx.op("Not", ctx.op("Equal", later, earlier))
    first = ctx.op("Slice", ctx.op("Expand", ctx.constant([True]), count), begin, behind, axis)
    starts = ctx.op("Concat", first, changes, axis=0)
    number = ctx.op("CumSum", ctx.cast(starts, torch.int64), ctx.constant(0, torch.int64))
    inverse = ctx.reshape(ctx.op("Sub", number, behind), [-1], x.shape)
    last = ctx.op("Squeeze", count, axis)
    places = ctx.op("Range", ctx.constant(0), last, ctx.constant(1))
    begun = ctx.op("Compress", places, starts, axis=0)
    ends = ctx.op("Concat", ctx.op("Slice", begun, behind, count, axis), count, axis=0)
    # of no elements there is one end too many
    lengths = ctx.op("Sub", ctx.op("Slice", ends, begin, ctx.op("Shape", begun), axis), begun)
    return ctx.op("Compress", flat, starts, axis=0), inverse, lengths
