"""A causal attention cut into blocks of queries, each of which sees the keys up to its own end.

No kernel of onnxruntime's CPU provider gains from causality: it computes the whole square and masks
half of it. Cut into n blocks, (n + 1) / 2n of the square is computed; with a window, each block
leaves out the keys before that of its first query too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch.utils._sympy.functions import FloorDiv

from attngraph.export.lowering.attention.masks import Prepared, causal_mask, window_mask
from attngraph.export.lowering.attention.site import QKV
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.values import onnx_shape
from attngraph.ir import TensorType, Value
from attngraph.ir.dims import Dim, as_dim, least, same

Attend = Callable[[ir.Value, ir.Value, ir.Value, ir.Value], ir.Value]


@dataclass(frozen=True)
class Block:
    """Queries `first` to `last`, which see keys from `begin` to `end`: as dims."""

    first: Dim
    last: Dim
    begin: Dim
    end: Dim


@dataclass(frozen=True)
class Blocks:
    """All blocks, of `size` queries but for the last, and the mask of all queries and keys."""

    parts: tuple[Block, ...]
    size: Dim
    window: int
    mask: ir.Value
    query: Value
    key: Value


def prepare_blocks(
    ctx: LoweringContext, count: int, query: Value, key: Value, prepared: Prepared, window: int
) -> Blocks:
    """Up to `count` blocks, and their mask, which layers share; `window` 0 is none."""
    queries, keys = query.shape[1], key.shape[1]

    def make() -> ir.Value:
        mask = prepared.attn_mask
        rules = [causal_mask(ctx, 0, queries, keys)] if prepared.causal or mask is None else []
        if window and not (isinstance(queries, int) and queries <= window):
            rules.append(window_mask(ctx, 0, queries, keys, window))
        return _with_rules(ctx, mask, rules)

    size = as_dim(FloorDiv(queries + (count - 1), count))
    firsts: list[Dim] = [as_dim(index * size) for index in range(count)]
    if isinstance(queries, int):
        firsts = [first for first in firsts if first < queries]  # without those of none
    parts = []
    for first in firsts:
        last = queries if same(first, firsts[-1]) else as_dim(first + size)
        end = last if same(queries, keys) else least(last, keys)
        begin = as_dim(first - least(first, window - 1)) if window else 0
        parts.append(Block(first, last, begin, end))
    kind = "mask of blocks", prepared.attn_mask, prepared.causal, window
    mask = ctx.once((*kind, queries, keys), make)
    return Blocks(tuple(parts), size, window, mask, query, key)


def in_blocks(ctx: LoweringContext, blocks: Blocks, qkv: QKV, attend: Attend) -> ir.Value:
    """The blocks' contexts, one after the other, which are those of the whole.

    A dynamic number of queries must be at least the square of the number of blocks, so that none is
    empty. Their bounds are computed here, where shorter calls take another branch.
    """
    parts = blocks.parts
    if len(parts) == 1:
        return attend(*qkv, blocks.mask)
    sizes, starts, ends = _bounds(ctx, blocks)
    queries = ctx.ops("Split", qkv[0], sizes, outputs=len(parts), axis=1)
    masks = ctx.ops("Split", blocks.mask, sizes, outputs=len(parts), axis=-2)
    contexts = []
    for part, query, mask, *bounds in zip(parts, queries, masks, starts, ends, strict=True):
        # shape inference knows no dim of what is cut at computed places; Attention asks for one
        query.shape = _resized(blocks.query.tensor_type, as_dim(part.last - part.first))
        seen = [*qkv[1:], mask]
        if not (same(part.begin, 0) and same(part.end, blocks.key.shape[1])):
            axes = (1, 1, -1)
            seen = [
                ctx.op("Slice", operand, *bounds, ctx.constant([axis]))
                for operand, axis in zip(seen, axes, strict=True)
            ]
            for operand, whole in zip(seen[:2], qkv[1:], strict=True):
                if whole.shape is not None:
                    length = _resized(blocks.key.tensor_type, as_dim(part.end - part.begin))[1]
                    operand.shape = ir.Shape([whole.shape[0], length, whole.shape[2]])
        contexts.append(attend(query, seen[0], seen[1], seen[2]))
    return ctx.op("Concat", *contexts, axis=1)


def _bounds(
    ctx: LoweringContext, blocks: Blocks
) -> tuple[ir.Value, Sequence[ir.Value], Sequence[ir.Value]]:
    """How many queries each block has, and the first key that it sees and the one behind."""
    parts, queries = blocks.parts, blocks.query.shape[1]
    count = len(parts)
    if isinstance(queries, int):
        sizes = ctx.shape([as_dim(part.last - part.first) for part in parts])
        return (
            sizes,
            [ctx.shape([part.begin]) for part in parts],
            [ctx.shape([part.last]) for part in parts],
        )
    # all blocks at once, as each node of sizes takes a microsecond
    step = ctx.shape([blocks.size])
    firsts = ctx.op("Mul", step, ctx.constant(list(range(count))))
    lasts = ctx.op("Mul", step, ctx.constant(list(range(1, count + 1))))
    lasts = ctx.op("Min", lasts, ctx.shape([queries]))
    begins: Sequence[ir.Value] = [ctx.constant([0])] * count
    if blocks.window:
        found = ctx.op("Sub", firsts, ctx.constant(blocks.window - 1))
        found = ctx.op("Max", found, ctx.constant(0))
        begins = ctx.ops("Split", found, outputs=count, axis=0, num_outputs=count)
    ends = ctx.ops("Split", lasts, outputs=count, axis=0, num_outputs=count)
    return ctx.op("Sub", lasts, firsts), begins, ends


def _with_rules(ctx: LoweringContext, mask: ir.Value | None, rules: Sequence[ir.Value]) -> ir.Value:
    if not rules and mask is not None:
        return mask
    allowed = rules[0] if len(rules) == 1 else ctx.op("And", *rules)
    if mask is None:
        return allowed
    if mask.dtype == ir.DataType.BOOL:
        return ctx.op("And", allowed, mask)
    assert mask.dtype is not None
    dtype = ir.tensor_adapters.to_torch_dtype(mask.dtype)
    return ctx.op("Where", allowed, mask, ctx.constant(-torch.inf, dtype))


def _resized(type: TensorType, length: Dim) -> ir.Shape:
    return onnx_shape(TensorType(type.dtype, (type.shape[0], length, *type.shape[2:])))
