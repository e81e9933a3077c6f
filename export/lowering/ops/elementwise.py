"""Pointwise ops, with ATen's type promotion spelled out: ONNX has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from attngraph.errors import LoweringError
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Node, ScalarType, Value
from attngraph.ir.ops import attribute, input_of, op_def
from attngraph.ir.traits import (
    CAST,
    CHOICE,
    COMPARISON,
    LAYOUT,
    LOGARITHM,
    MULTIPLICATION,
    POWER,
    QUOTIENT,
    ROUNDING,
    SUM,
)

_RELATIVE = LOGARITHM | QUOTIENT | POWER
_FAR = 16  # values behind a sigmoid that are looked at
_WIDER = {torch.int8: torch.int32, torch.uint8: torch.int32, torch.int16: torch.int32}


def operand(ctx: LoweringContext, node: Node, name: str, dtype: torch.dtype) -> ir.Value:
    """A tensor or scalar argument, in the dtype the op computes in."""
    if op_def(node.op).arg(name).kind == "attr":
        return ctx.number(attribute(node, name), dtype)
    return ctx.cast(ctx.value(input_of(node, name)), dtype)


def promoted(node: Node, *names: str) -> torch.dtype:
    """The dtype in which ATen computes on these arguments."""
    samples: list[Any] = []
    for name in names:
        if op_def(node.op).arg(name).kind == "attr":
            value = attribute(node, name)
            if not isinstance(value, (bool, int, float)):
                value = 1 if value.is_integer else 1.0
            samples.append(value)
            continue
        value = input_of(node, name)
        if isinstance(value.type, ScalarType):
            samples.append({"int": 1, "float": 1.0, "bool": True}[value.type.kind])
        else:
            shape = [1] * len(value.shape)
            samples.append(torch.empty(shape, dtype=value.dtype, device="meta"))
    dtype = torch.result_type(samples[0], samples[1])
    for sample in samples[2:]:
        dtype = torch.promote_types(dtype, torch.result_type(sample, sample))
    return dtype


def _wrapped(ctx: LoweringContext, node: Node, name: str, dtype: torch.dtype) -> ir.Value:
    """An operand; of a whole number the bits that the dtype has, as in torch: 300 is 44 in int8."""
    if op_def(node.op).arg(name).kind == "attr" and not dtype.is_floating_point:
        value = attribute(node, name)
        if isinstance(value, int) and not isinstance(value, bool):
            return ctx.constant(torch.tensor(value).to(dtype).item(), dtype)
    return operand(ctx, node, name, dtype)


_LOGICAL = {"Add": "Or", "Mul": "And", "Max": "Or", "Min": "And"}


def _arithmetic(
    op_type: str, first: str = "self", second: str = "other"
) -> Callable[[LoweringContext, Node], ir.Value]:
    """first ⋄ alpha · second."""

    def lower(ctx: LoweringContext, node: Node) -> ir.Value:
        dtype = node.output.dtype
        left, right = (_wrapped(ctx, node, name, dtype) for name in (first, second))
        alpha = node.attrs.get("alpha", 1)
        if alpha != 1:
            right = ctx.op("Mul", right, ctx.number(alpha, dtype))
        return ctx.op(_LOGICAL[op_type] if dtype == torch.bool else op_type, left, right)

    return lower


for _op, _type in {"add": "Add", "sub": "Sub", "mul": "Mul"}.items():
    register_lowering(f"aten.{_op}.Tensor", f"aten.{_op}.Scalar")(_arithmetic(_type))
register_lowering("aten.rsub.Tensor", "aten.rsub.Scalar")(_arithmetic("Sub", "other", "self"))


@register_lowering("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def lower_pow(ctx: LoweringContext, node: Node) -> ir.Value:
    dtype = node.output.dtype
    base = operand(ctx, node, "self", dtype)
    exponent = attribute(node, "exponent") if node.op.endswith("Tensor_Scalar") else None
    if exponent == 2:
        return ctx.op("Mul", base, base)
    if exponent == 0.5:
        return ctx.op("Sqrt", base)
    if exponent == -0.5:
        return ctx.op("Reciprocal", ctx.op("Sqrt", base))
    if exponent == 1:
        return base
    if not dtype.is_floating_point and isinstance(exponent, int) and exponent > 1:
        return _integer_power(ctx, base, exponent)
    if not dtype.is_floating_point and ctx.target.provider == "cuda":  # whose Pow cuts 2.99… to 2
        operands = (ctx.cast(base, torch.float64), operand(ctx, node, "exponent", torch.float64))
        return ctx.cast(ctx.op("Round", ctx.op("Pow", *operands)), dtype)
    return ctx.op("Pow", base, operand(ctx, node, "exponent", dtype))


def _integer_power(ctx: LoweringContext, base: ir.Value, exponent: int) -> ir.Value:
    """By products, which wrap as torch's do: `Pow` computes in double."""
    result = None
    while exponent:
        if exponent % 2:
            result = base if result is None else ctx.op("Mul", result, base)
        exponent //= 2
        if exponent:
            base = ctx.op("Mul", base, base)
    assert result is not None
    return result


