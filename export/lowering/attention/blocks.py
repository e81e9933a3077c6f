"""A causal attention cut into blocks of queries, each of which sees the keys up to its own end.

No kernel of onnxruntime's CPU provider gains from causality: it computes the whole square and masks
half of it. Cut into n blocks, (n + 1) / 2n of the square is computed; with a window, each block
leaves out the keys before that of its first query too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx_ir as ir
import torch
from torch.utils._sympy.functions import FloorDiv

from attngraph.export.lowering.attention.masks import Prepared, causal_mask, window_mask
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.values import onnx_shape
from attngraph.ir import TensorType, Value
from attngraph.ir.dims import Dim, as_dim, least, same

Attend = Callable[[ir.Value, ir.Value, ir.Value, ir.Value], ir.Value]


@dataclass(frozen=True)
class Block:
    """Queries `first` to `last`, which see those keys from `begin` to `keys` that `mask` allows.

    `start` and `end` are these as 1-D tensors.
    """

    first: Dim
    last: Dim
    begin: Dim
    keys: Dim
    start: ir.Value
    end: ir.Value
    mask: ir.Value


@dataclass(frozen=True)
class Blocks:
    """All blocks, the sizes to split the queries by, and the operands' types."""

    parts: tuple[Block, ...]
    sizes: ir.Value | None
    query: TensorType
    key: TensorType


def prepare_blocks(
    ctx: LoweringContext, count: int, query: Value, key: Value, prepared: Prepared, window: int
) -> Blocks:
    """The bounds and masks of `count` blocks, which layers share; `window` 0 is none.

    A dynamic number of queries must be at least `count`², so that no block is empty.
    """
    queries, keys = query.shape[1], key.shape[1]

    def make() -> Blocks:
        bounds = _bounds(queries, count)
        parts = tuple(
            _block(ctx, first, last, queries, keys, prepared, window)
            for first, last in pairwise(bounds)
        )
        sizes = None
        if len(parts) > 1:
            sizes = ctx.shape([as_dim(part.last - part.first) for part in parts])
        return Blocks(parts, sizes, query.tensor_type, key.tensor_type)

    types = query.type, key.type
    return ctx.once(("blocks", count, types, prepared.attn_mask, prepared.causal, window), make)


def in_blocks(
    ctx: LoweringContext, blocks: Blocks, qkv: tuple[ir.Value, ir.Value, ir.Value], attend: Attend
) -> ir.Value:
    """The blocks' contexts, one after the other, which are those of the whole."""
    queries: tuple[ir.Value, ...] = (qkv[0],)
    if blocks.sizes is not None:
        queries = ctx.ops("Split", qkv[0], blocks.sizes, outputs=len(blocks.parts), axis=1)
        for part, query in zip(blocks.parts, queries, strict=True):
            # shape inference knows no dim of what is cut at computed places; Attention asks for one
            query.shape = _resized(blocks.query, as_dim(part.last - part.first))
    contexts = []
    for part, query in zip(blocks.parts, queries, strict=True):
        key, value = (_first(ctx, operand, part, blocks.key) for operand in qkv[1:])
        contexts.append(attend(query, key, value, part.mask))
    return contexts[0] if len(contexts) == 1 else ctx.op("Concat", *contexts, axis=1)


def _bounds(queries: Dim, count: int) -> list[Dim]:
    """0, ⌈S/n⌉, 2⌈S/n⌉ … S, without the empty blocks that a number leaves."""
    if isinstance(queries, int):
        step = -(-queries // count)
        return [*range(0, queries, step), queries]
    size = FloorDiv(queries + (count - 1), count)
    # fewer queries take the other branch, but the bounds and masks are computed for them too
    return [0, *(least(as_dim(index * size), queries) for index in range(1, count)), queries]


def _block(
    ctx: LoweringContext,
    first: Dim,
    last: Dim,
    queries: Dim,
    keys: Dim,
    prepared: Prepared,
    window: int,
) -> Block:
    end = last if same(queries, keys) else least(last, keys)
    begin: Dim = 0
    if window and not same(first, 0):
        begin = as_dim(first - least(first, window - 1))
        begin = begin if same(queries, keys) else least(begin, keys)
    whole = same(first, 0) and same(last, queries) and same(begin, 0) and same(end, keys)
    mask = prepared.attn_mask
    if mask is not None and not whole:
        starts, ends = ctx.shape([first, begin]), ctx.shape([last, end])
        mask = ctx.op("Slice", mask, starts, ends, ctx.constant([2, 3]))
    rules = [causal_mask(ctx, first, last, end, begin)] if prepared.causal else []
    if window and not (isinstance(last, int) and last <= window):
        rules.append(window_mask(ctx, first, last, begin, end, window))
    if rules or mask is None:
        mask = _with_rules(ctx, mask, rules or [causal_mask(ctx, first, last, end, begin)])
    return Block(first, last, begin, end, ctx.shape([begin]), ctx.shape([end]), mask)


def _with_rules(ctx: LoweringContext, mask: ir.Value | None, rules: Sequence[ir.Value]) -> ir.Value:
    allowed = rules[0] if len(rules) == 1 else ctx.op("And", *rules)
    if mask is None:
        return allowed
    if mask.dtype == ir.DataType.BOOL:
        return ctx.op("And", allowed, mask)
    assert mask.dtype is not None
    dtype = ir.tensor_adapters.to_torch_dtype(mask.dtype)
    return ctx.op("Where", allowed, mask, ctx.constant(-torch.inf, dtype))


def _first(ctx: LoweringContext, operand: ir.Value, block: Block, type: TensorType) -> ir.Value:
    """The keys, or the values, that a block sees; `type` is that of all keys."""
    if same(block.begin, 0) and same(block.keys, type.shape[1]):
        return operand
    part = ctx.op("Slice", operand, block.start, block.end, ctx.constant([1]))
    if operand.shape is not None:
        length = _resized(type, as_dim(block.keys - block.begin))[1]
        part.shape = ir.Shape([operand.shape[0], length, operand.shape[2]])
    return part


def _resized(type: TensorType, length: Dim) -> ir.Shape:
    return onnx_shape(TensorType(type.dtype, (type.shape[0], length, *type.shape[2:])))
