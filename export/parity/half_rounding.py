"""Runs a float32 module eagerly with the rounding of a half dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# fmt: off
_ROUNDED = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "convolution", "embedding", "add", "sub", "mul", "div",
    "native_layer_norm", "_fused_rms_norm", "_softmax", "gelu", "silu", "relu", "tanh", "sigmoid",
    "_scaled_dot_product_flash_attention_for_cpu",
})
# fmt: on


def narrow(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float32 tensor in a half dtype; a copy of any other."""
    single = tensor.dtype == torch.float32
    return tensor.detach().to(dtype) if single else tensor.detach().clone()


def rounded(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    nudge: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """A float32 tensor rounded to a half dtype; what overflows that stays as it is.

    `nudge` is given what is rounded already: one rounding of float32 would be lost in that.
    """
    if tensor.dtype != torch.float32:
        return nudge(tensor) if nudge else tensor
    half = tensor.detach().to(dtype)
    short = (nudge(half) if nudge else half).to(tensor.dtype)
    return torch.where(torch.isfinite(short), short, tensor.detach())


def is_as_finite(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Whether the shapes are equal, and what is finite on the right is finite on the left."""
    if [tensor.shape for tensor in left] != [tensor.shape for tensor in right]:
        return False
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if b.is_floating_point()]
    return all(bool((torch.isfinite(a) | ~torch.isfinite(b)).all()) for a, b in pairs)


def _dispatch(
    mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    results = func(*args, **(kwargs or {}))
    if func._opname not in _ROUNDED or func._schema.is_mutable:
        return results
    return pytree.tree_map_only(torch.Tensor, functools.partial(rounded, dtype=mode.dtype), results)


# Built by type(): TorchDispatchMode has no annotations, and strict mypy takes no such base class.
_Rounding = type("_Rounding", (TorchDispatchMode,), {"__torch_dispatch__": _dispatch})


def rounding(dtype: torch.dtype) -> Any:
    """A context in which float32 operators have their results rounded to a half dtype."""
    mode = _Rounding()
    mode.dtype = dtype
    return mode
