"""Ops that move elements and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from attngraph.analysis.layout.moves import permutation
from attngraph.errors import LoweringError
from attngraph.export.lowering.attention.cache import past_of, put_into
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.export.lowering.emission.runtime_sizes import INT64_MAX
from attngraph.ir import Node, Value
from attngraph.ir.dims import as_dim, divide, same
from attngraph.ir.traits import PERMUTE


def source(node: Node) -> Value:
    """The tensor that is moved. Raises LoweringError where it is absent or complex."""
    value = node.inputs[0]
    if value is None or value.dtype.is_complex:
        raise LoweringError("complex tensors have no ONNX form")
    return value


def axis_of(dim: int, rank: int) -> int:
    """A dim counted from the front."""
    return dim + rank if dim < 0 else dim


@register_lowering(
    "aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten.using_ints", "aten.view_as",
    "aten.unflatten.int", "aten.reshape_as", "aten.ravel", "aten.view_copy", "aten._reshape_copy",
)  # fmt: skip
def lower_reshape(ctx: LoweringContext, node: Node) -> ir.Value:
    value = source(node)
    return ctx.reshape(ctx.value(value), value.shape, node.output.shape)


@register_lowering("aten.unsqueeze")
def lower_unsqueeze(ctx: LoweringContext, node: Node) -> ir.Value:
    axis = axis_of(node.attrs["dim"], len(node.output.shape))
    return ctx.op("Unsqueeze", ctx.value(source(node)), ctx.constant([axis]))


@register_lowering("aten.squeeze", "aten.squeeze.dim", "aten.squeeze.dims")
def lower_squeeze(ctx: LoweringContext, node: Node) -> ir.Value:
    value = source(node)
    rank = len(value.shape)
    dims = node.attrs.get("dim", range(rank))
    axes = {axis_of(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims)}
    gone = [axis for axis in sorted(axes) if rank and value.shape[axis] == 1]
    return ctx.op("Squeeze", ctx.value(value), ctx.constant(gone)) if gone else ctx.value(value)


@register_lowering(*PERMUTE)
def lower_permute(ctx: LoweringContext, node: Node) -> ir.Value:
    value = source(node)
    order = permutation(node, len(value.shape))
    if order == sorted(order):
        return ctx.value(value)
    return ctx.op("Transpose", ctx.value(value), perm=order)


@register_lowering("aten.expand", "aten.expand_as", "aten.broadcast_to", "aten.expand_copy")
def lower_expand(ctx: LoweringContext, node: Node) -> ir.Value:
    value = source(node)
    return ctx.expand(ctx.value(value), value.shape, node.output.shape)


@register_lowering("aten.slice.Tensor", "aten.narrow")
def lower_slice(ctx: LoweringContext, node: Node) -> ir.Value:
    value = source(node)
    axis = axis_of(node.attrs.get("dim", 0), len(value.shape))
    step = node.attrs.get("step", 1)
    start = node.attrs.get("start")
    start = 0 if start is None else start
    if node.op == "aten.narrow":
        end = as_dim(start + node.attrs["length"])
    else:
        end = node.attrs.get("end")
        end = INT64_MAX if end is None else end
    if same(value.shape[axis], node.output.shape[axis]) and start == 0 and step == 1:
        return ctx.value(value)
    if not isinstance(end, int) and same(end, value.shape[axis]):
        end = INT64_MAX
    bounds = [ctx.shape([start]), ctx.shape([end]), ctx.constant([axis])]
    if step != 1:
        bounds.append(ctx.shape([step]))
    return ctx.op("Slice", ctx.value(value), *bounds)


@register_lowering("aten.select.int")
def lower_select(ctx: LoweringContext, node: Node) -> ir.Value:
    value = source(node)
    axis = axis_of(node.attrs["dim"], len(value.shape))
    return ctx.op("Gather", ctx.value(value), ctx.dim(node.attrs["index"]), axis=axis)


@register_lowering("aten.cat", "aten.concat", "aten.concatenate")
def lower_cat(ctx: LoweringContext, node: Node) -> ir.Value:
    # torch lets empty 1-D tensors take part in any concatenation
    given = node.operands
    parts = [value for value in given if tuple(value.shape) != (0,)] or given[:1]
    values = [ctx.cast(ctx.value(value), node.output.dtype) for value in parts]
    if len(values) == 1:
        return values[0]
    axis = axis_of(node.attrs.get("dim", 0), len(node.output.shape))
    if ctx.buffers is not None and ctx.buffers.holds(parts[0]):
        if node.output in ctx.graph.outputs:
            return put_into(ctx, parts[0], values[1], parts[1].shape[axis])
        values[0] = past_of(ctx, parts[0])
    return ctx.op("Concat", *values, axis=axis)


@register_lowering("aten.stack")
def lower_stack(ctx: LoweringContext, node: Node) -> ir.Value:
    axis = axis_of(node.attrs.get("dim", 0), len(node.output.shape))
    parts = [ctx.cast(ctx.value(value), node.output.dtype) for value in node.operands]
    raised = [ctx.op("Unsqueeze", part, ctx.constant([axis])) for part in parts]
    return ctx.op("Concat", *raised, axis=axis) if len(raised) > 1 else raised[0]


@register_lowering(
    "aten.split.Tensor", "aten.split_with_sizes", "aten.split.sizes", "aten.chunk",
    "aten.tensor_split.sections", "aten.unsafe_split.Tensor", "aten.unsafe_chunk",
)  # fmt: skip
def lower_split(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    value = source(node)
    axis = axis_of(node.attrs.get("dim", 0), len(value.shape))
    if len(node.outputs) == 1:
        return (ctx.value(value),)
    sizes = ctx.shape([part.shape[axis] for part in node.outputs])
    return ctx.ops("Split", ctx.value(value), sizes, outputs=len(node.outputs), axis=axis)


@register_lowering("aten.unbind.int")
def lower_unbind(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    value = source(node)
    axis = axis_of(node.attrs.get("dim", 0), len(value.shape))
    return [
        ctx.op("Gather", ctx.value(value), ctx.dim(index), axis=axis)
        for index in range(len(node.outputs))
    ]


@register_lowering("aten.repeat", "aten.tile")
def lower_repeat(ctx: LoweringContext, node: Node) -> ir.Value:
    value = source(node)
    repeats = list(node.attrs["repeats" if node.op == "aten.repeat" else "dims"])
    rank = max(len(repeats), len(value.shape))
    repeats = [1] * (rank - len(repeats)) + repeats
    raised = [1] * (rank - len(value.shape)) + list(value.shape)
    result = ctx.reshape(ctx.value(value), value.shape, raised)
    if all(repeat == 1 for repeat in repeats):
        return result
    return ctx.op("Tile", result, ctx.shape(repeats))


@register_lowering("aten.repeat_interleave.self_int")
def lower_repeat_interleave(ctx: LoweringContext, node: Node) -> ir.Value:
    value, repeats = source(node), as_dim(node.attrs["repeats"])
    shape: list[Any] = list(value.shape)
    result = ctx.value(value)
    dim = node.attrs.get("dim")
    if dim is None:
        total = divide(node.output.shape[0], repeats)
        if total is None:
            raise LoweringError("the number of elements isn't known")
        result, shape, dim = ctx.reshape(result, shape, [total]), [total], 0
    axis = axis_of(dim, len(shape))
    raised = [*shape[: axis + 1], 1, *shape[axis + 1 :]]
    wide = [*shape[: axis + 1], repeats, *shape[axis + 1 :]]
    result = ctx.op("Unsqueeze", result, ctx.constant([axis + 1]))
    return ctx.reshape(ctx.expand(result, raised, wide), wide, node.output.shape)


@register_lowering("aten.constant_pad_nd", "aten.pad")
def lower_pad(ctx: LoweringContext, node: Node) -> ir.Value:
    value = source(node)
    mode = node.attrs.get("mode", "constant")
    names = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    before, after = [0] * len(value.shape), [0] * len(value.shape)
    for position, amount in enumerate(node.attrs["pad"]):
        (after if position % 2 else before)[-1 - position // 2] = amount
    number = node.attrs.get("value")
    fill = None
    if mode == "constant":
        fill = ctx.number(0 if number is None else number, value.dtype)
    return ctx.op("Pad", ctx.value(value), ctx.shape([*before, *after]), fill, mode=names[mode])
