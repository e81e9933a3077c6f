"""Attention over the rows of a batch whose padding was left out.

onnxruntime's kernels want to know where a row lies in a padded layout with the padding on the right
(`token_offset`). Which tokens were padding makes no difference once they are gone, so that layout
is made up: element b has its rows at its first places, whatever they were in the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import sympy
import torch

from attngraph.export.kernels import choose, facts_of
from attngraph.export.kernels.table import PACKED_ROWS
from attngraph.export.lowering.attention.masks import Prepared
from attngraph.export.lowering.attention.operator import emit_attention
from attngraph.export.lowering.emission.context import MICROSOFT, LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Node, Value
from attngraph.ir.dims import Dim, as_dim
from attngraph.ir.ops import attribute, input_of, inputs_of


@dataclass(frozen=True)
class _Segments:
    """Where the N rows lie in a layout (B, T) with the padding on the right.

    `lengths` (B, 1) i64 and `ends` (B, 1) i64 are the number of rows of an element and of those up
    to it; `inside` (B, T) says which places have one.
    """

    lengths: ir.Value
    ends: ir.Value
    inside: ir.Value
    shape: tuple[Dim, Dim]

    @property
    def places(self) -> Dim:
        batch, length = self.shape
        return as_dim(sympy.sympify(batch) * sympy.sympify(length))


@register_lowering("attn.packed_attention")
def lower_packed_attention(ctx: LoweringContext, node: Node) -> ir.Value:
    """As PackedMultiHeadAttention, or as an Attention that gets the padded layout back."""
    choice = ctx.kernels.get(node) or choose(facts_of(node, ctx.graph.dims), ctx.target)
    kept = input_of(node, "kept")
    segments = ctx.once(("segments", kept), lambda: _segments(ctx, kept))
    if choice.form == PACKED_ROWS:
        return _packed(ctx, node, kept, segments)
    return _restored(ctx, node, kept, segments)


def _segments(ctx: LoweringContext, kept: Value) -> _Segments:
    batch, length = kept.shape
    number = ctx.cast(ctx.value(kept), torch.int64)
    lengths = ctx.op("ReduceSum", number, ctx.constant([1]), keepdims=1)
    ends = ctx.op("CumSum", lengths, ctx.constant(0))
    along = ctx.op("Range", ctx.constant(0), ctx.dim(length), ctx.constant(1))
    return _Segments(lengths, ends, ctx.op("Less", along, lengths), (batch, length))


def _offsets(ctx: LoweringContext, segments: _Segments) -> ir.Value:
    """(B·T,) i64: the places with a row in their order, then the places without one."""
    flat = ctx.reshape(segments.inside, segments.shape, [segments.places])
    at = ctx.op("Range", ctx.constant(0), ctx.dim(segments.places), ctx.constant(1))
    before = ctx.op("CumSum", ctx.cast(flat, torch.int64), ctx.constant(0))  # itself included
    number = ctx.op("Gather", before, ctx.constant([-1]))
    row = ctx.op("Sub", before, ctx.constant([1]))
    rest = ctx.op("Add", number, ctx.op("Sub", at, before))
    return ctx.op("ScatterElements", at, ctx.op("Where", flat, row, rest), at, axis=0)


def _packed(ctx: LoweringContext, node: Node, kept: Value, segments: _Segments) -> ir.Value:
    def offsets() -> ir.Value:
        wide = ctx.reshape(_offsets(ctx, segments), [segments.places], list(segments.shape))
        return ctx.cast(wide, torch.int32)

    def starts() -> ir.Value:
        ends = ctx.op("Reshape", segments.ends, ctx.constant([-1]))
        return ctx.cast(ctx.op("Concat", ctx.constant([0]), ends, axis=0), torch.int32)

    query, key, value = inputs_of(node, "query", "key", "value")
    rows = query.shape[1]
    flat = [_flat(ctx, operand) for operand in (query, key, value)]
    context = ctx.op(
        "PackedMultiHeadAttention",
        *flat,
        None,
        ctx.once(("token offset", kept), offsets),
        ctx.once(("cumulative length", kept), starts),
        domain=MICROSOFT,
        num_heads=attribute(node, "heads"),
        scale=float(attribute(node, "scale")),
    )
    width = node.output.shape[2]
    return ctx.reshape(context, [rows, width], [1, rows, width])


def _restored(ctx: LoweringContext, node: Node, kept: Value, segments: _Segments) -> ir.Value:
    """`Attention` told how many keys there are; what lies behind them is a copy of the last."""
    batch, length = segments.shape
    query, key, value = inputs_of(node, "query", "key", "value")
    rows = query.shape[1]

    def sources() -> ir.Value:
        along = ctx.op("Range", ctx.constant(0), ctx.dim(length), ctx.constant(1))
        start = ctx.op("Sub", segments.ends, segments.lengths)
        last = ctx.op("Sub", segments.ends, ctx.constant([1]))
        return ctx.op("Min", ctx.op("Add", start, along), last)

    def places() -> ir.Value:
        return ctx.op(
            "Slice",
            _offsets(ctx, segments),
            ctx.constant([0]),
            ctx.shape([rows]),
            ctx.constant([0]),
        )

    source = ctx.once(("packed row", kept), sources)
    number = ctx.once(
        ("rows of elements", kept),
        lambda: ctx.op("Reshape", segments.lengths, ctx.constant([-1])),
    )
    padded = [ctx.op("Gather", _flat(ctx, operand), source) for operand in (query, key, value)]
    context, *_ = emit_attention(
        ctx,
        (padded[0], padded[1], padded[2]),
        Prepared(None, causal=False),
        query.dtype,
        scale=attribute(node, "scale"),
        heads=(attribute(node, "heads"), attribute(node, "kv_heads")),
        keys=number,
    )
    width = node.output.shape[2]
    flat = ctx.reshape(context, [batch, length, width], [segments.places, width])
    packed = ctx.op("Gather", flat, ctx.once(("packed place", kept, rows), places))
    return ctx.reshape(packed, [rows, width], [1, rows, width])


def _flat(ctx: LoweringContext, operand: Value) -> ir.Value:
    """(N, W) of (1, N, W)."""
    return ctx.reshape(ctx.value(operand), operand.shape, list(operand.shape[1:]))
