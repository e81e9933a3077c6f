"""Axes that are cut for memory alone: `cat([layer(part) for part in x.chunk(100, 1)], 1)`.

Into how many parts an open axis is cut depends on its size, and a trace has one number of them.
Where the model computes the same at several sizes if such a call gives the axis as one part, a
trace may have it so. The check of the file compares with the model as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from attngraph.frontend.branches import Place
from attngraph.frontend.locations import is_plumbing, quote

CUTS = (torch.chunk, torch.Tensor.chunk, torch.split, torch.Tensor.split)


class Whole(TorchFunctionMode):
    """Within it, calls at these places give a tensor as one part. `cut` counts those that cut."""

    def __init__(self, places: Collection[Place]) -> None:
        super().__init__()
        self._places, self.cut = places, 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in CUTS and len(found) > 1 and place() in self._places:
            self.cut += 1
            return (args[0],)
        return found


def place() -> Place | None:
    """The file and line of the model that calls torch there."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_plumbing(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def whole_note(at: Place) -> str:
    return (
        "An axis is cut into parts, and the outputs were the same without that at every size that "
        f"was tried: the graph has it whole at {quote(*at)}."
    )
