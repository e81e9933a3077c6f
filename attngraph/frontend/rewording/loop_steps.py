"""What a rewritten loop of Python calls while it is traced: its steps in a scan, or all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._higher_order_ops.scan import scan
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from attngraph.frontend.rewording.loop_lists import Lists, Rows, Steps, Unread
from attngraph.ir.dims import divide

Block: TypeAlias = Callable[[Any], tuple[Any, Any, Any]]
"""Of a step where its block begins and ends, and the limit of all blocks, None without one."""
Slices: TypeAlias = tuple[torch.Tensor, int, Block | None]
"""A tensor, an axis, and the block of it that each step takes, None where that is one place."""
_WIDER = 3
"""Steps after which a state has the shape that it keeps."""


class _Index:
    def __getitem__(self, index: Any) -> Any:
        return index


class Helpers(Lists):
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
            if not isinstance(step, int) or step < 1 or divide(_expr(stop - start), step) is None:
                return False
        ends = bounds[:2]
        return any(isinstance(end, torch.SymInt) and end.node.expr.free_symbols for end in ends)

    @staticmethod
    def backwards(bounds: Sequence[Any]) -> Sequence[Any] | None:
        """The range that goes through the same numbers from the last to the first."""
        steps = _Range.of(bounds) if len(bounds) < 3 or bounds[2] in (1, -1) else None
        if steps is None:
            return None
        return steps.stop - steps.step, steps.start - steps.step, -steps.step

    @staticmethod
    def Steps(before: Any, made: Any, in_front: bool) -> Any:
        """A list to which all steps have added."""
        rows = Rows(made)
        return Steps([rows.turned(), *Steps.of(before)] if in_front else [*Steps.of(before), rows])

    @staticmethod
    def own(value: Any) -> Any:
        """What a step changes, apart from what was there before it."""
        if isinstance(value, torch.Tensor):
            return value.clone()
        if type(value) in (list, dict):
            return value.copy()
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
        is_single = size == 1 if name == "split" else _is_equal(size, of.shape[axis])
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
        only_carries: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """What the last step carries out, and the steps' results, stacked.

        Of what isn't there before the first step, only what is `wanted` is carried out. A size
        among what is `held`, which no step changes, is told to the steps by a tensor. Where steps
        give no results and they `only_carries` something, a range that begins at 1 may be empty.
        """
        steps = _Range.of(bounds)
        given = [_defined(value) for value in initial]
        lost = [at for at, value in enumerate(given) if value is _UNDEFINED]
        are_places = not any(block for _, _, block in sequences)
        before = steps.from_none() if only_carries and are_places and not lost else steps
        leaves, spec = pytree.tree_flatten(given)
        leaves = [_as_tensor(leaf) for leaf in leaves]
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        items: list[Any] = [before.numbers()]
        items += [before.taken(*each) for each in sequences]
        kept = [_defined(value) for value in held]
        sized = {at: torch.zeros(size, 0) for at, size in enumerate(kept) if _is_dim(size)}

        def step(carry: list[torch.Tensor], now: list[torch.Tensor]) -> Any:
            own = list(leaves)
            for at, leaf in zip(places, carry, strict=True):
                own[at] = leaf
            own_kept = [
                sized[at].shape[0] if at in sized else value for at, value in enumerate(kept)
            ]
            after, made = body(now[0], *pytree.tree_unflatten(own, spec), *now[1:], *own_kept)
            last = [after[at] for at in new]
            for at in lost:
                after[at] = _UNDEFINED
            flat, how = pytree.tree_flatten(after)
            if how != spec or any(flat[at] is not leaves[at] for at in others):
                raise Unread("another kind of thing is carried")
            flat = [_as_tensor(leaf) for leaf in flat]
            if before is not steps:
                for at in places:
                    flat[at] = torch.where(now[0] >= steps.start, flat[at], own[at])
            made = pytree.tree_map(_as_tensor, [*made, *last])
            return [flat[at] for at in places], made

        new = [at for at in lost if wanted[at]]
        others = [at for at in range(len(leaves)) if at not in places]
        if places and before is steps:
            _widen(leaves, places, step, items)
        if places:
            carry, made = scan(step, [leaves[at] for at in places], items)
        else:
            carry, made = [], torch.vmap(lambda *now: step([], list(now))[1])(*items)
        for at, leaf in zip(places, carry, strict=True):
            leaves[at] = leaf
        after = pytree.tree_unflatten(leaves, spec)
        for at, values in zip(new, made[len(made) - len(new) :], strict=True):
            after[at] = values[-1]
        return after, list(made[: len(made) - len(new)])

    @staticmethod
    def put(
        bounds: Sequence[Any],
        written: Sequence[Slices],
        rows: Sequence[torch.Tensor],
    ) -> None:
        """Writes the rows of all steps, stacked, where the loop would have written each."""
        steps = _Range.of(bounds)
        for each, stacked in zip(written, rows, strict=True):
            steps.places(*each).copy_(steps.forward(stacked))

    @staticmethod
    def row(row: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
        """A row with a value written at an index, whose slices may end at numbers in tensors."""
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
    def part(of: Any, index: Any) -> Any:
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
                of, items[at] = of.index_select(axis, place), 0
            axis += item is not None
        return of[tuple(items)]

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


class _Undefined:
    """Stands for a name that nothing has been assigned to."""


_UNDEFINED = _Undefined()


def _as_tensor(leaf: Any) -> Any:
    """What is carried, in memory of its own; a number becomes a tensor."""
    if isinstance(leaf, torch.Tensor):
        return leaf.clone(memory_format=torch.contiguous_format)
    if type(leaf) in (int, float, torch.SymInt):
        is_float = type(leaf) is float
        return torch.full((), leaf, dtype=torch.float64 if is_float else torch.int64)
    return leaf


def _widen(
    leaves: list[Any],
    places: Sequence[int],
    step: Callable[[list[torch.Tensor], list[torch.Tensor]], tuple[list[Any], Any]],
    items: Sequence[torch.Tensor],
) -> None:
    """Gives what is carried into the first step the shape and dtype in which it leaves it, as far
    as that is a broadcast: a state that begins as `zeros(d)`, `zeros(())`, 0 or whole numbers.

    A step that would see the difference, as by a sum, is another function: the check of the trace
    tells.
    """
    now = [item.new_zeros(item.shape[1:]) for item in items]
    for _ in range(_WIDER):
        after, _ = step([leaves[at] for at in places], now)
        is_same = True
        for at, last in zip(places, after, strict=True):
            first, sizes = _sizes(leaves[at]), _sizes(last)
            if (first, leaves[at].dtype) == (sizes, last.dtype):
                continue
            own = sizes[len(sizes) - len(first) :]
            if len(first) <= len(sizes) and all(
                size in (1, wide) for size, wide in zip(first, own, strict=True)
            ):
                leaves[at] = _as_tensor(leaves[at].to(last.dtype).expand(last.shape))
                is_same = False
        if is_same:
            return


def _sizes(value: torch.Tensor) -> list[Any]:
    """As expressions, whose comparison asks a trace nothing."""
    return [_expr(size) for size in value.shape]


def _are_last(value: Any, offset: int, bounds: Sequence[Any]) -> bool:
    """Whether a list of numbered elements ends where the first step of a range reads it."""
    first = 0 if len(bounds) == 1 else bounds[0]
    are_numbered = isinstance(value, list) and not isinstance(value, Steps)
    is_one_by_one = len(bounds) < 3 or bounds[2] == 1
    return (
        are_numbered and is_one_by_one and type(first) is int and (len(value) == first + offset + 1)
    )


def _defined(value: Callable[[], Any]) -> Any:
    try:
        return value()
    except (NameError, IndexError):
        return _UNDEFINED


@dataclass(frozen=True)
class _Range:
    """The numbers that a loop goes through, `start`, `start + step` … below `stop`."""

    start: Any
    stop: Any
    step: int

    @staticmethod
    def of(bounds: Sequence[Any]) -> _Range:
        """Raises Unread where the last step may be shorter than the others."""
        start, stop = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
        step = bounds[2] if len(bounds) == 3 else 1
        if step not in (1, -1) and divide(_expr(stop - start), step) is None:
            raise Unread("a length that is no multiple of the step")
        return _Range(start, stop, step)

    def from_none(self) -> _Range:
        """The range from 0, of one that begins at 1 and may have one step or none: neither torch
        nor ONNX has such a loop.
        """
        count = self.stop - self.start
        is_short = isinstance(count, torch.SymInt) and not statically_known_true(count >= 2)
        is_from_one = self.step == 1 and type(self.start) is int and self.start == 1
        is_to_size = isinstance(self.stop, torch.SymInt) and self.stop.node.expr.is_Symbol
        return _Range(0, self.stop, 1) if is_short and is_from_one and is_to_size else self

    def numbers(self) -> torch.Tensor:
        """All of them."""
        if self.step in (1, -1):
            return self.forward(torch.arange(*self._ends))
        turns = torch.arange((self.stop - self.start) // self.step)
        numbers: torch.Tensor = turns * self.step + self.start
        return numbers

    @property
    def _ends(self) -> tuple[Any, Any]:
        """Of the numbers in their order, whichever way a loop goes through them."""
        return (self.start, self.stop) if self.step > 0 else (self.stop + 1, self.start + 1)

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
            return _part(of, axis, *self._ends, abs(self.step)).movedim(axis, 0)
        begin, end, limit = block(self.start)
        following, last, _ = block(self.start + self.step)
        size = end - begin
        is_one = _is_equal(following, end) and _is_equal(last - following, size)
        is_from_end = isinstance(begin, int) and begin < 0  # as Python counts
        if not isinstance(size, int) or size < 1 or not is_one or is_from_end:
            raise Unread("blocks that aren't one behind the other")
        if limit is not None and not _is_equal(limit, of.shape[axis]):
            raise Unread("blocks that end before the tensor does")
        count = (self.stop - self.start) // self.step
        blocks = _part(of, axis, begin, begin + count * size, 1)
        at = axis % of.dim()
        return torch.unflatten(blocks, at, (count, size)).movedim(at, 0)


def _part(tensor: torch.Tensor, axis: int, start: Any, stop: Any, step: int) -> torch.Tensor:
    is_whole = isinstance(start, int) and start == 0 and _is_equal(stop, tensor.shape[axis])
    part = tensor if is_whole else tensor.narrow(axis, start, stop - start)
    return part if step == 1 else part.movedim(axis, 0)[::step].movedim(0, axis)


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _is_equal(size: Any, other: Any) -> bool:
    """Whether two sizes are the same, whatever the dims are."""
    return bool(_expr(size) == _expr(other))


def _is_dim(value: Any) -> bool:
    """Whether it is the size of an axis, of which a step knows when it is given such an axis."""
    return isinstance(value, torch.SymInt) and value.node.expr.is_Symbol


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
        _as_tensor(each) if isinstance(each, torch.SymInt) else torch.as_tensor(each)
        for each in numbers
    )
    for number in others:
        found = of_two(found, number)
    return found
