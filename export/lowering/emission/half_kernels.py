"""Which operators the providers have no kernel of in half precision: they are computed in float32.

Without a kernel, onnxruntime doesn't open the file at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

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
