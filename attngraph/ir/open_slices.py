"""Slices that keep the size of an axis open, in a trace and where types are inferred.

`x[:, :4]` of an axis of n has min(4, n) elements. torch looks at the sample's n, says 4, and has n
begin at 4 from then on; of `x[:, -2:]` it says 2 for any n, as it takes each size for 2 or more.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch._subclasses import fake_impls
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

Met = Callable[[torch.SymInt, int], None]
"""Gets the size of an axis, and the least one that has the places that a slice names."""

_SLICE = torch.ops.aten.slice.Tensor
_NAMES = ("dim", "start", "end", "step")
_END = torch.iinfo(torch.int64).max
_SMALLER, _LARGER = (getattr(torch, name) for name in ("sym_min", "sym_max"))


@contextmanager
def open_slices(
    met: Met | None = None, *, opens: bool = True, larger: Container[sympy.Symbol] = ()
) -> Iterator[None]:
    """Within it, a slice from or to a place that an axis may not have is as long as it is in eager.

    `met` is told of each such slice; unless it `opens` them, that is all. Sizes that torch takes
    for 2 or more may be 1, but for those that are known to be `larger`.
    """
    table: dict[Any, Callable[..., Any]] = fake_impls.op_implementations_dict
    own, sizes = table[_SLICE], _Sizes(larger)

    def computed(mode: Any, func: Any, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(_NAMES, args, strict=False)) | kwargs
        start, end = given.get("start"), given.get("end")
        size: Any = source.shape[given.get("dim", 0)] if source.dim() else 0
        if _is_size(size) and _is_open(size) and not _is_size(start) and not _is_size(end):
            start, end = start or 0, _END if end is None else min(end, _END)
            needed = _needed(start, end)
            if needed > 1 and not sizes.has(size, needed):
                if met is not None:
                    met(size, needed)
                if opens:
                    axis = given.get("dim", 0) % source.dim()
                    return sizes.cut(source, axis, start, end, given.get("step", 1))
        return own(mode, func, source, *args, **kwargs)

    with patch.dict(table, {_SLICE: computed}):
        yield


def may_lack(size: Any, least: int, lows: Mapping[sympy.Symbol, int]) -> bool:
    """Whether a size is open and may be less, whatever a trace has asked of it, if its symbols are
    1 or more, or what `lows` say.
    """
    if not _is_size(size) or not _is_open(size):
        return False
    expr = size.node.expr
    ranges = {each: ValueRanges(lows.get(each, 1), int_oo) for each in expr.free_symbols}
    return bool(bound_sympy(expr, ranges).lower < least)


def _needed(start: int, end: int) -> int:
    """The size of an axis that has these places, and where their order turns."""
    if end >= _END:
        return abs(start)
    return abs(start - end) if start * end < 0 else max(abs(start), abs(end))


def _is_size(number: object) -> bool:
    return isinstance(number, torch.SymInt)


def _is_open(size: Any) -> bool:
    return size.node.has_hint() and bool(size.node.expr.free_symbols)


@dataclass(frozen=True)
class _Sizes:
    larger: Container[sympy.Symbol]

    def cut(self, source: torch.Tensor, axis: int, start: int, end: int, step: int) -> torch.Tensor:
        """A view of the source from one place to another, both as Python has them."""
        sizes, strides = [*source.shape], [*source.stride()]
        size = sizes[axis]
        offset = source.storage_offset() + self._first(size, start) * strides[axis]
        sizes[axis] = (self._length(size, start, end) + step - 1) // step
        strides[axis] *= step
        return source.as_strided(sizes, strides, offset)

    def _first(self, size: Any, start: int) -> Any:
        if start < 0:
            return size + start if self.has(size, -start) else _LARGER(size + start, 0)
        return start if self.has(size, start) else _SMALLER(start, size)

    def _length(self, size: Any, start: int, end: int) -> Any:
        """The number of places: the end is the least of some places, the start the largest."""
        ends = [size + end] if end < 0 else [size] if end >= _END else [end, size]
        starts = [size + start, 0] if start < 0 else [start]
        gaps = [last - first for last in ends for first in starts]
        numbers = [gap for gap in gaps if not _is_size(gap)]
        least = [min(numbers)] if numbers else []
        length, *others = [gap for gap in gaps if _is_size(gap)] + least
        for gap in others:
            length = _SMALLER(length, gap)
        return length if all(self.has(gap, 0) for gap in gaps) else _LARGER(length, 0)

    def has(self, size: Any, least: int) -> bool:
        """Whether a size is never less."""
        if not _is_size(size):
            return bool(size >= least)
        expr = size.node.expr
        known: Mapping[sympy.Symbol, ValueRanges[Any]] = size.node.shape_env.var_to_range
        ranges = {each: known[each] for each in expr.free_symbols if each in known}
        ranges = {
            each: ValueRanges(1, range_.upper)
            if range_.lower == 2 and each not in self.larger
            else range_
            for each, range_ in ranges.items()
        }
        return bool(bound_sympy(expr, ranges).lower >= least)
