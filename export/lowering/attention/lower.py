"""Attention: `attn.attention` and torch's SDPA, as the operator that has the fastest kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import onnx_ir as ir
import torch

from attngraph.analysis.masks.masking import Masking, masking_of, scores_shape
from attngraph.errors import LoweringError
from attngraph.export.kernels import Form, choose, facts_of
from attngraph.export.kernels.facts import LENGTHS, NORMS, WINDOW
from attngraph.export.kernels.prologue import prologue_of
from attngraph.export.kernels.table import NONPAD, PRIMITIVE, SHARED
from attngraph.export.lowering.attention.cache import put_behind
from attngraph.export.lowering.attention.forms import emit
from attngraph.export.lowering.attention.masks import Prepared, Wanted, prepare, whole
from attngraph.export.lowering.attention.operator import emit_attention
from attngraph.export.lowering.attention.primitive import spelled_out
from attngraph.export.lowering.attention.site import Packed
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Node, Value
from attngraph.ir.dims import Dim, same
from attngraph.ir.ops import attribute, input_of, inputs_of


@register_lowering("attn.attention")
def lower_attention(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    """In the form that was chosen: packed heads go in and out as the projections give them."""
    query, key, value = inputs_of(node, "query", "key", "value")
    pasts = input_of(node, "past_key"), input_of(node, "past_value")
    masking, keys = masking_of(node), scores_shape(node)[3]
    heads, groups = attribute(node, "heads"), attribute(node, "kv_heads")
    static = ctx.buffers is not None and ctx.buffers.holds(pasts[0])
    facts = facts_of(node, ctx.graph.dims, static=static)
    choice = ctx.kernels.get(node) or choose(facts, ctx.target)
    sinks = input_of(node, "sinks")
    inside = choice.form.inside
    if sinks is not None:
        masking = replace(masking, masked_rows="zero")
    wanted = Wanted(masking, query.shape[1], keys, query.dtype, additive=sinks is not None)
    site = Packed(
        query,
        key,
        value,
        *pasts,
        heads,
        groups,
        attribute(node, "scale"),
        attribute(node, "softcap"),
        attribute(node, "weights"),
        masking,
        sinks,
        prologue_of(node, norms=NORMS in inside) if inside else None,
    )
    context, weights, *presents = emit(ctx, choice, site, partial(_prepared, ctx, wanted))
    forms = (choice.form, *([choice.below] if choice.below else []))
    found = [_prepared(ctx, wanted, form) for form in forms]
    prepared = next((one for one in found if one.dead is not None), found[0])
    if prepared.dead is not None:
        packed = _Context(query.shape[0], query.shape[1], heads, groups, value)
        everything = presents[1] if presents else None
        context = packed.repair(ctx, context, prepared, query.dtype, everything)
        weights = _repair_weights(ctx, weights, prepared, keys, query.dtype)
    if static and choice.form != SHARED:
        presents = put_behind(ctx, site)
    return [context, *presents] if weights is None else [context, weights, *presents]


def _prepared(ctx: LoweringContext, wanted: Wanted, form: Form) -> Prepared:
    """The mask for what a form doesn't take itself, and the rows that are left without any key."""
    masking = rest = wanted.masking
    entire = replace(wanted, fused=form != PRIMITIVE)
    if WINDOW in form.native and (form != SHARED or masking.is_band):
        # In place there is one kernel for masks, which takes the window too.
        rest = replace(rest, window=0)
    if LENGTHS not in form.native or masking.lengths is None:
        found = prepare(ctx, replace(entire, masking=rest))
        if rest == masking or not found.repair:
            return found
        # A row has no key where the window ends behind the last allowed one.
        return replace(found, dead=prepare(ctx, entire).dead)
    on_cpu = ctx.target.provider == "cpu" and not ctx.target.portable
    kernel = form == NONPAD and on_cpu and masking.masked_rows == "zero"
    found = prepare(ctx, replace(entire, masking=replace(rest, lengths=None)))
    if kernel:
        return found
    dead = _without_keys(ctx, masking.lengths)
    return replace(found, dead=dead, repair=masking.masked_rows)


def _without_keys(ctx: LoweringContext, lengths: Value) -> ir.Value:
    """(B, 1, 1, 1): the elements that have no key."""

    def make() -> ir.Value:
        none = ctx.op("Less", whole(ctx, lengths), ctx.constant(1))
        return ctx.op("Unsqueeze", none, ctx.constant([1, 2, 3]))

    return ctx.once(("without keys", lengths), make)


