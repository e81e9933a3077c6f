"""What a rewritten loop of Python calls while it is traced: its steps in a scan, or all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import sympy
import torch
from torch.utils import _pytree as pytree

from attngraph.frontend.rewording.loop_choices import UNDEFINED, Choices, Known, as_tensor, defined
from attngraph.frontend.rewording.loop_in_place import Changes
from attngraph.frontend.rewording.loop_lists import Blank, Lists, Rows, Steps, Unread, is_builtin
from attngraph.frontend.rewording.loop_parts import Parts
from attngraph.frontend.rewording.loop_ranges import Places, Range, Slices, expr_of, is_equal
from attngraph.frontend.rewording.loop_scan import joined, scanned
from attngraph.frontend.rewording.loop_shorter import Ends, with_shorter_one
from attngraph.frontend.rewording.loop_up_to import Until, counting_up_to, up_to
from attngraph.ir.dims import divide


class _Index:
    def __getitem__(self, index: Any) -> Any:
        return index


class Helpers(Lists, Choices, Changes):
    """What a rewritten function calls."""

    index, PLACES = _Index(), Places()
    met: ClassVar[set[int]] = set()
    """The sizes of blocks of which the last may be shorter."""

    @staticmethod
    def is_open(bounds: Sequence[Any] | None, places: Sequence[tuple[Any, int, int]] = ()) -> bool:
        """Whether a loop over these goes up to a size.

        Of the lists in `places` it is the last element that a step reads at its own place and an
        offset, if they are as long as that now. Of a list of which it reads several elements, from
        the last one on, all are to be there: Python counts places below 0 from the end.
        """
        if bounds is None or not all(_are_last(*each, bounds) for each in places):
            return False
        step = bounds[2] if len(bounds) == 3 else 1
        if not isinstance(step, int) or step == 0:
            return False
        ends = bounds[:2]
        if any(isinstance(end, torch.SymInt) and end.node.expr.free_symbols for end in ends):
            return True
        return all(type(each) is int for each in bounds) and len(range(*bounds)) in Lists.steps

    @staticmethod
    def backwards(bounds: Sequence[Any]) -> Sequence[Any] | None:
        """The range that goes through the same numbers from the last to the first."""
        steps = Range.of(bounds)
        if not isinstance(steps.step, int) or steps.step == 0:
            return None
        turned = steps.turned()
        return turned.start, turned.stop, turned.step

    @staticmethod
    def ends(*bounds: Any) -> tuple[Any, Any, Any]:
        """Of `range(…)` the start, the stop and the step."""
        steps = Range.of(bounds)
        return steps.start, steps.stop, steps.step

    span, up_to = Range, staticmethod(up_to)

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
        shorter = []
        is_first = len(bounds) == 3 and bounds[2] < 0
        if isinstance(made, Ends):
            if every is not None:
                raise Unread("some of the steps, beside one whose block is shorter")
            made, shorter = made.rows, [made.shorter]
        if every is not None:
            made = Range.of(bounds).every(made, *every)
        rows = Rows(made).turned() if in_front else Rows(made)
        own = Steps.of(before)
        added = [*shorter, rows] if is_first is not in_front else [rows, *shorter]
        return Steps([*added, *own] if in_front else [*own, *added])

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
        """How many rows values have, where they are tensors, lists or ranges of one open length;
        None of others.
        """
        counts = [_rows_of(each) for each in values]
        if any(each is None for each in counts):
            return None
        first, *others = counts
        if not Helpers.is_open((first,)):
            return None
        return first if all(is_equal(each, first) for each in others) else None

    @staticmethod
    def parts(name: str, of: Any, *args: Any, **named: Any) -> Any:
        """What `of.unbind(…)`, `split` or `chunk` gives: a list of an open length, if the axis is
        open and each part is one place of it, or `Lists.parted` has blocks of it as well.
        """
        whole = getattr(of, name)
        if not isinstance(of, torch.Tensor):
            return whole(*args, **named)
        counts = 0 if name == "unbind" else 1
        axis = named.get("dim", args[counts] if len(args) > counts else 0)
        if not isinstance(axis, int) or not of.dim() or not Helpers.is_open((of.shape[axis],)):
            return whole(*args, **named)
        if name == "unbind":
            return Steps([Rows(of.movedim(axis, 0))])
        count = "chunks" if name == "chunk" else f"{name}_size"
        size = args[0] if args else named.get(count)
        if name == "chunk" and isinstance(size, (int, torch.SymInt)):
            size = divide(expr_of(of.shape[axis]), expr_of(size))
        if type(size) is not int and not isinstance(size, sympy.Integer):
            return whole(*args, **named)
        if size > 1 and not Lists.parted:
            return whole(*args, **named)
        return Parts(of, axis, int(size), partial(whole, *args, **named))

    @staticmethod
    def run(
        bounds: Sequence[Any],
        body: Callable[..., Any],
        initial: Sequence[Callable[[], Any]],
        sequences: Sequence[Slices],
        wanted: Sequence[bool] = (),
        held: Sequence[Callable[[], Any]] = (),
        by_first: bool = False,
        until: Until | None = None,
    ) -> tuple[list[Any], list[Any]] | None:
        """What the last step carries out, and the steps' results, stacked; None where it may be a
        shorter one, and the others are no scan: that may be one block, as the code stands.

        Of what isn't there before the first step, only what is `wanted` is carried out. A size
        among what is `held`, which no step changes, is told to the steps by a tensor. Where the
        steps ask `by_first` which one they are, or begin with None, the first one is traced apart.
        Steps from where `until` stops on count for nothing.
        """
        if Lists.steps:  # of fixed numbers of steps, one scan within another takes longer
            with patch.object(Lists, "steps", frozenset()):
                return Helpers.run(bounds, body, initial, sequences, wanted, held, by_first, until)
        steps = Range.of(bounds)
        sequences = [_read(steps, each) for each in sequences]
        given, kept = [defined(value) for value in initial], [defined(value) for value in held]
        if until is not None:
            kept = [*kept, until.stop]
            body = counting_up_to(body, len(initial), wanted, is_some=until.is_some)
        alone = by_first or any(leaf is None for leaf in pytree.tree_leaves(given))
        is_cut = any(steps.is_cut(*each) for each in sequences if not _is_blank(each))
        are_places = not any(block for _, _, block in sequences)
        is_known = are_places and not any(value is UNDEFINED for value in given)
        all_steps = steps.from_none() if is_known and not alone else steps
        taken = [each for each in sequences if not _is_blank(each)]
        slices = [] if is_cut else [all_steps.taken(*each) for each in taken]

        lists: list[Any] = [of for of, _, _ in sequences]
        blank = {at: lists[at].blank for at, each in enumerate(sequences) if _is_blank(each)}
        count = len(sequences)

        def call(
            known: Known, number: Any, given: Sequence[Any], own: Sequence[Any], kept: Sequence[Any]
        ) -> Any:
            left = iter(own)
            parts = [blank[at] if at in blank else next(left) for at in range(count)]
            return body(known, number, *given, *parts, *kept)

        if is_cut and until is not None:
            raise Unread("blocks up to one of the steps around them, of which the last is shorter")
        if is_cut:
            Helpers.met.update(size for _, size in steps.left(taken))
            with suppress(Exception):
                if not alone:
                    return with_shorter_one(steps, taken, call, given, wanted, kept)
            return None
        if not alone:
            known = Known(steps.least(0), False, steps=steps)
            return scanned(all_steps, steps, partial(call, known), given, slices, wanted, kept)
        parts = pytree.tree_map(lambda each: each[0], slices)
        known = Known(steps.least(0), steps.least(0) is not None)
        given, made = call(known, as_tensor(steps.start), given, parts, kept)
        known = Known(steps.least(1), False)
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
                if isinstance(stacked, Ends):
                    raise Unread("a list of open length, with a last element of another size")
                each[0].fill(*steps.ends, steps.forward(stacked))
                continue
            if isinstance(stacked, Ends):
                _, axis, block = each
                rows = Rows(steps.forward(stacked.rows))
                whole = Steps([rows, stacked.shorter]).joined(axis, new=block is None)
                steps.all_of(*each).copy_(whole)
                continue
            steps.places(*each).copy_(steps.forward(stacked))

    @staticmethod
    def of_block(
        known: Known, number: Any, of_all: Callable[[Any], Any], of_last: Callable[[Any], Any]
    ) -> Any:
        """A number of a step as its block has it: one that all steps have, such as the size of
        their blocks, or what it is of a shorter last one.
        """
        if known.last is not None:
            return of_last(known.last)
        one, other = of_all(0), of_all(1)
        return one if is_equal(one, other) else of_all(number)

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
    def quotient(number: Any, by: Any) -> Any:
        """Of whole numbers a double, as in Python: `1 - t / n` has all its digits near n."""
        numbers = [each for each in (number, by) if _is_number(each)]
        others = [each for each in (number, by) if not isinstance(each, torch.Tensor)]
        if numbers and len(numbers) + len(others) == 2:
            number, by = (each.double() if _is_number(each) else each for each in (number, by))
        return number / by

    @staticmethod
    def power(base: Any, exponent: Any) -> Any:
        """Of a number to a count of steps, a double as in Python: `1 - 0.999 ** t` is 0.001."""
        if not _is_number(exponent) or type(base) is not float:
            return base**exponent
        return torch.full((), base, dtype=torch.float64) ** exponent


def _rows_of(value: Any) -> Any:
    """How many rows a tensor, a list of ours or a range has; None of anything else."""
    if isinstance(value, Range):
        return value.count if isinstance(value.step, int) and value.step else None
    if isinstance(value, Steps) or (isinstance(value, torch.Tensor) and value.dim() > 0):
        return Helpers.length(len, value)
    return None


def _read(steps: Range, taken: Slices) -> Slices:
    """What steps take, as slices of a tensor where it is something else."""
    of, axis, block = taken
    if isinstance(of, Places) and block is not None:
        return of.of(steps, block), axis, block
    return Parts.slices(taken)


def _is_blank(taken: Slices) -> bool:
    """Whether it is an element of a list that waits for its elements."""
    of, axis, block = taken
    return isinstance(of, Blank) and not of.is_full and axis == 0 and block is None


def _are_last(value: Any, offset: int, count: int, bounds: Sequence[Any]) -> bool:
    """Whether a list of numbered elements ends where the first step of a range reads it, and has
    the others that it reads.
    """
    first = 0 if len(bounds) == 1 else bounds[0]
    are_numbered = isinstance(value, list) and not isinstance(value, Steps)
    is_one_by_one = len(bounds) < 3 or bounds[2] == 1
    if not are_numbered or not is_one_by_one or type(first) is not int:
        return False
    return len(value) == first + offset + 1 and (count == 1 or len(value) >= count)


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
