"""The ways in which a packed attention is written to ONNX: one function for each form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
import sympy
import torch

from attngraph.export.kernels import Choice, Form
from attngraph.export.kernels.table import GROUPED, MULTI_HEAD, NONPAD, PRIMITIVE, SHARED
from attngraph.export.lowering.attention_blocks import in_blocks, prepare_blocks
from attngraph.export.lowering.attention_grouped import (
    grouped,
    key_counts,
    key_lengths,
    prepare_grouped,
)
from attngraph.export.lowering.attention_site import Packed
from attngraph.export.lowering.context import MICROSOFT, Context
from attngraph.export.lowering.masks import Prepared, causal_mask
from attngraph.export.lowering.values import onnx_shape
from attngraph.ir import TensorType, Value
from attngraph.ir.dims import Dim, as_dim

_SOFTMAX = 3  # qk_matmul_output_mode: the probabilities

Emitted = tuple[ir.Value, ir.Value | None, *tuple[ir.Value, ...]]
"""Context, weights if asked for, and with a past both presents."""


def emit(
    ctx: Context, choice: Choice, site: Packed, prepared: Callable[[Form], Prepared]
) -> Emitted:
    """The context (B, S, H·E) and, where asked for, the probabilities (B, H, S, T)."""
    long = _form(ctx, choice.form, site, prepared(choice.form))
    if choice.below is None:
        return long()
    short = _form(ctx, choice.below, site, prepared(choice.below))
    length = ctx.dim(site.query.shape[1])
    is_long = ctx.once(
        ("at least", site.query.shape[1], choice.start),
        lambda: ctx.op("GreaterOrEqual", length, ctx.constant(choice.start)),
    )
    return ctx.branch(is_long, lambda: long()[0], lambda: short()[0]), None


def _form(ctx: Context, form: Form, site: Packed, prepared: Prepared) -> Callable[[], Emitted]:
    """Emits what layers share, and returns what emits the rest."""
    qkv = ctx.value(site.query), ctx.value(site.key), ctx.value(site.value)
    if form.blocks:
        blocks = prepare_blocks(ctx, form.blocks, site.query, site.key, prepared, site.window)

        def attend(query: ir.Value, key: ir.Value, value: ir.Value, mask: ir.Value) -> ir.Value:
            part = Prepared(mask, causal=False)
            return attention_op(ctx, (query, key, value), part, site)[0]

        return lambda: (in_blocks(ctx, blocks, qkv, attend), None)
    if form == SHARED:
        return lambda: _shared(ctx, qkv, prepared, site)
    if form.op == GROUPED.op:
        shared = prepare_grouped(ctx, form, site)
        return lambda: (grouped(ctx, shared, site), None)
    if form == MULTI_HEAD:
        return lambda: (_multi_head(ctx, qkv, site), None)
    if form == PRIMITIVE:
        return lambda: _primitive(ctx, qkv, prepared, site)
    if form.padded:
        return lambda: (_padded(ctx, qkv, prepared, site), None)
    if form == NONPAD and site.lengths is not None:
        counts = key_counts(ctx, site.lengths, 0, site.key.shape[1])
        return lambda: attention_op(ctx, qkv, prepared, site, counts)
    if site.sinks is not None:
        return lambda: with_sink_key(ctx, qkv, prepared, site)
    return lambda: attention_op(ctx, qkv, prepared, site)


def attention_op(
    ctx: Context,
    qkv: tuple[ir.Value, ir.Value, ir.Value],
    prepared: Prepared,
    site: Packed,
    keys: ir.Value | None = None,
) -> Emitted:
    """ai.onnx `Attention`-24 on packed heads; of each element's keys, the first `keys` (B,)."""
    return emit_attention(
        ctx,
        qkv,
        prepared,
        site.dtype,
        scale=site.scale,
        softcap=site.softcap,
        weights=site.weights,
        heads=(site.heads, site.groups),
        pasts=_pasts(ctx, site),
        keys=keys,
    )


