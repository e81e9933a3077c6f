"""Types of values: tensors with symbolic shapes, and runtime scalars."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attngraph.errors import IRError
from attngraph.ir.dims import Dim, format_dim, product, symbols_of

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "f8e4m3fn": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """`f32` for torch.float32. Raises IRError for a dtype the IR doesn't know."""
    try:
        return DTYPE_NAMES[dtype]
    except KeyError:
        raise IRError(f"The IR has no name for {dtype}.") from None


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor of `dtype` whose dims are ints or expressions over the graph's named dims."""

    dtype: torch.dtype
    shape: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> Dim:
        return product(self.shape)

    @property
    def is_static(self) -> bool:
        return all(isinstance(dim, int) for dim in self.shape)

    @property
    def symbols(self) -> frozenset[str]:
        """The names of the dims that the shape depends on."""
        return symbols_of(self.shape)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{', '.join(map(format_dim, self.shape))}]"


@dataclass(frozen=True, slots=True)
class ScalarType:
    """A number known only at run time, such as the result of `Tensor.item()`.

    `name` is the dim symbol that stands for it in expressions, where it is an integer.
    """

    kind: str
    name: str | None = None

    @property
    def symbols(self) -> frozenset[str]:
        """The dim that stands for it, if it is an integer."""
        return frozenset([self.name] if self.name else [])

    def __str__(self) -> str:
        return f"{self.kind}({self.name or ''})"


Type = TensorType | ScalarType
