"""The numbers that a loop of Python goes through, and what its steps take of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from attngraph.frontend.rewording.loop_lists import Steps, Unread
from attngraph.ir.conditions import always
from attngraph.ir.dims import DimInfo, divide

Block: TypeAlias = Callable[[Any], tuple[Any, Any, Any]]
"""Of a step where its block begins and ends, and the limit of all blocks, None without one."""
Slices: TypeAlias = tuple[Any, int, Block | None]
"""A tensor, an axis, and the block of it that each step takes, None where that is one place."""


@dataclass(frozen=True)
class Range:
    """The numbers that a loop goes through, `start`, `start + step` … on this side of `stop`."""

    start: Any
    stop: Any
    step: int

    @staticmethod
    def of(bounds: Sequence[Any]) -> Range:
        start, stop = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
        return Range(start, stop, bounds[2] if len(bounds) == 3 else 1)

    @property
    def count(self) -> Any:
        """How many there are."""
        ahead = self.step > 0
        between = self.stop - self.start if ahead else self.start - self.stop
        return blocks_in(between, abs(self.step))

    def turned(self) -> Range:
        """The same numbers from the last to the first."""
        return Range(self.last, self.start - self.step, -self.step)

    def from_none(self) -> Range:
        """With the number before its first one, of a range that begins at 1 or 2 and may have one
        step or none: neither torch nor ONNX has such a loop.
        """
        count = self.stop - self.start
        is_short = isinstance(count, torch.SymInt) and not statically_known_true(count >= 2)
        is_from_one = self.step == 1 and type(self.start) is int and self.start in (1, 2)
        is_to_size = isinstance(self.stop, torch.SymInt) and self.stop.node.expr.is_Symbol
        return (
            Range(self.start - 1, self.stop, 1) if is_short and is_from_one and is_to_size else self
        )

    def least(self, after: int) -> Any:
        """The least number behind so many steps, if that is known."""
        is_known = self.step > 0 and type(self.start) is int
        return self.start + after * self.step if is_known else None

    def every(self, made: Any, divisor: Any, rest: Any) -> Any:
        """Of what all steps gave, that of those whose number leaves this rest when divided."""
        are_known = all(type(each) is int for each in (self.start, divisor, rest))
        if not are_known or self.step != 1 or not 0 <= rest < divisor:
            raise Unread("some of the steps")
        first = (rest - self.start) % divisor
        return pytree.tree_map(lambda each: each[first::divisor], made)

    def later(self) -> Range:
        """The range without its first number."""
        return Range(self.start + self.step, self.stop, self.step)

    def numbers(self) -> torch.Tensor:
        """All of them."""
        if self.step in (1, -1):
            return self.forward(torch.arange(*self.ends))
        turns = torch.arange(self.count)
        numbers: torch.Tensor = turns * self.step + self.start
        return numbers

    @property
    def ends(self) -> tuple[Any, Any]:
        """Of the numbers in their order, whichever way a loop goes through them."""
        return (self.start, self.stop) if self.step > 0 else (self.last, self.start + 1)

    def forward(self, stacked: torch.Tensor) -> torch.Tensor:
        """What is in the order of the steps in that of the numbers; and the other way round."""
        return stacked if self.step > 0 else stacked.flip(0)

    def taken(self, of: Any, axis: int, block: Block | None) -> Any:
        """The slices of all steps, (steps, …)."""
        if isinstance(of, Steps) and axis == 0 and block is None:
            return pytree.tree_map(lambda each: self.taken(each, 0, None), of.whole())
        return self.forward(self.places(of, axis, block))

    def places(self, of: Any, axis: int, block: Block | None) -> torch.Tensor:
        """The same in the order of the numbers, in the tensor's own memory."""
        if not isinstance(of, torch.Tensor):
            raise Unread("a slice of what is no tensor")
        if block is None:
            return part_of(of, axis, *self.ends, abs(self.step)).movedim(axis, 0)
        begin, size, following = self._first(of, axis, block)
        count, at = self.count, axis % of.dim()
        if is_equal(following, begin + size):
            blocks = part_of(of, axis, begin, begin + count * size, 1)
        else:
            blocks = of.index_select(at, _overlapping(begin, following, size, count, of.shape[at]))
        return torch.unflatten(blocks, at, (count, size)).movedim(at, 0)

    def _first(self, of: torch.Tensor, axis: int, block: Block) -> tuple[Any, int, Any]:
        """Where the first block begins, the size of each, and where the second one begins, in the
        order of the numbers.
        """
        first = self.start if self.step > 0 else self.last
        begin, end, limit = block(first)
        following, last, _ = block(first + abs(self.step))
        size = whole(end - begin)
        is_from_end = isinstance(begin, int) and begin < 0  # as Python counts
        if not isinstance(size, int) or size < 1 or not is_equal(last - following, size):
            raise Unread("blocks of several sizes")
        if is_from_end or (limit is not None and not is_equal(limit, of.shape[axis])):
            raise Unread("blocks that end before the tensor does")
        return begin, size, following

    def is_cut(self, of: Any, axis: int, block: Block | None) -> bool:
        """Whether these are blocks one behind the other of which the last may be shorter: as many
        as the axis has, rounded up. There is one at any size.
        """
        if block is None or not isinstance(of, torch.Tensor):
            return False
        begin, size, following = self._first(of, axis, block)
        left = of.shape[axis] - begin
        return (
            is_equal(following, begin + size)
            and divide(expr_of(left), size) is None
            and is_equal(self.count, blocks_in(left, size))
            and (_is_some(left) or statically_known_true(left >= 1))
        )

    def is_limited(self, of: Any, axis: int, block: Block | None) -> bool:
        """Whether the code says where these blocks end at the latest."""
        return block is not None and block(self.start)[2] is not None

    def left(self, taken: Sequence[tuple[Any, int, Block | None]]) -> list[tuple[Any, int]]:
        """How many rows the last blocks have that may be shorter, and how many the others."""
        found = []
        for of, axis, block in taken:
            if block is not None and self.is_cut(of, axis, block):
                _, size, _ = self._first(of, axis, block)
                found.append((of.shape[axis] - block(self.shorter)[0], size))
        return found

    @property
    def last(self) -> Any:
        return self.start + (self.count - 1) * self.step

    # A range of which the block of the largest number may be shorter: the others, and it.

    @property
    def shorter(self) -> Any:
        return self.last if self.step > 0 else self.start

    def others(self) -> Range:
        return Range(self.start, self.last, self.step) if self.step > 0 else self.later()

    def led(self) -> Range:
        """With one number in front, that of no step."""
        return Range(self.start - self.step, self.stop, self.step)

    def led_by_zeros(self, of: Any, axis: int, block: Block | None) -> Any:
        """The slices of all steps, (steps, …), behind zeros for one more."""

        def behind_zeros(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([rows.new_zeros(1, *rows.shape[1:]), rows])

        return pytree.tree_map(behind_zeros, self.taken(of, axis, block))

    def all_of(self, of: torch.Tensor, axis: int, block: Block | None) -> torch.Tensor:
        """What all slices are of, in the tensor's own memory."""
        if block is None:
            return part_of(of, axis, *self.ends, self.step)
        begin, size, _ = self._first(of, axis, block)
        is_cut = self.is_cut(of, axis, block)
        return part_of(of, axis, begin, of.shape[axis] if is_cut else begin + self.count * size, 1)

    def of_shorter(self, of: Any, axis: int, block: Block | None) -> Any:
        """The slice of the step with the largest number, in the tensor's own memory."""
        if isinstance(of, Steps) and axis == 0 and block is None:
            return pytree.tree_map(lambda each: self.of_shorter(each, 0, None), of.whole())
        if not isinstance(of, torch.Tensor):
            raise Unread("a slice of what is no tensor")
        if block is None:
            return of.select(axis, self.shorter)
        begin, end, _ = block(self.shorter)
        size = of.shape[axis] - begin if self.is_cut(of, axis, block) else end - begin
        return of.narrow(axis, begin, size)


class Places:
    """Stands for the places of an axis: 0, 1, … up to where blocks end."""

    def of(self, steps: Range, block: Block) -> torch.Tensor:
        limit = block(steps.start)[2]
        largest = steps.last if steps.step > 0 else steps.start
        stop = block(largest)[1] if limit is None else limit
        return torch.arange(stop)


def _is_some(size: Any) -> bool:
    """Whether a size is never 0, as no dim is."""
    expr = sympy.sympify(expr_of(size))
    dims = {str(each): DimInfo(low=1) for each in expr.free_symbols}
    return always(sympy.Ge(expr, 1), dims) is True


def blocks_in(length: Any, size: int) -> Any:
    """How many blocks an axis has, of which the last may be shorter."""
    if size == 1 or divide(expr_of(length), size) is not None:
        return length // size
    return (length + size - 1) // size


def _overlapping(begin: Any, following: Any, size: int, count: Any, length: Any) -> torch.Tensor:
    """The places of blocks of which the first two begin there, in an axis of that length."""
    step = whole(following - begin)
    is_whole = begin + (count - 1) * step + size <= length  # else Python cuts the last ones short
    if (
        not isinstance(step, int)
        or step < 1
        or not all(map(statically_known_true, (begin >= 0, is_whole)))
    ):
        raise Unread("blocks that aren't one behind the other, and may reach beyond the tensor")
    starts: torch.Tensor = torch.arange(count)[:, None] * step + begin
    return (starts + torch.arange(size)).flatten()


def part_of(tensor: torch.Tensor, axis: int, start: Any, stop: Any, step: int) -> torch.Tensor:
    is_whole = isinstance(start, int) and start == 0 and is_equal(stop, tensor.shape[axis])
    part = tensor if is_whole else tensor.narrow(axis, start, stop - start)
    return part if step == 1 else part.movedim(axis, 0)[::step].movedim(0, axis)


def whole(size: Any) -> Any:
    """A size that is one number, as that."""
    expr = expr_of(size)
    return int(expr) if isinstance(expr, (int, sympy.Integer)) else size


def expr_of(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def is_equal(size: Any, other: Any) -> bool:
    """Whether two sizes are the same, whatever the dims are."""
    return bool(expr_of(size) == expr_of(other))
