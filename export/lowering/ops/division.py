"""Quotients and remainders, rounded as torch rounds them."""

from __future__ import annotations

import onnx_ir as ir
import torch

from attngraph.analysis.values.intervals import Intervals
from attngraph.analysis.values.scalars import number
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.export.lowering.ops.elementwise import operand
from attngraph.ir import Node
from attngraph.ir.ops import attribute, input_of, op_def


@register_lowering("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor")
def lower_div(ctx: LoweringContext, node: Node) -> ir.Value:
    """The quotient. The number under an `Erf` has a row and a column of its own.

    Of x / 1.4142 under one, as of any number near √2, onnxruntime makes the exact `Gelu` where it
    is a scalar. What computes that to its dtype's rounding is a GELU of the graph already.
    """
    dtype = node.output.dtype
    divisor = number(node.attrs.get("other"))
    if divisor is not None and len(node.output.shape) > 1 and _is_in_erf(node):
        other = ctx.constant([[divisor]], dtype)
    else:
        other = operand(ctx, node, "other", dtype)
    return ctx.op("Div", operand(ctx, node, "self", dtype), other)


def _is_in_erf(node: Node) -> bool:
    return any(user.op == "aten.erf" for user in node.output.users)


@register_lowering(
    "aten.div.Tensor_mode",
    "aten.div.Scalar_mode",
    "aten.floor_divide",
    "aten.floor_divide.Scalar",
)
def lower_div_mode(ctx: LoweringContext, node: Node) -> ir.Value:
    """Rounded division. Floats take the floor of a − fmod(a, b) over b, as torch does."""
    dtype = node.output.dtype
    mode = node.attrs.get("rounding_mode") if "mode" in node.op else "floor"
    a, b = operand(ctx, node, "self", dtype), operand(ctx, node, "other", dtype)
    if mode is None:
        return ctx.op("Div", a, b)
    if not dtype.is_floating_point:
        return _floor_quotient(ctx, node, a, b) if mode == "floor" else ctx.op("Div", a, b)
    quotient = ctx.op("Div", a, b)
    if mode == "trunc":
        negative = ctx.op("Less", quotient, ctx.constant(0.0, dtype))
        return ctx.op("Where", negative, ctx.op("Ceil", quotient), ctx.op("Floor", quotient))
    remainder = ctx.op("Mod", a, b, fmod=1)
    whole = ctx.op("Round", ctx.op("Div", ctx.op("Sub", a, remainder), b))
    zero = ctx.constant(0.0, dtype)
    crossed = _opposite(ctx, remainder, b, dtype)
    stepped = ctx.op("Where", crossed, ctx.op("Sub", whole, ctx.constant(1.0, dtype)), whole)
    by_zero = ctx.op("Equal", b, zero)
    return ctx.op("Where", by_zero, quotient, stepped)


def _floor_quotient(ctx: LoweringContext, node: Node, a: ir.Value, b: ir.Value) -> ir.Value:
    """Of integers, whose `Div` cuts towards 0.

    (a − (a mod b)) / b has no rest to cut, but wraps around where a is next to the least integer;
    what may be so is cut first, and is one less where there is a rest and the signs differ.
    """
    dtype = node.output.dtype
    if not dtype.is_signed:
        return ctx.op("Div", a, b)
    rest = ctx.op("Mod", a, b)
    (low, _), (least, most) = _integers(node, "self"), _integers(node, "other")
    if least > 0 and (low >= 0 or low - most >= torch.iinfo(dtype).min):
        return ctx.op("Div", ctx.op("Sub", a, rest), b)
    zero = ctx.constant(0, dtype)
    differs = ctx.op("Less", a, zero)
    if least <= 0:
        differs = ctx.op("Xor", differs, ctx.op("Less", b, zero))
    crossed = ctx.op("And", differs, ctx.cast(rest, torch.bool))
    return ctx.op("Sub", ctx.op("Div", a, b), ctx.cast(crossed, dtype))


def _integers(node: Node, name: str) -> tuple[int, int]:
    """Between which an integer argument lies."""
    if op_def(node.op).arg(name).kind == "attr":
        number = attribute(node, name)
        return (number, number) if isinstance(number, int) else (0, torch.iinfo(torch.int64).max)
    low, high = Intervals().of(input_of(node, name))
    limits = torch.iinfo(torch.int64)
    return int(max(low, limits.min)), int(min(high, limits.max))


def _opposite(ctx: LoweringContext, a: ir.Value, b: ir.Value, dtype: torch.dtype) -> ir.Value:
    """Where the signs differ, by a product of signs: that of the numbers may underflow."""
    signs = ctx.op("Mul", ctx.op("Sign", a), ctx.op("Sign", b))
    return ctx.op("Less", signs, ctx.constant(0.0, dtype))


@register_lowering("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def lower_remainder(ctx: LoweringContext, node: Node) -> ir.Value:
    dtype = node.output.dtype
    a, b = operand(ctx, node, "self", dtype), operand(ctx, node, "other", dtype)
    if not dtype.is_floating_point:
        return ctx.op("Mod", a, b)
    remainder = ctx.op("Mod", a, b, fmod=1)
    crossed = _opposite(ctx, remainder, b, dtype)
    return ctx.op("Where", crossed, ctx.op("Add", remainder, b), remainder)
