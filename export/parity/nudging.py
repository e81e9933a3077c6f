"""Float64 runs in which some operators are as far off as a kernel's may be.

What they make of an output is rounding if it is proportional: the same run with 1/16 of it is off
by 1/16, in each row within a half. A row that is not took another branch, and shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

REPEATED = 0.25
"""How much of a function's greatest error numbers near each other have in common, at most: of
onnxruntime's tanh 0.3 of 2.2 eps."""
SMALLER = 16.0
"""How many times less the second of two runs is off."""


@dataclass(frozen=True)
class Slack:
    """By how many eps the elements of an operator's first result may be off.

    `at_most` is of the result's shape. What differs only along the last `together` axes is off by
    the same share of it. An error that `repeats` may be the same share in all calls.
    """

    at_most: torch.Tensor
    together: int = 0
    repeats: bool = False


Slacks: TypeAlias = Mapping[str, Callable[[Any, Sequence[Any], Mapping[str, Any]], Slack | None]]
"""Slacks by the operator's name without overload, called before the operator runs. None where it
is exact."""


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
    slack = mode.slacks.get(func._opname.removesuffix("_"))
    allowed = None if slack is None else slack(func, args, kwargs or {})
    if allowed is None:
        return func(*args, **(kwargs or {}))
    most, apart = allowed.at_most.double(), allowed.at_most.dim() - allowed.together
    shape = (*most.shape[:apart], *[1] * allowed.together)
    drawn = 2 * torch.rand(shape, generator=mode.random, dtype=torch.float64) - 1
    if allowed.repeats and mode.repeats:
        drawn = mode.shares.setdefault(
            func._opname.removesuffix("_"), REPEATED * drawn.flatten()[:1]
        )
    moved = mode.eps * most * drawn.to(most.device)
    result = func(*args, **(kwargs or {}))
    if isinstance(result, tuple):
        return (result[0] + moved, *result[1:])
    return result.add_(moved) if func._schema.is_mutable else result + moved


# Built by type(): TorchDispatchMode has no annotations, and strict mypy takes no such base class.
_Nudging = type("_Nudging", (TorchDispatchMode,), {"__torch_dispatch__": _dispatch})


def nudging(slacks: Slacks, eps: float, seed: int) -> Any:
    """A context in which operators are off by up to `eps` times what `slacks` say of them.

    With an odd seed errors that may repeat do: of one operator they are the same share everywhere.
    """
    mode = _Nudging()
    mode.repeats, mode.shares = seed % 2 == 1, {}
    mode.slacks, mode.eps, mode.random = slacks, eps, torch.Generator().manual_seed(seed)
    return mode
