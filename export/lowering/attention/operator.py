"""ai.onnx `Attention`-24, with what it lacks: sinks, heads of any size, buffers as its past."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import sympy
import torch

from attngraph.export.lowering.attention.cache import pasts_of
from attngraph.export.lowering.attention.masks import Prepared
from attngraph.export.lowering.attention.site import QKV, Emitted, Packed, by_head
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.values import onnx_shape
from attngraph.ir import TensorType, Value
from attngraph.ir.dims import Dim, as_dim

_SOFTMAX = 3  # qk_matmul_output_mode: the probabilities


def attention_op(
    ctx: LoweringContext,
    qkv: QKV,
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
        pasts=pasts_of(ctx, site),
        keys=keys,
    )


def on_given(
    ctx: LoweringContext,
    query: ir.Value,
    given: tuple[Value, Value],
    prepared: Prepared,
    site: Packed,
) -> Emitted:
    """Takes keys and values as they were `given`, which the kernel would copy packed ones to.

    A step has one query, so the layouts of query and context cost nothing beside theirs.
    """
    shape, width = site.query.shape, site.value.shape[2] // site.groups
    context, weights, *_ = emit_attention(
        ctx,
        (by_head(ctx, query, shape, site.heads), ctx.value(given[0]), ctx.value(given[1])),
        prepared,
        site.dtype,
        scale=site.scale,
        softcap=site.softcap,
        weights=site.weights,
    )
    context = ctx.op("Transpose", context, perm=[0, 2, 1, 3])
    lead = list(shape[:2])
    packed = ctx.reshape(context, [*lead, site.heads, width], [*lead, site.heads * width])
    return packed, weights


def emit_attention(
    ctx: LoweringContext,
    qkv: QKV,
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


def with_sink_key(ctx: LoweringContext, qkv: QKV, prepared: Prepared, site: Packed) -> Emitted:
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


def sink_column(ctx: LoweringContext, site: Packed) -> ir.Value:
    """The sinks as (B, H, S, 1)."""
    assert site.sinks is not None
    sinks, shape = ctx.cast(ctx.value(site.sinks), site.dtype), list(site.sinks.shape)
    if len(shape) == 1:
        by_head: list[Dim] = [1, site.heads, 1, 1]
        sinks, shape = ctx.reshape(sinks, shape, by_head), by_head
    return ctx.expand(sinks, shape, [*_rows(site), 1])


def _rows(site: Packed) -> list[Dim]:
    return [site.query.shape[0], site.heads, site.query.shape[1]]


def _with_zero_key(ctx: LoweringContext, operand: ir.Value, packed: Value) -> ir.Value:
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


def padded(ctx: LoweringContext, qkv: QKV, prepared: Prepared, site: Packed) -> ir.Value:
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


def _widened(ctx: LoweringContext, value: ir.Value, shape: tuple[Dim, ...], heads: int) -> ir.Value:
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
