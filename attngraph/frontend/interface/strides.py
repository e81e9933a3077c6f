"""Whether a model computes something else by how its inputs lie in memory: no file is told that.

`x.is_contiguous()` is true or false of the sample, and a trace takes that side. Mostly both sides
are the same, as of `if not x.is_contiguous(): x = x.contiguous()`, which runs of the model tell.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from attngraph.frontend.watching.locations import quote, user_frame

Lay = Callable[[torch.Tensor], torch.Tensor]
"""A copy of a tensor, in some order of its elements in memory."""

_ASKS = (torch.Tensor.is_contiguous, torch.Tensor.stride)


class Asked(TorchFunctionMode):
    """Notes the line on which the code first asks how a tensor lies in memory."""

    place: tuple[str, int] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ASKS and self.place is None:
            self.place = user_frame(reversed([*traceback.walk_stack(sys._getframe(1))]))
        return func(*args, **(kwargs or {}))


def strides_note(place: tuple[str, int], is_same: Callable[[Lay], bool]) -> str:
    """A sentence if a run differs whose inputs lie in another order, else "".

    `is_same` runs the model on inputs that are laid so; a run that fails says nothing.
    """
    for lay in (_in_order, _columns_first, _channels_first, _apart):
        try:
            if is_same(lay):
                continue
        except Exception:  # such as a view that doesn't fit
            continue
        return (
            "What the model computes depends on how its inputs lie in memory, as it asks at "
            f"{quote(*place)}. The file isn't told that: it computes what the model does where "
            "they lie as the sample's do."
        )
    return ""


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _columns_first(tensor: torch.Tensor) -> torch.Tensor:
    """As what was made by a transposition of the last two axes."""
    return _in_order(tensor.mT).mT if tensor.dim() > 1 else _apart(tensor)


def _channels_first(tensor: torch.Tensor) -> torch.Tensor:
    """As what was made by a permutation that put the second axis last, or took it from there."""
    if tensor.dim() < 3:
        return _apart(tensor)
    return _in_order(tensor.movedim(1, -1)).movedim(-1, 1)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """As a slice of something larger."""
    return torch.stack([tensor, tensor], -1)[..., 0]
