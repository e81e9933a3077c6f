"""ONNX values of the graph being built, and torch's dtypes and shapes in ONNX's words."""

from __future__ import annotations

from collections.abc import Callable
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


def _binary(name: str, *, reflected: bool = False) -> Callable[[Any, Any], Any]:
    def emit(one: Any, other: Any) -> Any:
        return getattr(op, name)(*((other, one) if reflected else (one, other)))

    return emit


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

    def __neg__(self) -> Any:
        return op.Neg(self)

    __add__, __radd__ = _binary("Add"), _binary("Add", reflected=True)
    __sub__, __rsub__ = _binary("Sub"), _binary("Sub", reflected=True)
    __mul__, __rmul__ = _binary("Mul"), _binary("Mul", reflected=True)
    __truediv__, __rtruediv__ = _binary("Div"), _binary("Div", reflected=True)
    __matmul__, __pow__ = _binary("MatMul"), _binary("Pow")
    __and__, __or__ = _binary("And"), _binary("Or")
    __lt__, __le__ = _binary("Less"), _binary("LessOrEqual")
    __gt__, __ge__ = _binary("Greater"), _binary("GreaterOrEqual")
