"""Traces code that lists the parts of a tensor, however many there are, and joins them again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Every:
    """Stands for a number of rows of each image, where what has them is not taken apart."""

    def item(self) -> _Every:
        return self


class Together(TorchFunctionMode):
    """A list of any number of images' features is one of all their rows: while it is traced, and
    where `grids` say how many rows each has, which other sizes of a check don't fit. There, what
    takes the images that a mask shows finds their places once. Of `tiles`, too, all images' are
    one list, however many the model would split off.

    A trace can't take a tensor apart along a dim whose size it doesn't know. Where the parts are
    joined again, as a model does with the features of its images, nothing is lost; where they are
    not, the graph isn't the model, and parity fails.
    """

    def __init__(self, *, grids: bool, tiles: bool = False) -> None:
        super().__init__()
        self.grids, self.tiles = grids, tiles
        self.places: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_split = func in (torch.split, Tensor.split) and isinstance(args[1], list)
        if is_split and (self.tiles or isinstance(args[1][0], _Every)):
            return (args[0],)
        if func is torch.as_tensor and _are_sizes(args[0]):
            rows = [torch.stack([torch.full((), side) for side in each]) for each in args[0]]
            return torch.stack(rows)  # of sizes that a trace doesn't know, torch keeps the sample's
        if func is Tensor.tolist and self.grids:
            return [_Every()]
        if func is Tensor.__getitem__ and self.grids and _is_mask(args[1]):
            return args[0][self._places(args[1])]
        is_any = func in (Tensor.unbind, Tensor.__len__) and (
            isinstance(args[0].shape[0], torch.SymInt) or (self.grids and _are_counts(args[0]))
        )
        if is_any and func is Tensor.__len__:
            return 1
        if is_any and not any((*args[1:], *(kwargs or {}).values())):
            return (_Every(),) if args[0].dim() == 1 else (args[0].flatten(0, 1),)
        return func(*args, **(kwargs or {}))

    def _places(self, mask: Tensor) -> Tensor:
        for known, places in self.places:
            if known is mask:
                return places
        self.places.append((mask, mask.nonzero()[:, 0]))
        return self.places[-1][1]


def _are_counts(numbers: Tensor) -> bool:
    return numbers.dim() == 1 and numbers.dtype is torch.int64


def _are_sizes(numbers: Any) -> bool:
    rows = numbers if isinstance(numbers, list) else []
    return bool(rows) and all(isinstance(each, tuple) for each in rows)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype is torch.bool and index.dim() == 1
