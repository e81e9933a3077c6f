"""The past of an attention, and how new keys and values are written to a static cache."""

from __future__ import annotations

import onnx_ir as ir
import sympy
import torch

from attngraph.export.lowering.attention.grouped_query import key_lengths
from attngraph.export.lowering.attention.masks import Prepared
from attngraph.export.lowering.attention.site import QKV, Emitted, Packed, by_head
from attngraph.export.lowering.emission.context import MICROSOFT, LoweringContext
from attngraph.ir import Value
from attngraph.ir.dims import Dim, as_dim


def pasts_of(ctx: LoweringContext, site: Packed) -> list[ir.Value]:
    """The keys and values of the tokens so far, out of their buffers."""
    pasts = (site.past_key, site.past_value)
    return [past_of(ctx, past) for past in pasts if past is not None]


def past_of(ctx: LoweringContext, past: Value) -> ir.Value:
    """The tokens so far, out of their buffer where they lie in one."""
    value = ctx.value(past)
    if ctx.buffers is None or not ctx.buffers.holds(past):
        return value
    axis = ctx.buffers.axes[past.name]
    end = ctx.shape([past.shape[axis]])
    return ctx.op("Slice", value, ctx.constant([0]), end, ctx.constant([axis]))


def put_behind(ctx: LoweringContext, site: Packed) -> list[ir.Value]:
    """The buffers of a static cache, with the new keys and values behind what they held."""
    written = []
    for past, part in ((site.past_key, site.key), (site.past_value, site.value)):
        assert past is not None
        heads = by_head(ctx, ctx.value(part), tuple(part.shape), site.groups)
        written.append(put_into(ctx, past, heads, part.shape[1]))
    return written


def put_into(ctx: LoweringContext, past: Value, new: ir.Value, tokens: Dim) -> ir.Value:
    """The buffer of a past, with what is new, of so many `tokens`, behind what it held."""
    assert ctx.buffers is not None
    axis = ctx.buffers.axes[past.name]
    batch, before = past.shape[0], past.shape[axis]
    if not ctx.has("TensorScatter"):
        places = _places(ctx, [*past.shape[:axis], tokens, *past.shape[axis + 1 :]], axis, before)
        return ctx.op("ScatterElements", ctx.value(past), places, new, axis=axis)
    start = ctx.once(
        ("written at", batch, before),
        lambda: ctx.op("Expand", ctx.shape([before]), ctx.shape([batch])),
    )
    return ctx.op("TensorScatter", ctx.value(past), new, start, axis=axis)


def _places(ctx: LoweringContext, shape: list[Dim], axis: int, before: Dim) -> ir.Value:
    """Where along its axis each element of what is new goes."""

    def make() -> ir.Value:
        end = as_dim(sympy.sympify(shape[axis]) + before)
        along = ctx.op("Range", ctx.dim(before), ctx.dim(end), ctx.constant(1))
        last = len(shape) - axis - 1
        if last:
            along = ctx.op("Unsqueeze", along, ctx.constant(list(range(1, last + 1))))
        return ctx.op("Expand", along, ctx.shape(shape))

    return ctx.once(("places", tuple(shape), axis, before), make)


def in_cache(ctx: LoweringContext, qkv: QKV, prepared: Prepared, site: Packed) -> Emitted:
    """com.microsoft `GroupQueryAttention` that writes into the cache, where it is bound so."""
    assert site.past_key is not None
    assert site.past_value is not None
    keys = as_dim(sympy.sympify(site.key.shape[1]) + site.past_key.shape[2])
    query, scale, sinks = qkv[0], float(site.scale), None
    if ctx.target.provider == "cpu":
        # A sink so low that it takes no weight keeps the kernel from its tiled form, which is half
        # as fast for one query; and its product with all keys is faster where nothing scales it.
        lowest = torch.full((site.heads,), torch.finfo(site.dtype).min, dtype=site.dtype)
        sinks = ctx.constant(lowest, name="no_sink")
        query, scale = ctx.op("Mul", query, ctx.constant(scale, site.dtype)), 1.0
    bias = prepared.attn_mask
    if bias is not None and bias.dtype == ir.DataType.BOOL:
        mask = bias
        bias = ctx.once(
            ("additive", mask, site.dtype),
            lambda: ctx.op(
                "Where", mask, *(ctx.constant(x, site.dtype) for x in (0.0, -torch.inf))
            ),
        )
    context, *presents = ctx.ops(
        "GroupQueryAttention",
        query,
        *qkv[1:],
        ctx.value(site.past_key),
        ctx.value(site.past_value),
        *key_lengths(ctx, None, site.key.shape[0], keys),
        None,
        None,
        None,
        bias,
        sinks,
        outputs=3,
        domain=MICROSOFT,
        num_heads=site.heads,
        kv_num_heads=site.groups,
        scale=scale,
        softcap=float(site.softcap) or None,
        local_window_size=None if bias is not None else site.masking.window or None,
    )
    return context, None, *presents
