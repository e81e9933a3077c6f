"""Softmaxes of our own dialect."""

from __future__ import annotations

import onnx_ir as ir

from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Node
from attngraph.ir.dims import Dim
from attngraph.ir.ops import attribute, input_of


@register_lowering("attn.sink_softmax")
def lower_sink_softmax(ctx: LoweringContext, node: Node) -> ir.Value:
    """Softmax over one more column, which is then cut off."""
    x, sink = input_of(node, "x"), input_of(node, "sink")
    dim = attribute(node, "dim") % len(x.shape)
    column: list[Dim] = [1 if axis == dim else size for axis, size in enumerate(x.shape)]
    wide = ctx.expand(ctx.value(sink), sink.shape, column)
    logits = ctx.op("Concat", ctx.value(x), wide, axis=dim)
    probabilities = ctx.op("Softmax", logits, axis=dim)
    ends = ctx.shape([x.shape[dim]])
    return ctx.op("Slice", probabilities, ctx.constant([0]), ends, ctx.constant([dim]))
