"""Tensors made from sizes and numbers alone, and random ones, which are refused."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from attngraph.errors import LoweringError
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.export.lowering.emission.values import onnx_dtype
from attngraph.ir import Node
from attngraph.ir.ops import input_of, op_def

MAX_CONSTANT = 4096  # elements; a larger one is computed rather than stored


@register_lowering("aten.arange", "aten.arange.start", "aten.arange.start_step")
def lower_arange(ctx: LoweringContext, node: Node) -> ir.Value:
    args, dtype = ctx.args(node), node.output.dtype
    start, end = args.get("start", 0), args["end"]
    step = args.get("step", 1)
    size = node.output.shape[0]
    if all(isinstance(v, (int, float)) for v in (start, end, step)) and size <= MAX_CONSTANT:
        return ctx.constant(torch.arange(start, end, step, dtype=dtype), name="arange")
    whole = not any(isinstance(v, float) for v in (start, end, step))
    computed = torch.int64 if whole else torch.float64 if dtype == torch.float64 else torch.float32
    key = ("arange", start, end, step, dtype)
    if key not in ctx.cache:
        bounds = [ctx.number(value, computed) for value in (start, end, step)]
        ctx.cache[key] = ctx.cast(ctx.op("Range", *bounds), dtype)
    value: ir.Value = ctx.cache[key]
    return value


_FILL = {"zeros": 0, "ones": 1, "empty": 0}


@register_lowering(
    "aten.full", "aten.zeros", "aten.ones", "aten.empty.memory_format", "aten.new_full",
    "aten.new_zeros", "aten.new_ones", "aten.new_empty", "aten.full_like", "aten.zeros_like",
    "aten.ones_like", "aten.empty_like",
)  # fmt: skip
def lower_full(ctx: LoweringContext, node: Node) -> ir.Value:
    """A constant; where sizes are symbolic, one element broadcast to them."""
    name = node.op.split(".")[1].removeprefix("new_").removesuffix("_like")
    value: Any = node.attrs["fill_value"] if name == "full" else _FILL[name]
    type = node.output.tensor_type
    sizes = [dim for dim in type.shape if isinstance(dim, int)]
    static = len(sizes) == len(type.shape) and math.prod(sizes) <= MAX_CONSTANT
    if static and isinstance(value, (bool, int, float)):
        filled = torch.full(sizes, value, dtype=type.dtype)
        return ctx.constant(filled, name=name)
    return ctx.expand(ctx.number(value, type.dtype), (), type.shape)


@register_lowering("aten.fill.Scalar", "aten.fill.Tensor")
def lower_fill(ctx: LoweringContext, node: Node) -> ir.Value:
    type = node.output.tensor_type
    tensor = op_def(node.op).arg("value").kind == "tensor"
    value = input_of(node, "value") if tensor else None
    number = ctx.number(node.attrs["value"], type.dtype) if value is None else ctx.value(value)
    return ctx.expand(ctx.cast(number, type.dtype), (), type.shape)


@register_lowering("aten.scalar_tensor")
def lower_scalar_tensor(ctx: LoweringContext, node: Node) -> ir.Value:
    return ctx.number(node.attrs["s"], node.output.dtype)


@register_lowering("aten.tril", "aten.triu")
def lower_triangle(ctx: LoweringContext, node: Node) -> ir.Value:
    """Bools and other integers go through int64: not every provider has their Trilu."""
    args, dtype = ctx.args(node), node.output.dtype
    x = args["self"] if dtype.is_floating_point else ctx.cast(args["self"], torch.int64)
    diagonal = ctx.dim(args["diagonal"])
    return ctx.cast(ctx.op("Trilu", x, diagonal, upper=int(node.op == "aten.triu")), dtype)


@register_lowering("aten.eye", "aten.eye.m")
def lower_eye(ctx: LoweringContext, node: Node) -> ir.Value:
    """Bools go through int64: the CPU has no bool EyeLike."""
    type = node.output.tensor_type
    dtype = torch.int64 if type.dtype == torch.bool else type.dtype
    zeros = ctx.expand(ctx.number(0, dtype), (), type.shape)
    return ctx.cast(ctx.op("EyeLike", zeros, dtype=onnx_dtype(dtype)), type.dtype)


@register_lowering(
    "aten.bernoulli", "aten.bernoulli.p", "aten.bernoulli.Tensor", "aten.binomial", "aten.cauchy",
    "aten.exponential", "aten.geometric", "aten.log_normal", "aten.multinomial",
    "aten.normal_functional", "aten.poisson", "aten.random", "aten.random.from", "aten.random.to",
    "aten.uniform",
    "aten.normal.float_float", "aten.normal.float_Tensor", "aten.normal.Tensor_float",
    "aten.normal.Tensor_Tensor",
    "aten.rand", "aten.rand_like", "aten.randint", "aten.randint.low", "aten.randint_like",
    "aten.randint_like.low_dtype", "aten.randn", "aten.randn_like", "aten.randperm",
)  # fmt: skip
def refuse_random(ctx: LoweringContext, node: Node) -> ir.Value:
    """A result that differs from run to run can't be checked against the model's."""
    raise LoweringError(
        "it draws random numbers, so no two runs agree and no result can be checked; make them an "
        "input of the model"
    )
