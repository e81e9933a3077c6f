"""Matrix products, convolutions and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import onnx_ir as ir
import torch

from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.products import einsum, matmul, may_be_empty
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Node
from attngraph.ir.ops import input_of, inputs_of

_EXACT_SUMS = 1024  # products of two bytes whose sum a float32 holds


@register_lowering("aten.linear")
def lower_linear(ctx: LoweringContext, node: Node) -> ir.Value:
    """x Wᵀ + b. A matrix x takes Gemm, which reads W as it is, but none of integers."""
    x, weight, bias = inputs_of(node, "input", "weight", "bias")
    added = None if bias is None else ctx.value(bias)
    if len(x.shape) == 2 and len(weight.shape) == 2 and x.dtype.is_floating_point:
        return ctx.op("Gemm", ctx.value(x), ctx.value(weight), added, transB=1)
    right = ctx.transposed(weight) if len(weight.shape) == 2 else ctx.value(weight)
    product = ctx.op("MatMul", ctx.value(x), right)
    return product if added is None else ctx.op("Add", product, added)


@register_lowering("aten.matmul", "aten.bmm", "aten.mm", "aten.mv", "aten.dot")
def lower_matmul(ctx: LoweringContext, node: Node) -> ir.Value:
    return matmul(ctx, *node.operands)


@register_lowering("aten._int_mm")
def lower_integer_product(ctx: LoweringContext, node: Node) -> ir.Value:
    """Of int8 by int8 in int32, as hand-written quantized linears compute it.

    In floats that hold every sum of products: `MatMulInteger` may add two of them in 16 bits, which
    saturate, on CPUs without VNNI.
    """
    left, right = node.operands
    depth = left.shape[1]
    is_short = isinstance(depth, int) and depth <= _EXACT_SUMS
    dtype = torch.float32 if is_short else torch.float64
    sides = (ctx.cast(ctx.value(side), dtype) for side in (left, right))
    return ctx.cast(ctx.op("MatMul", *sides), torch.int32)


@register_lowering("aten.addmm")
def lower_addmm(ctx: LoweringContext, node: Node) -> ir.Value:
    args = ctx.args(node)
    alpha, beta = float(args["alpha"]), float(args["beta"])
    if not node.output.dtype.is_floating_point:
        product = ctx.op("MatMul", args["mat1"], args["mat2"])
        return _weighted(ctx, node, product)
    bias = args["self"] if beta else None
    return ctx.op("Gemm", args["mat1"], args["mat2"], bias, alpha=alpha, beta=beta)


@register_lowering("aten.baddbmm")
def lower_baddbmm(ctx: LoweringContext, node: Node) -> ir.Value:
    product = matmul(ctx, input_of(node, "batch1"), input_of(node, "batch2"))
    return _weighted(ctx, node, product)


def _weighted(ctx: LoweringContext, node: Node, product: ir.Value) -> ir.Value:
    """alpha · product + beta · self; with beta 0 self is not read, as it may hold NaN."""
    args, dtype = ctx.args(node), node.output.dtype
    if args["alpha"] != 1:
        product = ctx.op("Mul", product, ctx.number(args["alpha"], dtype))
    if args["beta"] == 0:
        return product
    added = args["self"]
    if args["beta"] != 1:
        added = ctx.op("Mul", added, ctx.number(args["beta"], dtype))
    return ctx.op("Add", added, product)


@register_lowering("aten.einsum")
def lower_einsum(ctx: LoweringContext, node: Node) -> ir.Value | None:
    values = node.operands
    if not node.output.dtype.is_floating_point:
        return None  # its parts: onnxruntime's kernel adds integers in double
    equation = _in_letters(node.attrs["equation"].replace(" ", ""), [len(v.shape) for v in values])
    if may_be_empty(ctx, [dim for value in values for dim in value.shape]):
        return einsum(ctx, node, equation)  # the kernel divides by some of the sizes
    # Outer products take operands of two dtypes, as positions times frequencies are.
    operands = [ctx.cast(ctx.value(value), node.output.dtype) for value in values]
    return ctx.op("Einsum", *operands, equation=equation)


def _in_letters(equation: str, ranks: Sequence[int]) -> str:
    """An equation whose dots, which torch sums over where the result has none, are letters."""
    terms, arrow, output = equation.partition("->")
    if "..." not in terms:
        return equation
    named = terms.split(",")
    ranges = [
        rank - len(term) + 3 if "..." in term else 0
        for term, rank in zip(named, ranks, strict=True)
    ]
    free = [letter for letter in ascii_letters if letter not in equation]
    letters = "".join(free[: max(ranges)])
    spelled = [
        term.replace("...", letters[len(letters) - count :])
        for term, count in zip(named, ranges, strict=True)
    ]
    if not arrow:
        single = [each for each in sorted({*terms} - {*",."}) if terms.count(each) == 1]
        output = "..." + "".join(single)
    is_any = all(spelled)  # a scalar among the operands has no letter
    return f"{','.join(spelled)}->{output.replace('...', letters)}" if is_any else equation


@register_lowering("aten.embedding")
def lower_embedding(ctx: LoweringContext, node: Node) -> ir.Value:
    args = ctx.args(node)
    return ctx.op("Gather", args["weight"], args["indices"], axis=0)


@register_lowering(
    "aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.conv1d.padding", "aten.conv2d.padding",
    "aten.conv3d.padding",
)  # fmt: skip
def lower_conv(ctx: LoweringContext, node: Node) -> ir.Value | None:
    if node.output.dtype == torch.float64 and ctx.target.provider == "cpu":
        return None  # there is a kernel of float32 alone
    args, dilation = ctx.args(node), _each(ctx, node, "dilation")
    spatial = len(dilation)
    if args["padding"] == "same":
        sizes = input_of(node, "weight").shape[2:]
        total = [d * (k - 1) for d, k in zip(dilation, sizes, strict=True)]
        pads = [t // 2 for t in total] + [t - t // 2 for t in total]
    elif args["padding"] == "valid":
        pads = [0] * 2 * spatial
    else:
        pads = _each(ctx, node, "padding") * 2
    return _convolved(ctx, node, "Conv", pads)


@register_lowering(
    "aten.conv_transpose1d", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"
)
def lower_conv_transpose(ctx: LoweringContext, node: Node) -> ir.Value | None:
    """Not padded at the end and dilated, which onnxruntime refuses.

    torch's own way to it depends on the size of the batch.
    """
    ends = _each(ctx, node, "output_padding")
    if any(ends) and any(step != 1 for step in _each(ctx, node, "dilation")):
        return None
    pads = _each(ctx, node, "padding") * 2
    return _convolved(ctx, node, "ConvTranspose", pads, output_padding=ends)


def _each(ctx: LoweringContext, node: Node, name: str) -> list[int]:
    """An argument of a convolution for each of its axes."""
    given = ctx.args(node)[name]
    values = list(given) if isinstance(given, (list, tuple)) else [given]
    spatial = len(input_of(node, "weight").shape) - 2
    return values * (spatial if len(values) == 1 else 1)


def _convolved(ctx: LoweringContext, node: Node, op: str, pads: list[int], **more: Any) -> ir.Value:
    args = ctx.args(node)
    axes = len(input_of(node, "weight").shape)
    unbatched = len(input_of(node, "input").shape) < axes
    data = ctx.op("Unsqueeze", args["input"], ctx.constant([0])) if unbatched else args["input"]
    result = ctx.op(
        op,
        data,
        args["weight"],
        args["bias"],
        strides=_each(ctx, node, "stride"),
        pads=pads,
        dilations=_each(ctx, node, "dilation"),
        group=args["groups"],
        **more,
    )
    return ctx.op("Squeeze", result, ctx.constant([0], torch.int64)) if unbatched else result