class _Context:
    """The (B, S, H·E) context, seen by heads where a repair differs between them."""

    def __init__(self, batch: Dim, queries: Dim, heads: int, groups: int, value: Value) -> None:
        self.packed = [batch, queries, value.shape[2] // groups * heads]
        self.split = [batch, queries, heads, value.shape[2] // groups]
        self.heads, self.groups, self.value = heads, groups, value

    def repair(
        self,
        ctx: LoweringContext,
        context: ir.Value,
        prepared: Prepared,
        dtype: torch.dtype,
        present: ir.Value | None,
    ) -> ir.Value:
        dead = ctx.op("Transpose", prepared.dead, perm=[0, 2, 1, 3])
        replacement = _replacement(ctx, prepared, dtype)
        if replacement is None:
            replacement = self._mean(ctx, present)
        by_head = ctx.reshape(context, self.packed, self.split)
        repaired = ctx.op("Where", dead, replacement, by_head)
        return ctx.reshape(repaired, self.split, self.packed)

    def _mean(self, ctx: LoweringContext, present: ir.Value | None) -> ir.Value:
        """(B, 1, H, E): each head's mean over all keys; `present` (B, G, T, E) are all values."""
        batch, _, heads, width = self.split
        if present is None:
            mean = ctx.op("ReduceMean", ctx.value(self.value), ctx.constant([1]), keepdims=1)
            packed = [batch, 1, self.value.shape[2]]
        else:
            mean = ctx.op("ReduceMean", present, ctx.constant([2]), keepdims=1)
            packed = [batch, self.groups, 1, width]
        grouped = [batch, 1, self.groups, 1, width]
        mean = ctx.reshape(mean, packed, grouped)
        wide = [batch, 1, self.groups, heads // self.groups, width]
        return ctx.reshape(ctx.expand(mean, grouped, wide), wide, [batch, 1, heads, width])


def _replacement(ctx: LoweringContext, prepared: Prepared, dtype: torch.dtype) -> ir.Value | None:
    if prepared.repair == "mean":
        return None
    return ctx.constant(0.0 if prepared.repair == "zero" else torch.nan, dtype)


def _repair_weights(
    ctx: LoweringContext,
    weights: ir.Value | None,
    prepared: Prepared,
    keys: Dim,
    dtype: torch.dtype,
) -> ir.Value | None:
    if weights is None:
        return None
    value = _replacement(ctx, prepared, dtype)
    if value is None:
        value = ctx.op("Reciprocal", ctx.number(keys, dtype))
    return ctx.op("Where", prepared.dead, value, weights)


@register_lowering("aten.scaled_dot_product_attention")
def lower_sdpa(ctx: LoweringContext, node: Node) -> ir.Value:
    """SDPA as torch means it: causal is top-left, and a row with nothing allowed gives 0.

    On CUDA it is spelled out: on a GPU the process that ran the tests of its kernel, and of a few
    others, ended with SIGSEGV twice, and the cause isn't known.
    """
    query, key, value, mask = inputs_of(node, "query", "key", "value", "attn_mask")
    if attribute(node, "dropout_p"):
        raise LoweringError(
            "it drops weights at inference too; give it dropout_p=p if self.training else 0.0"
        )
    scale, width = attribute(node, "scale"), query.shape[-1]
    factor = None
    if scale is None and isinstance(width, int):
        scale = width**-0.5
    elif scale is None:
        wide = torch.promote_types(query.dtype, torch.float32)
        root = ctx.op("Sqrt", ctx.number(width, wide))
        scale, factor = 1.0, ctx.cast(ctx.op("Reciprocal", root), query.dtype)
    rank = len(query.shape)
    lead: list[list[Dim]] = [list(operand.shape[:-2]) for operand in (query, key, value)]
    if rank > 4 or rank < 2 or any(len(dims) != rank - 2 for dims in lead):
        raise LoweringError(f"its operands have {rank} axes, where 2 to 4 have an ONNX form")
    boolean = mask is not None and mask.dtype == torch.bool
    fused = ctx.has("Attention") and ctx.target.provider != "cuda"
    prepared = prepare(
        ctx,
        Wanted(
            Masking(
                None if boolean else mask,
                mask if boolean else None,
                attribute(node, "is_causal"),
                "zero",
            ),
            query.shape[-2],
            key.shape[-2],
            query.dtype,
            fused=fused,
        ),
    )
    raised = []
    batch = _joined_batch(lead)
    for operand, dims in zip((query, key, value), lead, strict=True):
        raised.append(_four_axes(ctx, operand, dims, batch))
    if factor is not None:  # the head size is one of the run
        raised[0] = ctx.op("Mul", raised[0], factor)
    qkv = raised[0], raised[1], raised[2]
    if fused:
        context, *_ = emit_attention(ctx, qkv, prepared, query.dtype, scale=scale)
    else:
        shapes: list[list[Dim]] = [
            [*(batch or [1]), *[1, *operand.shape][-3:]] for operand in (query, key, value)
        ]
        context = spelled_out(ctx, qkv, prepared, shapes, query.dtype, scale)
    if prepared.dead is not None:
        context = ctx.op("Where", prepared.dead, _replacement(ctx, prepared, query.dtype), context)
    if rank < 4:
        context = ctx.op("Squeeze", context, ctx.constant(list(range(4 - rank))))
    return context


def _joined_batch(lead: list[list[Dim]]) -> list[Dim]:
    """The leading axes but the heads, broadcast over query, key and value."""
    return [
        next((dim for dim in dims if not same(dim, 1)), 1)
        for dims in zip(*(dims[:-1] for dims in lead), strict=True)
    ]


def _four_axes(ctx: LoweringContext, operand: Value, dims: list[Dim], batch: list[Dim]) -> ir.Value:
    """(B, H, S, D) from 2 to 4 axes, the batch broadcast."""
    value = ctx.value(operand)
    missing = 4 - len(operand.shape)
    if missing:
        return ctx.op("Unsqueeze", value, ctx.constant(list(range(missing))))
    return ctx.expand(value, operand.shape, [*batch, *dims[len(batch) :], *operand.shape[-2:]])
