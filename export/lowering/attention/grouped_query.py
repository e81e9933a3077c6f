"""com.microsoft `GroupQueryAttention` on a prompt without a cache."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import sympy
import torch

from attngraph.export.kernels import Form
from attngraph.export.lowering.attention.masks import whole
from attngraph.export.lowering.attention.site import Packed
from attngraph.export.lowering.emission.context import MICROSOFT, LoweringContext
from attngraph.ir import Value
from attngraph.ir.dims import Dim, as_dim


@dataclass(frozen=True)
class Grouped:
    """The operands of one attention, some of which layers share.

    `last` (B,) is each element's last key, `count` the number of keys; `tables` are cosines and
    sines (S, R/2), `norms` weights (D,), each for query and key.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    last: ir.Value
    count: ir.Value
    tables: tuple[ir.Value, ir.Value] | tuple[None, None] = (None, None)
    norms: tuple[ir.Value, ir.Value] | tuple[None, None] = (None, None)


def prepare_grouped(ctx: LoweringContext, form: Form, site: Packed) -> Grouped:
    """The operands that take the place of masks and of the prologue."""
    batch, keys = site.key.shape[0], site.key.shape[1]
    value = ctx.value(site.value)
    last, count = key_lengths(ctx, site.masking.lengths, batch, keys)
    if not form.inside:
        return Grouped(ctx.value(site.query), ctx.value(site.key), value, last, count)
    prologue = site.prologue
    assert prologue is not None  # the kernel table asks for it
    cos, sin = (_table(ctx, table, site.dtype) for table in (prologue.cos, prologue.sin))
    operands = ctx.value(prologue.query), ctx.value(prologue.key), value
    if prologue.norms is None:
        return Grouped(*operands, last, count, (cos, sin))
    query, key = (
        _weight(ctx, weight, heads, operand)
        for weight, heads, operand in (
            (prologue.norms.query, site.heads, prologue.query),
            (prologue.norms.key, site.groups, prologue.key),
        )
    )
    return Grouped(*operands, last, count, (cos, sin), (query, key))


def grouped(ctx: LoweringContext, op: Grouped, site: Packed) -> ir.Value:
    """The context (B, S, H·D)."""
    presents = ctx.target.provider == "cuda"  # CUDA's kernel writes to them in any case
    prologue, sinks = site.prologue, site.sinks
    norms = None if prologue is None else prologue.norms
    return ctx.ops(
        "GroupQueryAttention",
        op.query,
        op.key,
        op.value,
        None,
        None,
        op.last,
        op.count,
        *op.tables,
        None,
        None,
        None if sinks is None else ctx.cast(ctx.value(sinks), site.dtype),
        None,
        None,
        *op.norms,
        outputs=(True, True, True) if presents else 1,
        domain=MICROSOFT,
        num_heads=site.heads,
        kv_num_heads=site.groups,
        scale=float(site.scale),
        softcap=float(site.softcap) or None,
        causal=None if site.masking.causal else 0,
        local_window_size=site.masking.window or None,
        do_rotary=int(op.tables[0] is not None) or None,
        rotary_interleaved=int(prologue is not None and prologue.interleaved) or None,
        qk_norm_epsilon=None if norms is None else norms.epsilon,
    )[0]


def key_counts(ctx: LoweringContext, lengths: Value, low: int, keys: Dim) -> ir.Value:
    """Lengths between `low` and the number of keys, beyond which onnxruntime fails: int64 (B,)."""

    def make() -> ir.Value:
        some = ctx.op("Max", whole(ctx, lengths), ctx.constant([low]))
        return ctx.op("Min", some, _beside(ctx, keys))

    return ctx.once(("key counts", lengths, low, keys), make)


def key_lengths(
    ctx: LoweringContext, lengths: Value | None, batch: Dim, keys: Dim
) -> tuple[ir.Value, ir.Value]:
    """`seqlens_k`, the place of each element's last key, the first one where it has none; and
    `total_sequence_length`, the number of keys."""
    count = ctx.once(("key count", keys), lambda: ctx.cast(ctx.dim(keys), torch.int32))
    return _last(ctx, lengths, batch, keys), count


def _last(ctx: LoweringContext, lengths: Value | None, batch: Dim, keys: Dim) -> ir.Value:

    def make() -> ir.Value:
        if lengths is None:
            last = ctx.cast(_beside(ctx, as_dim(sympy.sympify(keys) - 1)), torch.int32)
            return ctx.op("Expand", last, ctx.shape([batch]))
        count = key_counts(ctx, lengths, 1, keys)
        return ctx.cast(ctx.op("Sub", count, ctx.constant([1])), torch.int32)

    return ctx.once(("last key", lengths, batch, keys), make)


def _beside(ctx: LoweringContext, size: Dim) -> ir.Value:
    """A size as an int64 (1,) that lies where tensors lie: `Range` reads sizes on the CPU, where
    they are computed, and anything else that met one on CUDA would copy it there."""
    if isinstance(size, int):
        return ctx.constant([size])
    end = ctx.dim(as_dim(sympy.sympify(size) + 1))
    return ctx.once(("beside", size), lambda: ctx.op("Range", ctx.dim(size), end, ctx.constant(1)))


def _table(ctx: LoweringContext, table: Value, dtype: torch.dtype) -> ir.Value:
    """(1, S, R/2) as (S, R/2)."""

    def make() -> ir.Value:
        return ctx.op("Squeeze", ctx.cast(ctx.value(table), dtype), ctx.constant([0]))

    return ctx.once(("rotary table", table, dtype), make)


def _weight(ctx: LoweringContext, weight: Value | None, heads: int, operand: Value) -> ir.Value:
    if weight is not None:
        return ctx.value(weight)
    width = operand.shape[2]
    assert isinstance(width, int)  # the kernel table asks for it
    return ctx.constant(torch.ones(width // heads, dtype=operand.dtype), name="ones")
