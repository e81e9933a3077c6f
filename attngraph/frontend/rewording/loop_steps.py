"""What a rewritten loop of Python calls while it is traced: its steps in a scan, or all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from attngraph.frontend.rewording.loop_choices import (
    UNDEFINED,
    Choices,
    Known,
    as_tensor,
    defined,
)
from attngraph.frontend.rewording.loop_lists import (
    Blank,
    Lists,
    Rows,
    Steps,
    Unread,
    is_builtin,
)
from attngraph.frontend.rewording.loop_ranges import Block, Range, expr_of, is_equal
from attngraph.frontend.rewording.loop_scan import joined, scanned
from attngraph.ir.dims import divide

Slices: TypeAlias = tuple[torch.Tensor, int, Block | None]
"""A tensor, an axis, and the block of it that each step takes, None where that is one place."""


class _Index:
    def __getitem__(self, index: Any) -> Any:
        return index


class Helpers(Lists, Choices):
    """What a rewritten function calls."""

    index = _Index()

    @staticmethod
    def is_open(bounds: Sequence[Any] | None, places: Sequence[tuple[Any, int]] = ()) -> bool:
        """Whether a loop over these goes up to a size, in steps of a number that divide it.

        Where the last block may be shorter, the code is run as it stands: that may be one block.
        Of the lists in `places` it is the last element that a step reads at its own place and an
        offset, if they are as long as that now.
        """
        if bounds is None or not all(_are_last(*each, bounds) for each in places):
            return False
        if len(bounds) == 3 and bounds[2] not in (1, -1):
            start, stop, step = bounds
            if not isinstance(step, int) or step < 1 or divide(expr_of(stop - start), step) is None:
                return False
        ends = bounds[:2]
        return any(isinstance(end, torch.SymInt) and end.node.expr.free_symbols for end in ends)

    @staticmethod
    def backwards(bounds: Sequence[Any]) -> Sequence[Any] | None:
        """The range that goes through the same numbers from the last to the first."""
        steps = Range.of(bounds) if len(bounds) < 3 or bounds[2] in (1, -1) else None
        if steps is None:
            return None
        return steps.stop - steps.step, steps.start - steps.step, -steps.step

    @staticmethod
    def counting(plain: Callable[..., Any], counted: Callable[..., Any], *bounds: Any) -> Any:
        """`list(range(n))`"""
        is_own = plain in (list, tuple) and is_builtin(counted, range)
        if is_own and Helpers.is_open(bounds):
            return Steps([Rows(Range.of(bounds).numbers())])
        return plain(counted(*bounds))

    @staticmethod
    def Steps(
        before: Any,
        made: Any,
        in_front: bool,
        every: tuple[Any, Any] | None = None,
        bounds: Sequence[Any] = (),
    ) -> Any:
        """A list to which all steps have added, or those of which the number leaves a rest when it
        is divided: `every` has the divisor and the rest.
        """
        if made == ():
            return before
        if every is not None:
            made = Range.of(bounds).every(made, *every)
        rows = Rows(made)
        return Steps([rows.turned(), *Steps.of(before)] if in_front else [*Steps.of(before), rows])

    @staticmethod
    def own(value: Any) -> Any:
        """What a step changes, apart from what was there before it."""
        if isinstance(value, torch.Tensor):
            return value.clone()
        if type(value) in (list, dict):
            return value.copy()
        if value is None or isinstance(value, (int, float)):
            return value
        raise Unread("a part of another kind of thing is changed")

    @staticmethod
    def change(value: Any, after: Any) -> None:
        """Has a tensor, list or dict hold what another holds."""
        if isinstance(value, torch.Tensor):
            value.copy_(after)
        elif isinstance(value, dict):
            value.update(after)
        else:
            value[:] = after

    @staticmethod
    def rows(*values: Any) -> Any:
        """How many rows values have, where they are tensors of one open length; None of others."""
        are_rows = [
            isinstance(each, Steps) or (isinstance(each, torch.Tensor) and each.dim() > 0)
            for each in values
        ]
        if not all(are_rows):
            return None
        first, *others = (Helpers.length(len, each) for each in values)
        if not Helpers.is_open((first,)):
            return None
        same = all(isinstance(each, torch.SymInt) for each in others)
        return first if same and all(each.node.expr == first.node.expr for each in others) else None

    @staticmethod
    def parts(name: str, of: Any, *args: Any, **named: Any) -> Any:
        """What `of.unbind(…)`, `split` or `chunk` gives: a list of an open length, if each part is
        one place of an open axis.
        """
        whole = getattr(of, name)
        if not isinstance(of, torch.Tensor):
            return whole(*args, **named)
        counts = 0 if name == "unbind" else 1
        axis = named.get("dim", args[counts] if len(args) > counts else 0)
        if not isinstance(axis, int) or not of.dim() or not Helpers.is_open((of.shape[axis],)):
            return whole(*args, **named)
        size = args[0] if counts and args else None
        rows = of.movedim(axis, 0)
        if name == "unbind":
            return Steps([Rows(rows)])
        is_single = size == 1 if name == "split" else is_equal(size, of.shape[axis])
        if not is_single:
            return whole(*args, **named)
        return Steps([Rows(rows.unsqueeze(axis if axis < 0 else axis + 1))])

    @staticmethod
    def run(
        bounds: Sequence[Any],
        body: Callable[..., Any],
        initial: Sequence[Callable[[], Any]],
        sequences: Sequence[Slices],
        wanted: Sequence[bool] = (),
        held: Sequence[Callable[[], Any]] = (),
        by_first: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """What the last step carries out, and the steps' results, stacked.

        Of what isn't there before the first step, only what is `wanted` is carried out. A size
        among what is `held`, which no step changes, is told to the steps by a tensor. Where the
        steps ask `by_first` which one they are, or begin with None, the first one is traced apart.
        """
        steps = Range.of(bounds)
        given, kept = [defined(value) for value in initial], [defined(value) for value in held]
        alone = by_first or any(leaf is None for leaf in pytree.tree_leaves(given))
        are_places = not any(block for _, _, block in sequences)
        is_known = are_places and not any(value is UNDEFINED for value in given)
        all_steps = steps.from_none() if is_known and not alone else steps
        slices = [all_steps.taken(*each) for each in sequences if not _is_blank(each)]

        lists: list[Any] = [of for of, _, _ in sequences]
        blank = {at: lists[at].blank for at, each in enumerate(sequences) if _is_blank(each)}
        count = len(sequences)

        def call(
            known: Known, number: Any, given: Sequence[Any], own: Sequence[Any], kept: Sequence[Any]
        ) -> Any:
            left = iter(own)
            parts = [blank[at] if at in blank else next(left) for at in range(count)]
            return body(known, number, *given, *parts, *kept)

        if not alone:
            known = (steps.least(0), False)
            return scanned(all_steps, steps, partial(call, known), given, slices, wanted, kept)
        parts = pytree.tree_map(lambda each: each[0], slices)
        known = (steps.least(0), steps.least(0) is not None)
        given, made = call(known, as_tensor(steps.start), given, parts, kept)
        known = (steps.least(1), False)
        after, others = scanned(
            steps, steps.later(), partial(call, known), given, slices, wanted, kept
        )
        return after, [joined(*each) for each in zip(made, others, strict=True)]

    @staticmethod
    def put(
        bounds: Sequence[Any],
        written: Sequence[Slices],
        rows: Sequence[torch.Tensor],
    ) -> None:
        """Writes the rows of all steps, stacked, where the loop would have written each."""
        steps = Range.of(bounds)
        for each, stacked in zip(written, rows, strict=True):
            if isinstance(each[0], Blank):
                each[0].fill(*steps.ends, steps.forward(stacked))
                continue
            steps.places(*each).copy_(steps.forward(stacked))

    @staticmethod
    def row(row: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
        """A row with a value written at an index, whose slices may end at numbers in tensors.

        An element of a list is the value.
        """
        if not isinstance(row, torch.Tensor):
            if index != ():
                raise Unread("a part of an element of a list")
            return value
        items = index if isinstance(index, tuple) else (index,)
        open_at = [at for at, item in enumerate(items) if _is_open_slice(item)]
        if not open_at:
            row = row.clone()
            row[index] = value
            return row
        (at,) = open_at
        if any(not isinstance(item, slice) for item in items) or items[at].step is not None:
            raise Unread("an index beside a slice that each step places elsewhere")
        if isinstance(value, torch.Tensor) and value.dim():
            raise Unread("more than a number in a slice that each step places elsewhere")
        place = torch.arange(row.shape[at])
        inside = torch.ones_like(place, dtype=torch.bool)
        if items[at].start is not None:
            inside = inside & (place >= _from_end(items[at].start, row.shape[at]))
        if items[at].stop is not None:
            inside = inside & (place < _from_end(items[at].stop, row.shape[at]))
        inside = inside.reshape([-1 if axis == at else 1 for axis in range(row.dim())])
        others = [slice(None) if axis == at else item for axis, item in enumerate(items)]
        for axis, item in enumerate(others):
            if item != slice(None):
                raise Unread(f"a part of axis {axis}")
        return torch.where(inside, torch.as_tensor(value, dtype=row.dtype), row)

    @staticmethod
    def part(of: Any, index: Any, is_within: bool = False) -> Any:
        """`of[index]`, where numbers in the index may be tensors: these are no part of a trace."""
        items = list(index) if isinstance(index, tuple) else [index]
        if not isinstance(of, torch.Tensor) or not any(map(_is_number, items)):
            return of[index]
        if any(isinstance(item, torch.Tensor) and not _is_number(item) for item in items):
            return of[index]
        dots = [at for at, item in enumerate(items) if item is ...]
        if dots:
            new = sum(item is None for item in items)
            missing = of.dim() - (len(items) - 1 - new)
            items[dots[0] : dots[0] + 1] = [slice(None)] * missing
        axis = 0
        for at, item in enumerate(items):
            if _is_number(item):
                place = torch.where(item < 0, item + of.shape[axis], item).reshape(1)
                if is_within:
                    place = place.clamp(0, of.shape[axis] - 1)
                of, items[at] = of.movedim(axis, 0)[place].movedim(0, axis), 0
            axis += item is not None
        return of[tuple(items)]

    @staticmethod
    def part_within(of: Any, index: Any) -> Any:
        """The same where it may count for nothing, and then be at a place that isn't there."""
        return Helpers.part(of, index, is_within=True)

    @staticmethod
    def min(*numbers: Any) -> Any:
        return _extreme(min, torch.minimum, numbers)

    @staticmethod
    def max(*numbers: Any) -> Any:
        return _extreme(max, torch.maximum, numbers)

    @staticmethod
    def power(base: Any, exponent: Any) -> Any:
        """Of a number to a count of steps, rounded once: `0.9 ** t` is a double in Python."""
        is_count = isinstance(exponent, torch.Tensor) and not exponent.is_floating_point()
        if not is_count or type(base) is not float:
            return base**exponent
        exact = torch.full((), base, dtype=torch.float64) ** exponent
        return exact.to(torch.get_default_dtype())


