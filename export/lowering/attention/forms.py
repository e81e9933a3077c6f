"""The forms of a packed attention in ONNX: which function emits which."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from attngraph.export.kernels import Choice, Form
from attngraph.export.kernels.table import GROUPED, MULTI_HEAD, NONPAD, PRIMITIVE, SHARED
from attngraph.export.lowering.attention.blocks import in_blocks, prepare_blocks
from attngraph.export.lowering.attention.cache import in_cache
from attngraph.export.lowering.attention.grouped_query import grouped, key_counts, prepare_grouped
from attngraph.export.lowering.attention.masks import Prepared
from attngraph.export.lowering.attention.operator import (
    attention_op,
    on_given,
    padded,
    with_sink_key,
)
from attngraph.export.lowering.attention.primitive import primitive
from attngraph.export.lowering.attention.site import QKV, Emitted, Packed
from attngraph.export.lowering.emission.context import MICROSOFT, LoweringContext
from attngraph.ir import Value
from attngraph.ir.dims import as_dim, bounds, same


def emit(
    ctx: LoweringContext, choice: Choice, site: Packed, prepared: Callable[[Form], Prepared]
) -> Emitted:
    """The context (B, S, H·E) and, where asked for, the probabilities (B, H, S, T)."""
    forms = [choice.form, *([] if choice.below is None else [choice.below])]
    lengths = [site.query.shape[1], site.key.shape[1]]
    is_plain = site.past_key is None and not site.weights
    if not is_plain or forms == [PRIMITIVE] or all(bounds(n, ctx.graph.dims)[0] for n in lengths):
        return _by_length(ctx, choice, site, prepared)()
    return _if_any(ctx, site, _by_length(ctx, choice, site, prepared)), None


def _if_any(ctx: LoweringContext, site: Packed, emitted: Callable[[], Emitted]) -> ir.Value:
    """The context where there are queries and keys, which kernels ask for, and zeros elsewhere: the
    softmax over no keys sums no values."""
    queries, keys = site.query.shape[1], site.key.shape[1]
    pairs = queries if same(queries, keys) else as_dim(queries * keys)
    some = ctx.once(("some", pairs), lambda: ctx.op("Greater", ctx.dim(pairs), ctx.constant(0)))
    width = site.value.shape[2] // site.groups * site.heads
    shape, zero = ctx.shape([site.query.shape[0], queries, width]), site.query.dtype

    def none() -> ir.Value:
        return ctx.op("Expand", ctx.constant(0.0, zero), shape)

    return ctx.branch(some, lambda: emitted()[0], none)


def _by_length(
    ctx: LoweringContext, choice: Choice, site: Packed, prepared: Callable[[Form], Prepared]
) -> Callable[[], Emitted]:
    """Emits what both forms share, and returns what emits the one for so many queries."""
    long = _form(ctx, choice.form, site, prepared(choice.form))
    if choice.below is None:
        return long
    short = _form(ctx, choice.below, site, prepared(choice.below))
    length = ctx.dim(site.query.shape[1])
    is_long = ctx.once(
        ("at least", site.query.shape[1], choice.start),
        lambda: ctx.op("GreaterOrEqual", length, ctx.constant(choice.start)),
    )
    return lambda: (ctx.branch(is_long, lambda: long()[0], lambda: short()[0]), None)


def _form(
    ctx: LoweringContext, form: Form, site: Packed, prepared: Prepared
) -> Callable[[], Emitted]:
    """Emits what layers share, and returns what emits the rest."""
    qkv = ctx.value(site.query), ctx.value(site.key), ctx.value(site.value)
    given = site.given if ctx.target.provider == "cpu" and not ctx.target.portable else None
    if form.blocks:
        blocks = prepare_blocks(
            ctx, form.blocks, site.query, site.key, prepared, site.masking.window
        )

        def attend(query: ir.Value, key: ir.Value, value: ir.Value, mask: ir.Value) -> ir.Value:
            part = Prepared(mask, causal=False)
            return attention_op(ctx, (query, key, value), part, site)[0]

        return lambda: (in_blocks(ctx, blocks, qkv, attend), None)
    if form == SHARED:
        return lambda: in_cache(ctx, qkv, prepared, site)
    if form.op == GROUPED.op:
        shared = prepare_grouped(ctx, form, site)
        return lambda: (grouped(ctx, shared, site), None)
    if form == MULTI_HEAD:
        return lambda: (_multi_head(ctx, (qkv[0], *_packed(ctx, site, given)), site), None)
    if form == PRIMITIVE:
        return lambda: primitive(ctx, qkv, prepared, site)
    if form.padded:
        return lambda: (padded(ctx, qkv, prepared, site), None)
    if form == NONPAD and site.masking.lengths is not None:
        counts = key_counts(ctx, site.masking.lengths, 0, site.key.shape[1])
        return lambda: attention_op(ctx, qkv, prepared, site, counts)
    if site.sinks is not None:
        return lambda: with_sink_key(ctx, qkv, prepared, site)
    if given is not None:
        return lambda: on_given(ctx, qkv[0], given, prepared, site)
    return lambda: attention_op(ctx, qkv, prepared, site)


def _packed(
    ctx: LoweringContext, site: Packed, given: tuple[Value, Value] | None
) -> tuple[ir.Value, ir.Value]:
    """Packed keys and values; made of given ones here, which may be one branch of two."""
    if given is None:
        return ctx.value(site.key), ctx.value(site.value)
    turned = (ctx.op("Transpose", ctx.value(each), perm=[0, 2, 1, 3]) for each in given)
    shapes = ([each.shape[n] for n in (0, 2, 1, 3)] for each in given)
    key, value = (
        ctx.reshape(each, shape, packed.shape)
        for each, shape, packed in zip(turned, shapes, (site.key, site.value), strict=True)
    )
    return key, value


def _multi_head(ctx: LoweringContext, qkv: QKV, site: Packed) -> ir.Value:
    """com.microsoft `MultiHeadAttention` without a mask."""
    return ctx.op(
        "MultiHeadAttention",
        *qkv,
        domain=MICROSOFT,
        num_heads=site.heads,
        scale=float(site.scale),
    )
