"""Products of matrices that may be empty, or none, in a run: those of a selection's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir
import torch

from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.ir import Node, Value
from attngraph.ir.conditions import multiples
from attngraph.ir.dims import Dim, bounds, product, same


def may_be_empty(ctx: LoweringContext, dims: Sequence[Dim]) -> bool:
    """Whether some size may be 0. A multiple of 8 is 8 or more: it has a window of 8."""
    infos = dict(ctx.graph.dims)
    for name, step in multiples(ctx.graph.conditions).items():
        if name in infos and infos[name].low > 0:
            infos[name] = replace(infos[name], low=max(infos[name].low, step))
    return any(bounds(dim, infos)[0] < 1 for dim in dims)


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


def einsum(ctx: LoweringContext, node: Node, equation: str) -> ir.Value | None:
    """An einsum as a product of stacks of matrices; None where it is no such product.

    Letters of both operands count the matrices of a stack, which are broadcast, or are summed; the
    others are its rows and columns.
    """
    values = node.operands
    terms, arrow, output = equation.partition("->")
    left, comma, right = terms.partition(",")
    if not (arrow and comma and left.isalpha() and right.isalpha()) or len(values) != 2:
        return None
    if len({*left}) < len(left) or len({*right}) < len(right):
        return None  # a diagonal
    sizes = [dict(zip(t, v.shape, strict=True)) for t, v in zip((left, right), values, strict=True)]
    shared = [letter for letter in left if letter in right]
    stack = [letter for letter in shared if letter in output]
    summed = [letter for letter in shared if letter not in output]
    rows = [letter for letter in left if letter not in shared]
    columns = [letter for letter in right if letter not in shared]
    if {*stack, *rows, *columns} != {*output}:
        return None  # a sum over one operand alone
    unlike = [c for c in summed if not same(sizes[0][c], sizes[1][c])]
    if len(unlike) > 1 or any(size[c] == 1 for c in unlike for size in sizes):
        return None  # one of them is broadcast; of a single pair of sizes the product asks

    def moved(value: ir.Value, before: str, after: str) -> ir.Value:
        order = [before.index(letter) for letter in after]
        return value if before == after else ctx.op("Transpose", value, perm=order)

    def matrices(at: int, *groups: list[str]) -> ir.Value:
        letters = "".join((*stack, *groups[0], *groups[1]))
        turned = moved(ctx.value(values[at]), (left, right)[at], letters)
        shape = [1, *(sizes[at][letter] for letter in stack)]
        shape += [product(sizes[at][letter] for letter in group) for group in groups]
        return ctx.op("Reshape", turned, ctx.shape(shape), allowzero=1)

    terms_of_a_sum = product(sizes[0][letter] for letter in summed)
    both = matrices(0, rows, summed), matrices(1, summed, columns)
    found = stacked(ctx, *both, terms_of_a_sum, values[0].dtype)
    letters = "".join((*stack, *rows, *columns))
    shape = dict(zip(output, node.output.shape, strict=True))
    found = ctx.op("Reshape", found, ctx.shape([shape[c] for c in letters]), allowzero=1)
    return moved(found, letters, output)