def with_sink_key(
    ctx: Context,
    qkv: tuple[ir.Value, ir.Value, ir.Value],
    prepared: Prepared,
    site: Packed,
) -> Emitted:
    """Sinks as one more key, which is zero and has a zero value: its logit is what the mask adds.

    The mask must be a bias that holds everything, causality too.
    """
    assert site.sinks is not None
    assert prepared.attn_mask is not None
    key, value = (
        _with_zero_key(ctx, operand, packed)
        for operand, packed in zip(qkv[1:], (site.key, site.value), strict=True)
    )
    mask = ctx.op("Expand", prepared.attn_mask, ctx.shape([*_rows(site), 1]))
    bias = Prepared(ctx.op("Concat", mask, sink_column(ctx, site), axis=3), causal=False)
    context, weights, *_ = attention_op(ctx, (qkv[0], key, value), bias, site)
    if weights is not None:
        bounds = ctx.constant([0]), ctx.shape([site.key.shape[1]]), ctx.constant([3])
        weights = ctx.op("Slice", weights, *bounds)
    return context, weights


def sink_column(ctx: Context, site: Packed) -> ir.Value:
    """The sinks as (B, H, S, 1)."""
    assert site.sinks is not None
    sinks, shape = ctx.cast(ctx.value(site.sinks), site.dtype), list(site.sinks.shape)
    if len(shape) == 1:
        by_head: list[Dim] = [1, site.heads, 1, 1]
        sinks, shape = ctx.reshape(sinks, shape, by_head), by_head
    return ctx.expand(sinks, shape, [*_rows(site), 1])


def _rows(site: Packed) -> list[Dim]:
    return [site.query.shape[0], site.heads, site.query.shape[1]]


def _with_zero_key(ctx: Context, operand: ir.Value, packed: Value) -> ir.Value:
    batch, keys, width = packed.shape
    number = ctx.constant(torch.zeros(1, 1, 1, dtype=packed.dtype))
    zero = ctx.once(
        ("zero key", batch, width, packed.dtype),
        lambda: ctx.op("Expand", number, ctx.shape([batch, 1, width])),
    )
    longer = ctx.op("Concat", operand, zero, axis=1)
    shape = batch, as_dim(sympy.sympify(keys) + 1), width
    longer.shape = onnx_shape(TensorType(packed.dtype, shape))  # Attention asks for it
    return longer


def _pasts(ctx: Context, site: Packed) -> list[ir.Value]:
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
        by_head = _by_head(ctx, ctx.value(part), (batch, new, part.shape[2]), site.groups)
        written.append(ctx.op("TensorScatter", ctx.value(past), by_head, start, axis=2))
    return written


def emit_attention(
    ctx: Context,
    qkv: tuple[ir.Value, ir.Value, ir.Value],
    prepared: Prepared,
    dtype: torch.dtype,
    *,
    scale: float,
    softcap: float = 0.0,
    weights: bool = False,
    heads: tuple[int, int] | tuple[None, None] = (None, None),
    pasts: Sequence[ir.Value] = (),
    keys: ir.Value | None = None,
) -> Emitted:
    """`Attention`-24 on packed heads, or on (B, H, S, D) where `heads` is left out.

    With pasts it wants both presents bound. `keys` (B,) says how many there are in each element;
    the rest is padding.
    """
    query, key, value = qkv
    decodes = bool(pasts) and ctx.target.provider == "cpu" and dtype == torch.float32
    if scale <= 0 or dtype == torch.float64 or (decodes and scale != 1.0):
        # the op wants a positive scale, and takes the root of it in float32 where it is expanded;
        # its product of one query with all keys is faster where nothing scales it
        query, scale = ctx.op("Mul", query, ctx.constant(float(scale), dtype)), 1.0
    results = ctx.ops(
        "Attention",
        query,
        key,
        value,
        prepared.attn_mask,
        *(pasts or (None, None)),
        keys,
        outputs=(True, bool(pasts), bool(pasts), True) if weights else 3 if pasts else 1,
        scale=float(scale),
        is_causal=int(prepared.causal) or None,
        softcap=float(softcap) or None,
        qk_matmul_output_mode=_SOFTMAX if weights else None,
        softmax_precision=ir.DataType.DOUBLE if dtype == torch.float64 else None,
        q_num_heads=heads[0],
        kv_num_heads=heads[1],
    )
    return results[0], results[3] if weights else None, *results[1:3][: len(pasts)]


def _shared(
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
    )
    return context, None, *presents


def _multi_head(ctx: Context, qkv: tuple[ir.Value, ir.Value, ir.Value], site: Packed) -> ir.Value:
    """com.microsoft `MultiHeadAttention` without a mask."""
    return ctx.op(
        "MultiHeadAttention",
        *qkv,
        domain=MICROSOFT,
        num_heads=site.heads,
        scale=float(site.scale),
    )


