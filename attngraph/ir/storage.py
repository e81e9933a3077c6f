"""When two tensors are the same numbers in the same memory."""

from __future__ import annotations

from collections.abc import Hashable

import torch


def place_of(data: torch.Tensor) -> Hashable:
    """Equal for tensors that are the same view of the same memory, and for no others.

    An address says that only where there is memory: tensors on the meta device, empty ones and
    those that wrap others all have the address 0, so each of them is itself.
    """
    if not address_of(data):
        return id(data)
    signs = data.is_neg(), data.is_conj()  # views that are read with another sign
    return address_of(data), data.dtype, tuple(data.shape), data.stride(), signs


def memory_of(data: torch.Tensor) -> int:
    """Equal for tensors that are views of one memory, fake ones and those without data included."""
    memory: int = data.untyped_storage()._cdata
    return memory


def identity_of(data: torch.Tensor) -> int:
    """Equal where the first elements lie at one place; what has no memory is itself."""
    return address_of(data) or id(data)


def address_of(data: torch.Tensor) -> int:
    """Where the first element lies; 0 where none does."""
    if data.is_meta or data.numel() == 0 or wraps(data):
        return 0
    try:
        return data.data_ptr()
    except RuntimeError:  # a tensor that only stands for one
        return 0


def wraps(data: torch.Tensor) -> bool:
    """Whether a tensor has operators of its own in the place of elements, as torchao's have."""
    own = getattr(type(data), "__torch_dispatch__", None)
    return own is not None and own is not torch._C._disabled_torch_dispatch_impl


def as_pairs(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of reals, (..., 2), as files have it; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def from_pairs(tensor: torch.Tensor) -> torch.Tensor:
    """The complex tensor whose real and imaginary parts lie along the last axis, of 2."""
    return torch.view_as_complex(tensor.contiguous())
