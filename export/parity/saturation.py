"""How accurate a kernel's bounded functions are: to eps of their range, not of each value.

onnxruntime's sigmoid is a quotient of polynomials that is added to a half (MLAS), so where it is
1e-7 the kernel is as far off as where it is 1, by about one eps; torch's has all digits there. LSTM
and GRU hold such gates, and x · σ(x) is off by eps · |x|. An output of which most is saturated has
the scale of that noise, and none of eager's runs shows it.

So the float64 run is repeated with the result of each such function off by up to eps of its bound:
what that makes of an output is rounding that the kernels are entitled to. It is rounding if it is
proportional: the same run with 1/16 of it is off by 1/16, in each row within a half. A row that is
not took another branch, and shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SMALLER = 16.0
"""How many times less the second of two runs is off."""
_BOUNDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.ones_like,
    "silu": torch.abs,
    "glu": lambda x: x.abs(),
    "elu": torch.ones_like,
}


def is_proportional(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Whether errors `part` are a 16th of `whole`, in each row (last axis, which is kept as 1)."""
    both = whole, whole - SMALLER * part
    size, off = (
        each.square().sum(-1, keepdim=True).sqrt() if each.dim() else each.abs() for each in both
    )
    return off <= size / 2


def _dispatch(
    mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    name = func._opname.removesuffix("_")
    if name not in _BOUNDS:
        return func(*args, **(kwargs or {}))
    x = args[0]
    if name == "glu":
        x = x.chunk(2, *(args[1:] or (-1,)))[0]
    bound = _BOUNDS[name](x).double()
    drawn = 2 * torch.rand(bound.shape, generator=mode.random, dtype=torch.float64) - 1
    result = func(*args, **(kwargs or {}))
    moved = mode.eps * bound * drawn.to(bound.device)
    return result.add_(moved) if func._schema.is_mutable else result + moved


# Built by type(): TorchDispatchMode has no annotations, and strict mypy takes no such base class.
_Nudging = type("_Nudging", (TorchDispatchMode,), {"__torch_dispatch__": _dispatch})


def nudging(eps: float, seed: int) -> Any:
    """A context in which bounded functions are off by up to `eps` of their bounds."""
    mode = _Nudging()
    mode.eps, mode.random = eps, torch.Generator().manual_seed(seed)
    return mode
