"""Counts of values by bin."""

from __future__ import annotations

import onnx_ir as ir
import torch

from attngraph.errors import LoweringError
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Node


@register_lowering("aten.histc")
def lower_histc(ctx: LoweringContext, node: Node) -> ir.Value:
    """Equal bins from min to max, of which the last holds max too; what lies outside isn't counted.

    Numbers are compared in float32, as in torch.
    """
    args, dtype = ctx.args(node), node.output.dtype
    bins, low, high = args["bins"], args["min"], args["max"]
    if low == high or not all(isinstance(number, (int, float)) for number in (bins, low, high)):
        raise LoweringError("its range is that of its values; give histc a min and a max")
    flat = ctx.op("Reshape", args["self"], ctx.constant([-1]))
    values = ctx.cast(flat, torch.float64 if dtype == torch.float64 else torch.float32)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    first, last = ctx.constant(float(low), kind), ctx.constant(float(high), kind)
    inside = ctx.op(
        "And",
        ctx.op("GreaterOrEqual", values, first),
        ctx.op("LessOrEqual", values, last),
    )
    scaled = ctx.op("Mul", ctx.op("Sub", values, first), ctx.constant(float(bins), kind))
    position = ctx.op("Floor", ctx.op("Div", scaled, ctx.constant(float(high - low), kind)))
    position = ctx.op("Where", inside, position, ctx.constant(0.0, kind))
    position = ctx.op("Min", ctx.cast(position, torch.int64), ctx.constant(bins - 1, torch.int64))
    # Counted in float32, which every provider scatters; exact below 2²⁴ values in a bin.
    ones = ctx.cast(inside, torch.float32)
    empty = ctx.constant(torch.zeros(bins))
    counts = ctx.op("ScatterElements", empty, position, ones, axis=0, reduction="add")
    return ctx.cast(counts, dtype)
