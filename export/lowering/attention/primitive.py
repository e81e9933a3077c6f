"""An attention as two products and a softmax, for what no kernel takes whole."""

from __future__ import annotations

import onnx_ir as ir
import sympy
import torch

from attngraph.export.lowering.attention.cache import pasts_of
from attngraph.export.lowering.attention.masks import Prepared, causal_mask
from attngraph.export.lowering.attention.operator import sink_column
from attngraph.export.lowering.attention.site import Emitted, Packed, by_head
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.ir import Value
from attngraph.ir.dims import Dim, as_dim


def primitive(
    ctx: LoweringContext,
    qkv: tuple[ir.Value, ir.Value, ir.Value],
    prepared: Prepared,
    site: Packed,
) -> Emitted:
    """The two products and the softmax as operators of their own."""
    query = ctx.op("Mul", qkv[0], ctx.constant(float(site.scale), site.dtype))
    query = by_head(ctx, query, site.query.shape, site.heads)
    key, value = (
        by_head(ctx, packed, operand.shape, site.groups)
        for packed, operand in zip(qkv[1:], (site.key, site.value), strict=True)
    )
    pasts, new = pasts_of(ctx, site), site.key.shape[1]
    keys: Dim = new
    if pasts and site.past_key is not None:
        key, value = (
            ctx.op("Concat", past, part, axis=2)
            for past, part in zip(pasts, (key, value), strict=True)
        )
        keys = as_dim(sympy.sympify(new) + site.past_key.shape[2])
    presents = (key, value) if pasts else ()
    key = _repeated(ctx, key, keys, site.key, site)
    value = _repeated(ctx, value, keys, site.value, site)
    logits = ctx.op("MatMul", query, ctx.op("Transpose", key, perm=[0, 1, 3, 2]))
    if site.softcap:
        cap = ctx.constant(float(site.softcap), site.dtype)
        logits = ctx.op("Mul", ctx.op("Tanh", ctx.op("Div", logits, cap)), cap)
    low = ctx.constant(-torch.inf, site.dtype)
    if prepared.causal:
        past = as_dim(sympy.sympify(keys) - new)
        lower = causal_mask(ctx, past, as_dim(past + site.query.shape[1]), keys)
        logits = ctx.op("Where", lower, logits, low)
    if (mask := prepared.attn_mask) is not None:
        if mask.dtype == ir.DataType.BOOL:
            logits = ctx.op("Where", mask, logits, low)
        else:
            logits = ctx.op("Add", logits, mask)
    weights = _softmax(ctx, logits, keys, site)
    context = ctx.op("Transpose", ctx.op("MatMul", weights, value), perm=[0, 2, 1, 3])
    lead, width = list(site.query.shape[:2]), site.value.shape[2] // site.groups
    packed = ctx.reshape(context, [*lead, site.heads, width], [*lead, site.heads * width])
    return packed, weights if site.weights else None, *presents


def _softmax(ctx: LoweringContext, logits: ir.Value, keys: Dim, site: Packed) -> ir.Value:
    """Over the keys; sinks are one more logit, whose probability is dropped."""
    if site.sinks is None:
        return ctx.op("Softmax", logits, axis=-1)
    column = sink_column(ctx, site)
    weights = ctx.op("Softmax", ctx.op("Concat", logits, column, axis=3), axis=-1)
    bounds = ctx.constant([0]), ctx.shape([keys]), ctx.constant([3])
    return ctx.op("Slice", weights, *bounds)


def _repeated(
    ctx: LoweringContext, value: ir.Value, keys: Dim, packed: Value, site: Packed
) -> ir.Value:
    """(B, G, T, D) → (B, H, T, D), each group repeated for its heads."""
    heads, groups = site.heads, site.groups
    if heads == groups:
        return value
    batch, width = packed.shape[0], packed.shape[2] // groups
    one = [batch, groups, 1, keys, width]
    many = [batch, groups, heads // groups, keys, width]
    repeated = ctx.expand(ctx.op("Unsqueeze", value, ctx.constant([2])), one, many)
    return ctx.reshape(repeated, many, [batch, heads, keys, width])