def _padded(
    ctx: Context,
    qkv: tuple[ir.Value, ir.Value, ir.Value],
    prepared: Prepared,
    site: Packed,
) -> ir.Value:
    """Heads widened with zeros to a multiple of 8, and the context narrowed again."""
    query, key, value = site.query, site.key, site.value
    wide = (
        _widened(ctx, qkv[0], query.shape, site.heads),
        _widened(ctx, qkv[1], key.shape, site.groups),
        _widened(ctx, qkv[2], value.shape, site.groups),
    )
    context, *_ = attention_op(ctx, wide, prepared, site)
    size = _head_size(value.shape[2], site.groups)
    if size % 8 == 0:
        return context
    lead, heads = list(query.shape[:2]), site.heads
    full = size + -size % 8
    split = ctx.reshape(context, [*lead, heads * full], [*lead, heads, full])
    ends, axis = ctx.constant([size]), ctx.constant([3])
    narrow = ctx.op("Slice", split, ctx.constant([0]), ends, axis)
    return ctx.reshape(narrow, [*lead, heads, size], [*lead, heads * size])


def _widened(ctx: Context, value: ir.Value, shape: tuple[Dim, ...], heads: int) -> ir.Value:
    size = _head_size(shape[2], heads)
    if size % 8 == 0:
        return value
    lead, full = list(shape[:2]), size + -size % 8
    split = ctx.reshape(value, shape, [*lead, heads, size])
    zero = ctx.constant(torch.zeros((), dtype=_torch_dtype(value)))
    wide = ctx.op("Pad", split, ctx.constant([0, full - size]), zero, ctx.constant([3]))
    return ctx.reshape(wide, [*lead, heads, full], [*lead, heads * full])


def _head_size(width: Dim, heads: int) -> int:
    assert isinstance(width, int)  # the kernel table asks for it
    return width // heads


def _torch_dtype(value: ir.Value) -> torch.dtype:
    assert value.dtype is not None
    return ir.tensor_adapters.to_torch_dtype(value.dtype)


def _primitive(
    ctx: Context,
    qkv: tuple[ir.Value, ir.Value, ir.Value],
    prepared: Prepared,
    site: Packed,
) -> Emitted:
    """The two products and the softmax as operators of their own."""
    query = ctx.op("Mul", qkv[0], ctx.constant(float(site.scale), site.dtype))
    query = _by_head(ctx, query, site.query.shape, site.heads)
    key, value = (
        _by_head(ctx, packed, operand.shape, site.groups)
        for packed, operand in zip(qkv[1:], (site.key, site.value), strict=True)
    )
    pasts, new = _pasts(ctx, site), site.key.shape[1]
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


def _softmax(ctx: Context, logits: ir.Value, keys: Dim, site: Packed) -> ir.Value:
    """Over the keys; sinks are one more logit, whose probability is dropped."""
    if site.sinks is None:
        return ctx.op("Softmax", logits, axis=-1)
    column = sink_column(ctx, site)
    weights = ctx.op("Softmax", ctx.op("Concat", logits, column, axis=3), axis=-1)
    bounds = ctx.constant([0]), ctx.shape([keys]), ctx.constant([3])
    return ctx.op("Slice", weights, *bounds)


def _by_head(ctx: Context, value: ir.Value, shape: tuple[Dim, ...], heads: int) -> ir.Value:
    """(B, S, H·D) → (B, H, S, D)."""
    split = ctx.reshape(value, shape, [*shape[:2], heads, shape[2] // heads])
    return ctx.op("Transpose", split, perm=[0, 2, 1, 3])


def _repeated(ctx: Context, value: ir.Value, keys: Dim, packed: Value, site: Packed) -> ir.Value:
    """(B, G, T, D) → (B, H, T, D), each group repeated for its heads."""
    heads, groups = site.heads, site.groups
    if heads == groups:
        return value
    batch, width = packed.shape[0], packed.shape[2] // groups
    one = [batch, groups, 1, keys, width]
    many = [batch, groups, heads // groups, keys, width]
    repeated = ctx.expand(ctx.op("Unsqueeze", value, ctx.constant([2])), one, many)
    return ctx.reshape(repeated, many, [batch, heads, keys, width])
