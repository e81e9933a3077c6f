"""How places of a tensor are counted: by several axes, major to minor, of which some are cut.

What is known of single elements, a place along each axis and a place in the tensor, is fitted by
one such layout, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attngraph.analysis.layout.followed import Index
from attngraph.ir import Dim, Value
from attngraph.ir.dims import product, same


class UnreadError(Exception):
    """The layout is another one."""


@dataclass(frozen=True, slots=True)
class Digit:
    """An axis among those that the places of a dim are counted in, major to minor.

    The axis has the places from `start` on, of `size`; where that is None it has all. Without an
    axis the one place `start` is meant.
    """

    axis: int | None
    start: int = 0
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """A value, and how each of its dims is indexed."""

    value: Value
    dims: tuple[tuple[Digit, ...], ...]

    @property
    def axes(self) -> frozenset[int]:
        """The axes that its elements differ along."""
        return frozenset(d.axis for dim in self.dims for d in dim if d.axis is not None)


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis, the place along it of each of N elements, and its size, as a dim and a number."""

    axis: int
    at: torch.Tensor
    size: Dim
    count: int


def placed(value: Value, index: Index, shape: Sequence[int], axes: Sequence[Axis]) -> Placed:
    """How the dims of a value, of a `shape` in numbers, are indexed. Raises UnreadError."""
    sizes: dict[int | None, Dim] = {axis.axis: axis.size for axis in axes}
    dims = []
    for at, size, count in zip(index, value.shape, shape, strict=True):
        found = digits(axes, at, count)
        if not same(product(sizes[d.axis] if d.size is None else d.size for d in found), size):
            raise UnreadError
        dims.append(found)
    return Placed(value, tuple(dims))


def is_placed(found: Placed, index: Index, axes: Sequence[Axis]) -> bool:
    """Whether elements of a value that is indexed so are at `index`."""
    known = {axis.axis: axis for axis in axes}
    for at, dim in zip(index, found.dims, strict=True):
        expected = torch.zeros_like(at)
        for digit in dim:
            axis = None if digit.axis is None else known[digit.axis]
            size = axis.count if axis is not None and digit.size is None else digit.size
            expected = expected * (size or 1) + digit.start
            expected = expected if axis is None else expected + axis.at
        if not torch.equal(at, expected):
            return False
    return True


def digits(axes: Sequence[Axis], index: torch.Tensor, size: int) -> tuple[Digit, ...]:
    """The axes by which places of a dim of `size` are counted. Raises UnreadError."""
    start, strides = affine(index, torch.stack([axis.at for axis in axes], dim=1))
    moving = sorted(
        ((stride, axis) for stride, axis in zip(strides, axes, strict=True) if stride),
        key=lambda each: -each[0],
    )
    found = []
    for stride, axis in moving:
        if stride < 1 or size % stride:
            raise UnreadError
        places, (first, start) = size // stride, divmod(start, stride)
        if not 0 <= first <= places - axis.count:
            raise UnreadError
        found.append(Digit(axis.axis, first, None if places == axis.count else places))
        size = stride
    if size > 1:
        found.append(Digit(None, start, size))
    return tuple(found)


def affine(index: torch.Tensor, axes: torch.Tensor) -> tuple[int, list[int]]:
    """(start, strides) of a place as a function of others, (N,) of (N, A), all of them exactly.

    Raises UnreadError where it is another function.
    """
    ones = torch.ones(len(axes), 1, dtype=torch.float64)
    known, wanted = torch.cat([ones, axes.double()], dim=1), index.double()
    solved = torch.linalg.lstsq(known.T @ known, known.T @ wanted[:, None], driver="gelsd").solution
    start, *strides = (int(number) for number in solved.squeeze(1).round())
    if not torch.equal(start + (axes * torch.tensor(strides)).sum(dim=1), index):
        raise UnreadError
    return start, strides
