"""Gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from attngraph.errors import LoweringError
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.export.lowering.fallback.torchlib import torchlib_lowering
from attngraph.export.lowering.ops.layout import axis_of
from attngraph.ir import Node, Value
from attngraph.ir.dims import Dim, same
from attngraph.ir.ops import attribute, input_of, inputs_of


@register_lowering("aten.roll")
def lower_roll(ctx: LoweringContext, node: Node) -> ir.Value | Sequence[ir.Value] | None:
    """A Gather along each axis; torchlib's form where a known number is shifted by in a size that
    only a run tells.
    """
    x, shifts, dims = input_of(node, "self"), attribute(node, "shifts"), attribute(node, "dims")
    sizes = [x.shape[dim] for dim in dims]
    fallback = torchlib_lowering(node.op)
    result = ctx.value(x)
    if not all(isinstance(shift, int) for shift in shifts):
        result = result if dims else ctx.reshape(result, x.shape, [-1])
        for shift, dim in zip(shifts, dims or [0], strict=True):
            size = ctx.op("Gather", ctx.op("Shape", result), ctx.constant(dim), axis=0)
            places = ctx.op("Range", ctx.constant(0), size, ctx.constant(1))
            source = ctx.op("Sub", places, ctx.dim(shift))
            result = ctx.op("Gather", result, ctx.op("Mod", source, size), axis=dim)
        return result if dims else ctx.reshape(result, [-1], x.shape)
    if fallback is not None and not (dims and all(isinstance(size, int) for size in sizes)):
        return fallback(ctx, node)
    for shift, dim, size in zip(shifts, dims, sizes, strict=True):
        if shift % size:
            order = torch.arange(int(size)).roll(shift)
            result = ctx.op("Gather", result, ctx.constant(order, name="order"), axis=dim)
    return result


@register_lowering("aten.index.Tensor", "aten._unsafe_index.Tensor")
def lower_index(ctx: LoweringContext, node: Node) -> ir.Value:
    """Advanced indexing: one index is a Gather; several are broadcast together for GatherND."""
    x: Value = input_of(node, "self")
    indices: list[Value | None] = input_of(node, "indices")
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for _, index in given):
        return _index_by_mask(ctx, x, given)
    if len(given) == 1:
        axis, index = given[0]
        return ctx.op("Gather", ctx.value(x), ctx.value(index), axis=axis)
    axes = [axis for axis, _ in given]
    rank = len(x.shape)
    rest = [axis for axis in range(rank) if axis not in axes]
    order = axes + rest
    data = ctx.value(x)
    if order != sorted(order):
        data = ctx.op("Transpose", data, perm=order)
    common = _broadcast([index for _, index in given])
    columns = []
    for _, index in given:
        wide = ctx.expand(ctx.cast(ctx.value(index), torch.int64), index.shape, common)
        columns.append(ctx.op("Unsqueeze", wide, ctx.constant([-1])))
    result = ctx.op("GatherND", data, ctx.op("Concat", *columns, axis=-1))
    adjacent = axes == list(range(axes[0], axes[-1] + 1))
    if not adjacent or axes[0] == 0:
        return result
    width, before = len(common), axes[0]
    moved = [
        *range(width, width + before),
        *range(width),
        *range(width + before, width + len(rest)),
    ]
    return ctx.op("Transpose", result, perm=moved)


def _index_by_mask(ctx: LoweringContext, x: Value, given: list[tuple[int, Value]]) -> ir.Value:
    """One mask, of one axis or of several: the rows of these axes where it is true."""
    (axis, index), *others = given
    if others:
        raise LoweringError("a bool index has an ONNX form only alone")
    mask = ctx.cast(ctx.value(index), torch.bool)
    if len(index.shape) == 1:
        return ctx.op("Compress", ctx.value(x), mask, axis=axis)
    masked = range(axis, axis + len(index.shape))
    rest = [i for i in range(len(x.shape)) if i not in masked]
    data = ctx.value(x)
    if axis:
        data = ctx.op("Transpose", data, perm=[*masked, *rest])
    rows = ctx.op("Transpose", ctx.op("NonZero", mask), perm=[1, 0])
    result = ctx.op("GatherND", data, rows)
    if not axis:
        return result
    return ctx.op(
        "Transpose", result, perm=[*range(1, axis + 1), 0, *range(axis + 1, len(rest) + 1)]
    )


@register_lowering("aten.masked_select")
def lower_masked_select(ctx: LoweringContext, node: Node) -> ir.Value:
    x, mask = inputs_of(node, "self", "mask")
    common = _broadcast([x, mask])
    flat = [
        ctx.op("Reshape", ctx.expand(ctx.value(value), value.shape, common), ctx.constant([-1]))
        for value in (x, mask)
    ]
    return ctx.op("Compress", *flat, axis=0)


def _broadcast(values: list[Value]) -> list[Dim]:
    rank = max(len(value.shape) for value in values)
    shape: list[Dim] = [1] * rank
    for value in values:
        for axis, dim in enumerate(value.shape, rank - len(value.shape)):
            if not same(dim, 1):
                shape[axis] = dim
    return shape


@register_lowering("aten.index_select")
def lower_index_select(ctx: LoweringContext, node: Node) -> ir.Value | None:
    """None for a single number, as for gathers and scatters, which a formula makes a row of."""
    if not input_of(node, "self").shape:
        return None
    args = ctx.args(node)
    index = args["index"]
    if not input_of(node, "index").shape:
        index = ctx.op("Unsqueeze", index, ctx.constant([0]))
    return ctx.op("Gather", args["self"], index, axis=args["dim"])


@register_lowering("aten.gather")
def lower_gather(ctx: LoweringContext, node: Node) -> ir.Value | None:
    if not input_of(node, "self").shape:
        return None
    args, kind = ctx.args(node), input_of(node, "index").dtype
    places = args["index"] if kind == torch.int32 else ctx.cast(args["index"], torch.int64)
    return ctx.op("GatherElements", args["self"], places, axis=args["dim"])


@register_lowering("aten.scatter.src", "aten.scatter.value", "aten.scatter_add")
def lower_scatter(ctx: LoweringContext, node: Node) -> ir.Value | None:
    if not input_of(node, "self").shape:
        return None
    args, dtype = ctx.args(node), node.output.dtype
    index = input_of(node, "index")
    if node.op == "aten.scatter.value":
        updates = ctx.expand(ctx.number(args["value"], dtype), (), index.shape)
    else:
        # torch reads the corner of src that the index covers
        updates, src = args["src"], input_of(node, "src")
        for axis, (has, needs) in enumerate(zip(src.shape, index.shape, strict=True)):
            if not same(has, needs):
                bounds = (ctx.constant([0]), ctx.shape([needs]), ctx.constant([axis]))
                updates = ctx.op("Slice", updates, *bounds)
    reduction = "add" if node.op == "aten.scatter_add" else "none"
    axis = axis_of(args["dim"], len(node.output.shape))
    return ctx.op(
        "ScatterElements", args["self"], args["index"], updates, axis=axis, reduction=reduction
    )


@register_lowering("aten.index_add")
def lower_index_add(ctx: LoweringContext, node: Node) -> ir.Value | None:
    """Adds slice i of the source to slice index[i]; None for bools too."""
    args, dtype = ctx.args(node), node.output.dtype
    if dtype == torch.bool or not node.output.shape:
        return None
    axis = axis_of(args["dim"], len(node.output.shape))
    source = input_of(node, "source")
    place: list[Dim] = [-1 if i == axis else 1 for i in range(len(source.shape))]
    rows = ctx.op("Reshape", ctx.cast(args["index"], torch.int64), ctx.shape(place))
    wide = ctx.op("Expand", rows, ctx.shape(source.shape))
    updates = args["source"]
    if args["alpha"] != 1:
        updates = ctx.op("Mul", updates, ctx.number(args["alpha"], dtype))
    return ctx.op("ScatterElements", args["self"], wide, updates, axis=axis, reduction="add")
