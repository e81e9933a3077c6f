"""Axes that are cut for memory alone: `cat([layer(part) for part in x.chunk(100, 1)], 1)`.

Into how many parts an open axis is cut depends on its size, and a trace has one number of them.
Where the model computes the same at several sizes if such a call gives the axis as one part, a
trace may have it so, if what is done between the cut and the join keeps the rows of the axis apart.
That one row of a part shows in another (a maximum, a threshold of a mean) the usual inputs may
hide, so rows are given numbers that hide nothing, and the others have to stay as they are.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attngraph.frontend.watching.asked import Place
from attngraph.frontend.watching.locations import is_plumbing, quote

CUTS = (torch.chunk, torch.Tensor.chunk, torch.split, torch.Tensor.split)


_JOINS = (torch.cat, torch.concat, torch.concatenate)
_NUMBERS = (1e4, -1e4, 0.0, float("nan"))
_LEAST = 3
"""The least number of rows of an axis of which some can be changed."""


@dataclass(frozen=True)
class _Change:
    """Rows of the tensor of one cut, counted from 0, that are given a number."""

    cut: int
    rows: slice
    number: float


@dataclass(frozen=True)
class _Event:
    """A cut or a join, with its axis and what it makes."""

    joins: bool
    axis: int
    made: Tensor

    @property
    def rows(self) -> int:
        return self.made.shape[self.axis]

    def by_row(self) -> Tensor:
        return self.made.movedim(self.axis, 0)


class Whole(TorchFunctionMode):
    """Within it, calls at these places give a tensor as one part. `cut` counts those that cut, and
    `events` are they and the joins of one part, in order.
    """

    def __init__(self, places: Collection[Place], change: _Change | None = None) -> None:
        super().__init__()
        self._places, self._change = places, change
        self.cut = 0
        self.events: list[_Event] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in CUTS and args and len(found) > 1 and place() in self._places:
            axis = _axis(args, kwargs, 2)
            made = self._changed(args[0], axis)
            self.events.append(_Event(False, axis, made))
            self.cut += 1
            return (made,)
        if func in _JOINS and args and len(args[0]) == 1:
            self.events.append(_Event(True, _axis(args, kwargs, 1), found.detach().clone()))
        return found

    def _changed(self, x: Tensor, axis: int) -> Tensor:
        if self._change is None or self._change.cut != self.cut:
            return x
        x = x.clone()
        rows = x.movedim(axis, 0)[self._change.rows]
        if x.is_floating_point():
            rows.fill_(self._change.number)
        else:  # bools, and integers that index something: those of another row
            rows.copy_(x.movedim(axis, 0).flip(0)[self._change.rows].clone())
        return x


def _axis(args: Sequence[Any], kwargs: Mapping[str, Any] | None, at: int) -> int:
    axis = args[at] if len(args) > at else (kwargs or {}).get("dim", 0)
    first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    rank: int = first.dim()
    return int(axis) % rank


def keeps_rows_apart(run: Callable[[], object], places: Collection[Place]) -> bool:
    """Whether changed rows of what each of these places cuts show in the same rows alone of what
    is joined next, wherever `run` gets to them.
    """

    def events(change: _Change | None = None) -> list[_Event]:
        mode = Whole(places, change)
        with mode:
            run()
        return mode.events

    usual = events()
    groups = _groups(usual)
    if not groups:
        return False
    for cut, joins in groups:
        size = usual[cut].rows
        if size < _LEAST or any(event.rows != size for event in (usual[join] for join in joins)):
            return False
        number = sum(not event.joins for event in usual[:cut])
        halves = slice(0, size // 2), slice(size // 2, None)
        for rows in (slice(0, 1), slice(size // 2, size // 2 + 1), slice(size - 1, None), *halves):
            others = torch.ones(size, dtype=torch.bool)
            others[rows] = False
            for given in _NUMBERS:
                changed = events(_Change(number, rows, given))
                if [event.joins for event in changed] != [event.joins for event in usual]:
                    return False
                for join in joins:
                    kept, now = (each[join].by_row()[others] for each in (usual, changed))
                    if not torch.allclose(now, kept, rtol=1e-5, atol=1e-6, equal_nan=True):
                        return False
    return True


def _groups(events: Sequence[_Event]) -> list[tuple[int, list[int]]]:
    """Each cut with the joins that follow the cuts that it stands among; empty if there are none
    after some.
    """
    found: list[tuple[int, list[int]]] = []
    kinds = [event.joins for event in events]
    at = 0
    while at < len(kinds):
        cuts = list(itertools.takewhile(lambda place: not kinds[place], range(at, len(kinds))))
        at += len(cuts)
        joins = list(itertools.takewhile(lambda place: kinds[place], range(at, len(kinds))))
        at += len(joins)
        if not joins:
            return []
        found += [(cut, joins) for cut in cuts]  # joins of one part before any cut are the model's
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
