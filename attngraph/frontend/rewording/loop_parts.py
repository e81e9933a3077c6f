"""The parts into which `split` and `chunk` cut an open axis: a list of as many as its size says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch

from attngraph.frontend.rewording.loop_lists import Rows, Steps
from attngraph.frontend.rewording.loop_ranges import Block, Slices, blocks_in, expr_of
from attngraph.ir.dims import divide


class Parts(Steps):
    """What `of.split(size, axis)` gives: blocks of one size, of which the last may be shorter.

    A loop takes one in each step. Whatever else is asked of it, it is what the `cut` gives, which
    has as many parts as the sample.
    """

    def __init__(
        self, of: torch.Tensor, axis: int, size: int, cut: Callable[[], tuple[torch.Tensor, ...]]
    ) -> None:
        self.cut_of, self.axis, self.size, self._cut = of, axis, size, cut
        list.__init__(self)

    @property
    def count(self) -> Any:
        return blocks_in(self.cut_of.shape[self.axis], self.size)

    @cached_property
    def _parts(self) -> tuple[torch.Tensor, ...]:
        return self._cut()

    @property
    def pieces(self) -> list[Any]:  # type: ignore[override]
        if divide(expr_of(self.cut_of.shape[self.axis]), self.size) is None:
            return [*self._parts]
        at = self.axis % self.cut_of.dim()
        return [Rows(torch.unflatten(self.cut_of, at, (self.count, self.size)).movedim(at, 0))]

    def _block(self) -> Block:
        return lambda step: (step * self.size, (step + 1) * self.size, None)

    @staticmethod
    def slices(taken: Slices) -> Slices:
        """As blocks of the tensor, where a step takes an element of such a list."""
        of, axis, block = taken
        if isinstance(of, Parts) and axis == 0 and block is None:
            return of.cut_of, of.axis, of._block()
        return taken

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: Any) -> Any:
        is_turned = isinstance(index, slice) and index == slice(None, None, -1)
        return super().__getitem__(index) if is_turned else self._parts[index]

    append: Any = Steps._unread
    insert: Any = Steps._unread
    extend: Any = Steps._unread
    clear: Any = Steps._unread
    reverse: Any = Steps._unread