def _is_blank(taken: Slices) -> bool:
    """Whether it is an element of a list that waits for its elements."""
    of, axis, block = taken
    return isinstance(of, Blank) and not of.is_full and axis == 0 and block is None


def _are_last(value: Any, offset: int, bounds: Sequence[Any]) -> bool:
    """Whether a list of numbered elements ends where the first step of a range reads it."""
    first = 0 if len(bounds) == 1 else bounds[0]
    are_numbered = isinstance(value, list) and not isinstance(value, Steps)
    is_one_by_one = len(bounds) < 3 or bounds[2] == 1
    return (
        are_numbered and is_one_by_one and type(first) is int and (len(value) == first + offset + 1)
    )


def _is_number(item: Any) -> bool:
    """Whether it is a whole number in a tensor."""
    is_tensor = isinstance(item, torch.Tensor) and item.dim() == 0
    return is_tensor and not item.is_floating_point() and item.dtype != torch.bool


def _is_open_slice(item: Any) -> bool:
    return isinstance(item, slice) and any(
        isinstance(end, torch.Tensor) for end in (item.start, item.stop)
    )


def _from_end(place: Any, size: Any) -> Any:
    """Where Python's slice begins or ends: a negative number counts from the end."""
    place = torch.as_tensor(place)
    return torch.where(place < 0, place + size, place)


def _extreme(plain: Any, of_two: Any, numbers: Sequence[Any]) -> Any:
    if not any(isinstance(number, torch.Tensor) for number in numbers):
        return plain(*numbers)
    found, *others = (
        as_tensor(each) if isinstance(each, torch.SymInt) else torch.as_tensor(each)
        for each in numbers
    )
    for number in others:
        found = of_two(found, number)
    return found
