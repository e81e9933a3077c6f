"""Rows sorted by group, each group with a matrix of its own: the experts of a mixture."""

from __future__ import annotations

import onnx_ir as ir
import torch

from attngraph.errors import LoweringError
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Node, Value
from attngraph.ir.ops import input_of


@register_lowering("aten._grouped_mm")
def lower_grouped_mm(ctx: LoweringContext, node: Node) -> ir.Value:
    args = ctx.args(node)
    left, right = input_of(node, "self"), input_of(node, "mat2")
    if args["bias"] is not None:
        raise LoweringError("a bias of _grouped_mm has no meaning in torch yet")
    if len(left.shape) == 3 and len(right.shape) == 3 and args["offs"] is None:
        return ctx.op("MatMul", args["self"], args["mat2"])
    if len(left.shape) != 2 or len(right.shape) != 3:
        raise LoweringError("_grouped_mm has an ONNX form only where offsets split the rows")
    return _by_rows(ctx, left, right, args["offs"])


@register_lowering("transformers.grouped_mm_fallback")
def lower_grouped_mm_fallback(ctx: LoweringContext, node: Node) -> ir.Value:
    left, right = input_of(node, "input"), input_of(node, "weight")
    return _by_rows(ctx, left, right, ctx.args(node)["offs"])


def _by_rows(ctx: LoweringContext, left: Value, right: Value, offsets: ir.Value) -> ir.Value:
    """(S, K) × (G, K, N) → (S, N), where rows offsets[g-1] to offsets[g] take matrix g.

    The rows are split at run time into one part per group, some of them empty, and a rest that no
    group has, which gives zeros. So each row is multiplied once and no weight is copied per row.
    """
    groups = right.shape[0]
    if not isinstance(groups, int):
        raise LoweringError("its number of groups is dynamic; make it a constant of the model")
    rows, width = left.shape[0], right.shape[2]
    ends = ctx.op("Concat", ctx.cast(offsets, torch.int64), ctx.shape([rows]), axis=0)
    starts = ctx.op("Pad", ends, ctx.constant([1, -1]), mode="constant")
    counts = ctx.op("Sub", ends, starts)
    parts = ctx.ops("Split", ctx.value(left), counts, outputs=groups + 1, axis=0)
    matrices = ctx.ops("Split", ctx.value(right), outputs=groups, axis=0, num_outputs=groups)
    axis = ctx.constant([0])
    done = [
        ctx.op("MatMul", part, ctx.op("Squeeze", matrix, axis))
        for part, matrix in zip(parts, matrices, strict=False)
    ]
    rest = ctx.op("Slice", counts, ctx.constant([groups]), ctx.constant([groups + 1]))
    size = ctx.op("Concat", rest, ctx.shape([width]), axis=0)
    done.append(ctx.op("Expand", ctx.constant(0.0, left.dtype), size))
    return ctx.op("Concat", *done, axis=0)
