"""ONNX values of the graph being built, and torch's dtypes and shapes in ONNX's words."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18

from attngraph.ir import TensorType
from attngraph.ir.dims import format_dim

op: Any = opset18  # its stubs know only onnxscript's own tensors

FLOATS = frozenset(
    {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
)


def onnx_dtype(dtype: torch.dtype) -> ir.DataType:
    """ONNX's name for a torch dtype."""
    return ir.tensor_adapters.from_torch_dtype(dtype)


def onnx_shape(type: TensorType) -> ir.Shape:
    """The shape with the user's dim names; compound sizes are written as their formula."""
    return ir.Shape([dim if isinstance(dim, int) else format_dim(dim) for dim in type.shape])


class TracedValue(ir.Value):
    """A value that torchlib's functions can compute on with Python operators.

    The operators emit nodes through onnxscript's current evaluator.
    """

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    def __bool__(self) -> bool:
        raise TypeError("it branches on a value that only a run can tell")

    def __mod__(self, other: Any) -> Any:
        return op.Mod(self, other, fmod=1) if self.dtype in FLOATS else op.Mod(self, other)

    def __add__(self, other: Any) -> Any:
        return op.Add(self, other)

    def __radd__(self, other: Any) -> Any:
        return op.Add(other, self)

    def __sub__(self, other: Any) -> Any:
        return op.Sub(self, other)

    def __rsub__(self, other: Any) -> Any:
        return op.Sub(other, self)

    def __mul__(self, other: Any) -> Any:
        return op.Mul(self, other)

    def __rmul__(self, other: Any) -> Any:
        return op.Mul(other, self)

    def __truediv__(self, other: Any) -> Any:
        return op.Div(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return op.Div(other, self)

    def __matmul__(self, other: Any) -> Any:
        return op.MatMul(self, other)

    def __pow__(self, other: Any) -> Any:
        return op.Pow(self, other)

    def __neg__(self) -> Any:
        return op.Neg(self)

    def __and__(self, other: Any) -> Any:
        return op.And(self, other)

    def __or__(self, other: Any) -> Any:
        return op.Or(self, other)

    def __lt__(self, other: Any) -> Any:
        return op.Less(self, other)

    def __le__(self, other: Any) -> Any:
        return op.LessOrEqual(self, other)

    def __gt__(self, other: Any) -> Any:
        return op.Greater(self, other)

    def __ge__(self, other: Any) -> Any:
        return op.GreaterOrEqual(self, other)
