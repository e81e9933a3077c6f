"""What an attention has of the tokens so far, and how new ones get into a static cache."""

from __future__ import annotations

import onnx_ir as ir
import sympy
import torch

from attngraph.export.lowering.attention_grouped import key_lengths
from attngraph.export.lowering.attention_site import Emitted, Packed, by_head
from attngraph.export.lowering.context import MICROSOFT, Context
from attngraph.export.lowering.masks import Prepared
from attngraph.ir.dims import as_dim


def pasts_of(ctx: Context, site: Packed) -> list[ir.Value]:
    """The keys and values of the tokens so far, out of their buffers."""
    found = []
    for past in (site.past_key, site.past_value):
        if past is None:
            continue
        value = ctx.value(past)
        if ctx.buffers is not None and ctx.buffers.holds(past):
            end = ctx.shape([past.shape[2]])
            value = ctx.op("Slice", value, ctx.constant([0]), end, ctx.constant([2]))
        found.append(value)
    return found


def put_behind(ctx: Context, site: Packed) -> list[ir.Value]:
    """The buffers of a static cache, with the new keys and values behind what they held."""
    assert site.past_key is not None
    batch, new, before = site.key.shape[0], site.key.shape[1], site.past_key.shape[2]
    start = ctx.once(
        ("written at", batch, before),
        lambda: ctx.op("Expand", ctx.shape([before]), ctx.shape([batch])),
    )
    written = []
    for past, part in ((site.past_key, site.key), (site.past_value, site.value)):
        assert past is not None
        heads = by_head(ctx, ctx.value(part), (batch, new, part.shape[2]), site.groups)
        written.append(ctx.op("TensorScatter", ctx.value(past), heads, start, axis=2))
    return written


def in_cache(
    ctx: Context,
    qkv: tuple[ir.Value, ir.Value, ir.Value],
    prepared: Prepared,
    site: Packed,
) -> Emitted:
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
        local_window_size=None if bias is not None else site.window or None,
    )
    return context, None, *presents
