"""An attention as two products and a softmax, for what no kernel takes whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir
import sympy
import torch

from attngraph.export.lowering.attention.cache import pasts_of
from attngraph.export.lowering.attention.masks import Prepared, causal_mask
from attngraph.export.lowering.attention.operator import sink_column
from attngraph.export.lowering.attention.site import QKV, Emitted, Packed, by_head
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.products import may_be_empty, stacked
from attngraph.ir.dims import Dim, as_dim


def primitive(ctx: LoweringContext, qkv: QKV, prepared: Prepared, site: Packed) -> Emitted:
    """The two products and the softmax as operators of their own."""
    query = qkv[0]
    if site.scale != 1.0:
        query = ctx.op("Mul", query, ctx.constant(float(site.scale), site.dtype))
    if _needs_no_heads(ctx, site):
        return _of_one_head(ctx, (query, *qkv[1:]), prepared, site)
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
    groups, batch = site.groups, site.key.shape[0]
    widths = (site.key.shape[2] // groups, site.value.shape[2] // groups)
    key, value = (
        _repeated(ctx, part, [batch, groups, keys, width], site.heads)
        for part, width in zip((key, value), widths, strict=True)
    )
    logits = ctx.op("MatMul", query, ctx.op("Transpose", key, perm=[0, 1, 3, 2]))
    logits = _capped(ctx, logits, site)
    past = as_dim(sympy.sympify(keys) - new)
    logits = _masked(ctx, logits, prepared, (past, as_dim(past + site.query.shape[1]), keys))
    weights = _softmax(ctx, logits, keys, site)
    packed = _packed(ctx, stacked(ctx, weights, value, keys, site.dtype), site)
    return packed, weights if site.weights else None, *presents


def _needs_no_heads(ctx: LoweringContext, site: Packed) -> bool:
    """Whether there is one head, and no size that may be 0: products of no rows want the axis
    (emission/products.py)."""
    if site.heads > 1 or site.past_key is not None or site.sinks is not None:
        return False
    return not may_be_empty(ctx, (*site.query.shape, *site.key.shape, *site.value.shape))


def _of_one_head(ctx: LoweringContext, qkv: QKV, prepared: Prepared, site: Packed) -> Emitted:
    """Without an axis of heads, which a few tokens would pay for at each step of a loop.

    The query of `qkv` is scaled already. The mask is (B, 1, S, T), as for a kernel.
    """
    query, key, value = qkv
    keys = site.key.shape[1]
    logits = ctx.op("MatMul", query, ctx.op("Transpose", key, perm=[0, 2, 1]))
    logits = _capped(ctx, logits, site)
    mask = prepared.attn_mask
    if mask is not None:
        prepared = replace(prepared, attn_mask=ctx.op("Squeeze", mask, ctx.constant([1])))
    logits = _masked(ctx, logits, prepared, (0, site.query.shape[1], keys))
    weights = ctx.op("Softmax", logits, axis=-1)
    context = stacked(ctx, weights, value, keys, site.dtype)
    return context, ctx.op("Unsqueeze", weights, ctx.constant([1])) if site.weights else None


def _packed(ctx: LoweringContext, context: ir.Value, site: Packed) -> ir.Value:
    """(B, H, S, E) → (B, S, H·E)."""
    if site.heads == 1:
        return ctx.op("Squeeze", context, ctx.constant([1]))
    context = ctx.op("Transpose", context, perm=[0, 2, 1, 3])
    lead, width = list(site.query.shape[:2]), site.value.shape[2] // site.groups
    return ctx.reshape(context, [*lead, site.heads, width], [*lead, site.heads * width])


def spelled_out(
    ctx: LoweringContext,
    qkv: QKV,
    prepared: Prepared,
    shapes: Sequence[Sequence[Dim]],
    dtype: torch.dtype,
    scale: float,
) -> ir.Value:
    """An attention of operands (B, H, S, D), whose `shapes` these are, as torch's SDPA has them."""
    query, key, value = qkv
    heads, groups = shapes[0][1], shapes[1][1]
    if isinstance(heads, int) and isinstance(groups, int) and groups > 1:  # else they broadcast
        key, value = (
            _repeated(ctx, part, shape, heads)
            for part, shape in zip((key, value), shapes[1:], strict=True)
        )
    query = ctx.op("Mul", query, ctx.constant(float(scale), dtype))
    logits = ctx.op("MatMul", query, ctx.op("Transpose", key, perm=[0, 1, 3, 2]))
    logits = _masked(ctx, logits, prepared, (0, shapes[0][2], shapes[1][2]))
    weights = ctx.op("Softmax", logits, axis=-1)
    return stacked(ctx, weights, value, shapes[1][2], dtype)


def _capped(ctx: LoweringContext, logits: ir.Value, site: Packed) -> ir.Value:
    if not site.softcap:
        return logits
    cap = ctx.constant(float(site.softcap), site.dtype)
    return ctx.op("Mul", ctx.op("Tanh", ctx.op("Div", logits, cap)), cap)


def _masked(
    ctx: LoweringContext, logits: ir.Value, prepared: Prepared, band: tuple[Dim, Dim, Dim]
) -> ir.Value:
    """`band` says between which positions the queries lie, and how many keys there are."""
    assert logits.dtype is not None
    low = ctx.constant(-torch.inf, ir.tensor_adapters.to_torch_dtype(logits.dtype))
    if prepared.causal:
        logits = ctx.op("Where", causal_mask(ctx, *band), logits, low)
    mask = prepared.attn_mask
    if mask is None:
        return logits
    if mask.dtype == ir.DataType.BOOL:
        return ctx.op("Where", mask, logits, low)
    return ctx.op("Add", logits, mask)


def _softmax(ctx: LoweringContext, logits: ir.Value, keys: Dim, site: Packed) -> ir.Value:
    """Over the keys; sinks are one more logit, whose probability is dropped."""
    if site.sinks is None:
        return ctx.op("Softmax", logits, axis=-1)
    column = sink_column(ctx, site)
    weights = ctx.op("Softmax", ctx.op("Concat", logits, column, axis=3), axis=-1)
    bounds = ctx.constant([0]), ctx.shape([keys]), ctx.constant([3])
    return ctx.op("Slice", weights, *bounds)


def _repeated(ctx: LoweringContext, value: ir.Value, shape: Sequence[Dim], heads: int) -> ir.Value:
    """(B, G, T, D), which is the `shape`, → (B, H, T, D), each group repeated for its heads."""
    batch, groups, keys, width = shape
    if heads == groups:
        return value
    assert isinstance(groups, int)
    one = [batch, groups, 1, keys, width]
    many = [batch, groups, heads // groups, keys, width]
    repeated = ctx.expand(ctx.op("Unsqueeze", value, ctx.constant([2])), one, many)
    return ctx.reshape(repeated, many, [batch, heads, keys, width])
