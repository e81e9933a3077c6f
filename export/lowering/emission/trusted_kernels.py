"""Operators whose kernels are wrong for integers, or lack half precision, as others that are right.

onnxruntime's CPU kernels compare 64-bit integers by their lower halves: for x in [2³¹, 2³²),
`Max(x, 0)` is 0, `Min(x, 8)` is x, the sign of x is −1, and `ReduceMax` takes a smaller one. What
every lowering emits goes through here, be it our own, a formula's parts or torchlib's, whatever the
target: onnxruntime computes sizes on the CPU in a CUDA session too. Less, Where and TopK are right.
Narrower integers and floats keep the operator, which is one kernel and not two; of 16 bits there
is none.

Where a provider has no kernel in half precision (`lacking_half`), onnxruntime doesn't open the file
at all: such an operator is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import onnx_ir as ir
import torch

from attngraph.errors import LoweringError
from attngraph.export.lowering.emission.emitter import Emitter

Operands = Sequence[ir.Value | None]


def rewritten(
    ctx: Emitter, op_type: str, domain: str, operands: Operands, attrs: Mapping[str, Any]
) -> ir.Value | None:
    """The operator by others, or None where its kernel is right for these operands."""
    first = next((value for value in operands if value is not None), None)
    if domain or first is None:
        return None
    if first.dtype == ir.DataType.INT16 and op_type in _EXTREMA:
        wide = [None if each is None else ctx.cast(each, torch.int32) for each in operands]
        return ctx.cast(ctx.op(op_type, *wide), torch.int16)
    if first.dtype != ir.DataType.INT64:
        return None
    if op_type in ("ReduceMax", "ReduceMin"):
        return _along(ctx, operands, op_type == "ReduceMax", bool(attrs.get("keepdims", 1)))
    rule = _RULES.get(op_type)
    return None if rule is None else rule(ctx, operands)


_EXTREMA = ("Max", "Min")


def _along(ctx: Emitter, operands: Operands, largest: bool, keep: bool) -> ir.Value:
    """The first of each axis in order."""
    x, axes = (*operands, None)[:2]
    assert x is not None
    if axes is None and keep:
        raise LoweringError("an extremum of integers over all axes, which are kept, has no form")
    if axes is None:
        x, axes = ctx.op("Reshape", x, ctx.constant([-1])), ctx.constant([0])
    if axes.const_value is None:
        raise LoweringError("an extremum of integers over computed axes has no form")
    one = ctx.constant([1])
    for axis in axes.const_value.numpy().reshape(-1).tolist():
        x = ctx.ops("TopK", x, one, outputs=2, axis=axis, largest=int(largest))[0]
    return x if keep else ctx.op("Squeeze", x, axes)


def _extremum(ctx: Emitter, a: ir.Value, b: ir.Value, largest: bool) -> ir.Value:
    less = ctx.op("Less", a, b)
    return ctx.op("Where", less, b, a) if largest else ctx.op("Where", less, a, b)


def _of_all(ctx: Emitter, operands: Operands, largest: bool) -> ir.Value:
    present = [value for value in operands if value is not None]
    return reduce(lambda a, b: _extremum(ctx, a, b, largest), present)


def _clip(ctx: Emitter, operands: Operands) -> ir.Value:
    """The upper bound is applied last, so it wins where it is below the lower one."""
    x, low, high = (*operands, None, None)[:3]
    assert x is not None
    raised = x if low is None else _extremum(ctx, x, low, True)
    return raised if high is None else _extremum(ctx, raised, high, False)


def _sign(ctx: Emitter, operands: Operands) -> ir.Value:
    (x,) = operands
    zero = ctx.constant(0, torch.int64)
    above, below = (ctx.op(op_type, x, zero) for op_type in ("Greater", "Less"))
    return ctx.op("Sub", ctx.cast(above, torch.int64), ctx.cast(below, torch.int64))


_RULES: dict[str, Callable[[Emitter, Operands], ir.Value]] = {
    "Max": lambda ctx, operands: _of_all(ctx, operands, True),
    "Min": lambda ctx, operands: _of_all(ctx, operands, False),
    "Relu": lambda ctx, operands: _of_all(ctx, [*operands, ctx.constant(0, torch.int64)], True),
    "Clip": _clip,
    "Sign": _sign,
}


_NOT_ON_CUDA = frozenset(
    (
        *("Acos", "Acosh", "ArgMax", "ArgMin", "Asin", "Asinh"),
        *("Atan", "Atanh", "BatchNormalization", "Ceil", "Clip", "Col2Im"),
        *("Compress", "ConvTranspose", "Cosh", "CumSum", "DepthToSpace", "Einsum"),
        *("Elu", "Equal", "EyeLike", "Floor", "Greater", "GreaterOrEqual"),
        *("GridSample", "InstanceNormalization", "LeakyRelu", "Less", "LessOrEqual", "Log"),
        *("LogSoftmax", "MaxPool", "NonZero", "Pad", "Reciprocal", "ReduceL2"),
        *("ReduceMax", "ReduceMin", "ReduceProd", "Resize", "Round", "Selu"),
        *("Sinh", "Tan"),
    )
)
"""Operators without a bfloat16 kernel on CUDA, nor on the CPU: onnxruntime 1.31, see
tests/placement/test_sessions.py."""


def lacking_half(
    provider: str, op_type: str, inputs: Sequence[ir.Value | None], attrs: Mapping[str, Any]
) -> ir.DataType | None:
    """The half precision of these inputs, where the provider has no kernel of the op for it.

    The CPU provider has next to none for bfloat16, and for float16 none that adds or multiplies
    where it writes (the scatter operators' `reduction`). CUDA's lacks bfloat16 for some.
    """
    dtypes = {value.dtype for value in inputs if value is not None}
    if ir.DataType.BFLOAT16 in dtypes and (provider == "cpu" or op_type in _NOT_ON_CUDA):
        return ir.DataType.BFLOAT16
    computes = provider == "cpu" and attrs.get("reduction") in ("add", "mul")
    return ir.DataType.FLOAT16 if computes and ir.DataType.FLOAT16 in dtypes else None
