"""The declared inputs and outputs of a model, and checks of tensors against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnxruntime
import torch

from attngraph.errors import LoadError, UsageError

_DTYPES: dict[str, torch.dtype] = {
    "tensor(float)": torch.float32,
    "tensor(double)": torch.float64,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(bool)": torch.bool,
    "tensor(int8)": torch.int8,
    "tensor(int16)": torch.int16,
    "tensor(int32)": torch.int32,
    "tensor(int64)": torch.int64,
    "tensor(uint8)": torch.uint8,
    "tensor(uint16)": torch.uint16,
    "tensor(uint32)": torch.uint32,
    "tensor(uint64)": torch.uint64,
}


@dataclass(frozen=True)
class Argument:
    """An input or output. A dim is a size, a name, or None where nothing is said; so is a shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str | None, ...] | None

    @classmethod
    def of(cls, declared: onnxruntime.NodeArg) -> Argument:
        """Raises LoadError for a dtype that torch lacks."""
        dtype = _DTYPES.get(declared.type)
        if dtype is None:
            raise LoadError(
                f"{declared.name!r} of the model is a {declared.type}, which torch lacks."
            )
        return cls(declared.name, dtype, None if declared.shape is None else tuple(declared.shape))


def in_order(
    feeds: Sequence[torch.Tensor] | Mapping[str, torch.Tensor], names: Sequence[str]
) -> list[torch.Tensor]:
    """Tensors by position or by name, in the order of the names.

    Raises UsageError for too few, too many or unknown ones.
    """
    if isinstance(feeds, Mapping):
        if set(feeds) != set(names):
            raise UsageError(
                f"The model takes the inputs {', '.join(names)}; got {', '.join(feeds) or 'none'}."
            )
        return [feeds[name] for name in names]
    if len(feeds) != len(names):
        raise UsageError(
            f"The model takes {len(names)} inputs ({', '.join(names)}); got {len(feeds)}."
        )
    return list(feeds)


def check_inputs(wanted: Sequence[Argument], tensors: Sequence[torch.Tensor]) -> None:
    """Raises UsageError for a dtype or shape that isn't declared, or for two sizes of one dim."""
    sizes: dict[str, tuple[int, str]] = {}
    for argument, tensor in zip(wanted, tensors, strict=True):
        name = argument.name
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"Input {name!r} must be a torch.Tensor, not {type(tensor).__name__}.")
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"Input {name!r} is sparse; the model takes dense tensors: .to_dense()."
            )
        if tensor.dtype is not argument.dtype:
            raise UsageError(
                f"Input {name!r} is {_short(tensor.dtype)}; "
                f"the model takes {_short(argument.dtype)}."
            )
        if argument.shape is not None:
            _check_shape(name, argument.shape, tuple(tensor.shape), sizes)


def _check_shape(
    name: str,
    wanted: tuple[int | str | None, ...],
    found: tuple[int, ...],
    sizes: dict[str, tuple[int, str]],
) -> None:
    """Compare with the declared shape; `sizes` carries each named dim's size between inputs."""
    declared = f"({', '.join('?' if dim is None else str(dim) for dim in wanted)})"
    if len(found) != len(wanted):
        raise UsageError(f"Input {name!r} has shape {found}; the model takes {declared}.")
    for dim, size in zip(wanted, found, strict=True):
        if isinstance(dim, int) and size != dim:
            raise UsageError(f"Input {name!r} has shape {found}; the model takes {declared}.")
        if isinstance(dim, str):
            first, owner = sizes.setdefault(dim, (size, name))
            if first != size:
                raise UsageError(
                    f"Input {name!r} has {dim} = {size} where input {owner!r} has {first}."
                )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