@register_lowering("aten.maximum", "aten.max.other", "aten.minimum", "aten.min.other")
def lower_extremum(ctx: LoweringContext, node: Node) -> ir.Value:
    dtype = node.output.dtype
    op_type = "Max" if "max" in node.op else "Min"
    op_type = _LOGICAL[op_type] if dtype == torch.bool else op_type
    return ctx.op(op_type, operand(ctx, node, "self", dtype), operand(ctx, node, "other", dtype))


@register_lowering(
    "aten.clamp", "aten.clamp.Tensor", "aten.clamp_min", "aten.clamp_min.Tensor", "aten.clamp_max",
    "aten.clamp_max.Tensor", "aten.clip", "aten.clip.Tensor",
)  # fmt: skip
def lower_clamp(ctx: LoweringContext, node: Node) -> ir.Value:
    dtype = node.output.dtype
    result = operand(ctx, node, "self", dtype)
    names = {arg.name for arg in op_def(node.op).args}
    for name, op_type in (("min", "Max"), ("max", "Min")):
        if name not in names:
            continue
        absent = (
            attribute(node, name) is None
            if op_def(node.op).arg(name).kind == "attr"
            else input_of(node, name) is None
        )
        if not absent:
            op_type = _LOGICAL[op_type] if dtype == torch.bool else op_type
            result = ctx.op(op_type, result, operand(ctx, node, name, dtype))
    return result


_COMPARE = {
    "eq": "Equal",
    "ne": "Equal",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
}


@register_lowering(*COMPARISON)
def lower_compare(ctx: LoweringContext, node: Node) -> ir.Value:
    name = node.op.split(".")[1]
    dtype = promoted(node, "self", "other")
    dtype = _WIDER.get(dtype, dtype)
    if dtype == torch.bool and name not in ("eq", "ne"):
        dtype = torch.int32
    left, right = operand(ctx, node, "self", dtype), operand(ctx, node, "other", dtype)
    result = ctx.op(_COMPARE[name], left, right)
    return ctx.op("Not", result) if name == "ne" else result


_LOGIC = {"and": "And", "or": "Or", "xor": "Xor"}
_BITWISE = {"and": "BitwiseAnd", "or": "BitwiseOr", "xor": "BitwiseXor"}


@register_lowering(*(f"aten.logical_{op}" for op in _LOGIC))
def lower_logical(ctx: LoweringContext, node: Node) -> ir.Value:
    left = operand(ctx, node, "self", torch.bool)
    right = operand(ctx, node, "other", torch.bool)
    return ctx.op(_LOGIC[node.op.removeprefix("aten.logical_")], left, right)


@register_lowering(
    *(
        f"aten.{prefix}{op}{suffix}.{kind}"
        for op in _LOGIC
        for prefix, suffix in (("bitwise_", ""), ("__", "__"))
        for kind in ("Tensor", "Scalar")
    )
)
def lower_bitwise(ctx: LoweringContext, node: Node) -> ir.Value:
    name = node.op.split(".")[1].removeprefix("bitwise_").strip("_")
    dtype = node.output.dtype
    left, right = operand(ctx, node, "self", dtype), operand(ctx, node, "other", dtype)
    return ctx.op((_LOGIC if dtype == torch.bool else _BITWISE)[name], left, right)


@register_lowering("aten.logical_not", "aten.bitwise_not")
def lower_not(ctx: LoweringContext, node: Node) -> ir.Value:
    if node.output.dtype == torch.bool:
        return ctx.op("Not", operand(ctx, node, "self", torch.bool))
    return ctx.op("BitwiseNot", operand(ctx, node, "self", node.output.dtype))


@register_lowering(
    "aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar"
)
def lower_where(ctx: LoweringContext, node: Node) -> ir.Value:
    dtype = node.output.dtype
    chosen, other = operand(ctx, node, "self", dtype), operand(ctx, node, "other", dtype)
    return _choose(ctx, operand(ctx, node, "condition", torch.bool), chosen, other)


