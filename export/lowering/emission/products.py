"""Products of matrices of which a run may find none, or empty ones: of the rows of a selection."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.ir import Value
from attngraph.ir.dims import Dim, bounds


def may_be_empty(ctx: LoweringContext, dims: Sequence[Dim]) -> bool:
    """Whether some size may be 0."""
    return any(bounds(dim, ctx.graph.dims)[0] < 1 for dim in dims)


def matmul(ctx: LoweringContext, left: Value, right: Value) -> ir.Value:
    """The product of two values.

    onnxruntime makes one kernel of a product and a transpose that brings another axis to the front,
    which divides by a size of the rest: the process ends where that is 0. It doesn't look through
    an axis of one, which costs nothing.
    """
    a, b = ctx.value(left), ctx.value(right)
    ranks = len(left.shape), len(right.shape)
    if max(ranks) < 3:
        return ctx.op("MatMul", a, b)
    front, guards = ctx.constant([0]), may_be_empty(ctx, (*left.shape, *right.shape))
    if guards:
        a, b = (
            ctx.op("Unsqueeze", operand, front) if rank > 2 else operand
            for operand, rank in zip((a, b), ranks, strict=True)
        )
    product = stacked(ctx, a, b, left.shape[-1], left.dtype)
    return ctx.op("Squeeze", product, front) if guards else product


def stacked(
    ctx: LoweringContext, left: ir.Value, right: ir.Value, summed: Dim, dtype: torch.dtype
) -> ir.Value:
    """The product of stacks of matrices that sums `summed` terms.

    Where these are none, onnxruntime's kernel writes zeros into the first matrix of a stack, and
    the others are what the memory held before.
    """
    product = ctx.op("MatMul", left, right)
    if not may_be_empty(ctx, [summed]):
        return product
    is_empty = ctx.op("Equal", ctx.shape([summed]), ctx.constant([0]))
    return ctx.op("Where", is_empty, ctx.constant(0, dtype), product)