@register_lowering("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def lower_masked_fill(ctx: LoweringContext, node: Node) -> ir.Value:
    dtype = node.output.dtype
    fill, value = operand(ctx, node, "value", dtype), operand(ctx, node, "self", dtype)
    return _choose(ctx, operand(ctx, node, "mask", torch.bool), fill, value)


def _choose(
    ctx: LoweringContext, condition: ir.Value, chosen: ir.Value, other: ir.Value
) -> ir.Value:
    """Where. Between bools it is logic: onnxruntime has no such kernel on CPU."""
    if chosen.dtype != ir.DataType.BOOL:
        return ctx.op("Where", condition, chosen, other)
    inverse = ctx.op("Not", condition)
    return ctx.op("Or", ctx.op("And", condition, chosen), ctx.op("And", inverse, other))


_UNARY = {
    "abs": "Abs", "neg": "Neg", "floor": "Floor", "ceil": "Ceil", "round": "Round", "exp": "Exp",
    "log": "Log", "sqrt": "Sqrt", "sin": "Sin", "cos": "Cos", "tan": "Tan", "tanh": "Tanh",
    "relu": "Relu", "erf": "Erf", "reciprocal": "Reciprocal",
}  # fmt: skip


_SINGLE = ("aten.erf", "aten.tan")  # without a kernel of float64 on the CPU


@register_lowering(*(f"aten.{name}" for name in _UNARY))
def lower_unary(ctx: LoweringContext, node: Node) -> ir.Value | None:
    is_double = node.output.dtype == torch.float64 and ctx.target.provider == "cpu"
    if is_double and node.op in _SINGLE:
        return None
    value = operand(ctx, node, "self", node.output.dtype)
    whole = not node.output.dtype.is_floating_point
    if whole and node.op in ROUNDING:
        return value
    if whole and node.op == "aten.neg" and not node.output.dtype.is_signed:
        return ctx.op("Sub", ctx.constant(0, node.output.dtype), value)
    if whole and node.op == "aten.relu":
        return ctx.op("Max", value, ctx.constant(0, node.output.dtype))
    return ctx.op(_UNARY[node.op.removeprefix("aten.")], value)


@register_lowering("aten.sigmoid")
def lower_sigmoid(ctx: LoweringContext, node: Node) -> ir.Value:
    """`Sigmoid`, or 1 / (1 + e^−x) where its small numbers matter.

    `Sigmoid` is exact to a rounding of 1, not of the result: in float32 it is half too large at −17
    and 0 from −18 on. That is as good in a gate, but not in a logarithm or a quotient: rows of
    weights that are all small would be 0 / 0. In bfloat16 on CUDA it isn't good in a gate either.
    """
    dtype = node.output.dtype
    value = operand(ctx, node, "self", dtype)
    if not _is_gate(node.output):
        exact = torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype
        total = _one_and_power(ctx, ctx.cast(value, exact), exact)
        return ctx.cast(ctx.op("Reciprocal", total), dtype)
    if _is_coarse(ctx, dtype):
        return ctx.op("Div", ctx.constant(1, dtype), _one_and_power(ctx, value, dtype))
    return ctx.op("Sigmoid", value)


def _is_coarse(ctx: LoweringContext, dtype: torch.dtype) -> bool:
    """Whether `Sigmoid` is computed in eight bits, as 1 − 1 / (1 + eˣ) below 0: a tenth too small
    at −3.
    """
    return ctx.target.provider == "cuda" and dtype == torch.bfloat16


def _one_and_power(ctx: LoweringContext, value: ir.Value, dtype: torch.dtype) -> ir.Value:
    """1 + e^−x."""
    return ctx.op("Add", ctx.op("Exp", ctx.op("Neg", value)), ctx.constant(1, dtype))


def _is_gate(value: Value) -> bool:
    """Whether it is multiplied by other tensors, and no product divides or gives a logarithm."""
    stack, seen = [(value, False)], set[tuple[Value, bool]]()
    while stack:
        found, is_product = stack.pop()
        if (found, is_product) in seen:
            continue
        seen.add((found, is_product))
        for user in found.users:
            is_gated = is_product or user.op == "aten.mul.Tensor"
            goes_on = user.op in MULTIPLICATION | LAYOUT | CAST | SUM | CHOICE
            if user.op in _RELATIVE or len(seen) > _FAR or not (is_gated or goes_on):
                return False
            if goes_on:
                stack.extend((result, is_gated) for result in user.outputs)
    return any(is_product for _, is_product in seen)


@register_lowering("aten.sign", "aten.sgn")
def lower_sign(ctx: LoweringContext, node: Node) -> ir.Value:
    """By comparisons: of NaN it is 0, and of a bool the bool, which `Sign` has otherwise."""
    dtype = node.output.dtype
    value = operand(ctx, node, "self", dtype)
    if dtype == torch.bool:
        return value
    wide = ctx.cast(value, _WIDER.get(dtype, dtype))
    zero = ctx.constant(0, _WIDER.get(dtype, dtype))
    above, below = (ctx.cast(ctx.op(op, wide, zero), dtype) for op in ("Greater", "Less"))
    return ctx.op("Sub", above, below)


@register_lowering("aten.isnan", "aten.isinf")
def lower_is(ctx: LoweringContext, node: Node) -> ir.Value:
    value = ctx.args(node)["self"]
    if not input_of(node, "self").dtype.is_floating_point:
        value = ctx.cast(value, torch.float32)
    return ctx.op("IsNaN" if node.op == "aten.isnan" else "IsInf", value)


@register_lowering("aten.nan_to_num")
def lower_nan_to_num(ctx: LoweringContext, node: Node) -> ir.Value:
    args, dtype = ctx.args(node), node.output.dtype
    value: ir.Value = args["self"]
    if not dtype.is_floating_point:
        return value
    limits = torch.finfo(dtype)
    high = limits.max if args["posinf"] is None else args["posinf"]
    low = limits.min if args["neginf"] is None else args["neginf"]
    nan = 0.0 if args["nan"] is None else args["nan"]
    for found, replacement in (
        (ctx.op("IsNaN", value), nan),
        (ctx.op("IsInf", value, detect_negative=0), high),
        (ctx.op("IsInf", value, detect_positive=0), low),
    ):
        value = ctx.op("Where", found, ctx.number(replacement, dtype), value)
    return value


@register_lowering("aten.rsqrt")
def lower_rsqrt(ctx: LoweringContext, node: Node) -> ir.Value:
    return ctx.op("Reciprocal", ctx.op("Sqrt", operand(ctx, node, "self", node.output.dtype)))


@register_lowering("aten.square")
def lower_square(ctx: LoweringContext, node: Node) -> ir.Value:
    value = operand(ctx, node, "self", node.output.dtype)
    return ctx.op("Mul", value, value)


@register_lowering("aten.gelu")
def lower_gelu(ctx: LoweringContext, node: Node) -> ir.Value | None:
    args = ctx.args(node)
    tanh = "tanh" if args["approximate"] == "tanh" else None
    if node.output.dtype == torch.float64:
        return None  # onnxruntime has no kernel, and its parts have constants of float32
    return ctx.op("Gelu", args["self"], approximate=tanh)


@register_lowering("aten.silu")
def lower_silu(ctx: LoweringContext, node: Node) -> ir.Value:
    value, dtype = ctx.args(node)["self"], node.output.dtype
    if _is_coarse(ctx, dtype):
        return ctx.op("Div", value, _one_and_power(ctx, value, dtype))
    return ctx.op("Mul", value, ctx.op("Sigmoid", value))


@register_lowering(
    "aten._to_copy", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other",
    "aten.type_as", "aten.contiguous", "aten.clone", "aten.alias", "aten.detach", "aten.detach_",
    "aten.lift_fresh_copy", "aten.lift_fresh", "aten.view.dtype", "aten.positive", "aten.conj",
    "aten.resolve_conj", "aten.resolve_neg", "aten.conj_physical",
)  # fmt: skip
def lower_cast(ctx: LoweringContext, node: Node) -> ir.Value:
    """A conversion, or the value itself where memory layout is all that changes."""
    source = node.inputs[0]
    if source is None or source.dtype.is_complex or node.output.dtype.is_complex:
        raise LoweringError("complex tensors have no ONNX form")
    if node.op == "aten.view.dtype" and source.dtype != node.output.dtype:
        raise LoweringError("a bit cast has no ONNX form")
    return ctx.cast(ctx.value(source), node.output.dtype)


@register_lowering(
    "aten.dropout", "aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout"
)
def lower_dropout(ctx: LoweringContext, node: Node) -> ir.Value:
    args = ctx.args(node)
    if args["train"] and args["p"] > 0:
        raise LoweringError(
            "it drops values at inference too; give it training=self.training, as True is the "
            "default of torch.nn.functional's (of a program that was exported before, call eval() "
            "on its model first)"
        )
    value: ir.Value = args["input"]
    return value


@register_lowering("aten.item", "aten._local_scalar_dense")
def lower_item(ctx: LoweringContext, node: Node) -> ir.Value:
    kind = node.outputs[0].type
    scalar = ctx.op("Reshape", ctx.args(node)["self"], ctx.constant([], torch.int64))
    if isinstance(kind, ScalarType) and kind.kind == "int":
        return ctx.cast(scalar, torch.int64)
    return scalar


@register_lowering("aten._prelu_kernel")
def lower_prelu(ctx: LoweringContext, node: Node) -> ir.Value:
    """In a vmap the weight may be larger than what it scales, as ONNX's operator has it not."""
    source = input_of(node, "self")
    x, weight = ctx.value(source), ctx.value(input_of(node, "weight"))
    if source.shape == node.output.shape:
        return ctx.op("PRelu", x, weight)
    is_positive = ctx.op("Greater", x, ctx.constant(0, node.output.dtype))
    return ctx.op("Where", is_positive, x, ctx.op("Mul", x, weight))
