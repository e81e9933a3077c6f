"""Lists of Python whose length is a size: what a loop appended, the parts of an open axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, SupportsIndex

import torch
from torch.utils import _pytree as pytree

JOINS = (torch.stack, torch.cat, torch.concat, torch.concatenate)


class Unread(Exception):
    """What no scan gives."""


class Rows(NamedTuple):
    """Elements of a list as one: a tensor (or several, nested) whose first axis counts them."""

    stacked: Any

    @property
    def count(self) -> Any:
        return pytree.tree_leaves(self.stacked)[0].shape[0]

    @property
    def is_some(self) -> bool:
        """Whether there is one at any size."""
        count = self.count
        return count > 0 if isinstance(count, int) else bool(count.node.expr.is_Symbol)

    def taken(self, index: Any) -> Any:
        """An element, or a slice's elements stacked."""
        return pytree.tree_map(lambda each: each[index], self.stacked)

    def turned(self) -> Rows:
        return Rows(pytree.tree_map(lambda each: each.flip(0), self.stacked))


class Steps(list[Any]):
    """A list, some of whose elements are `Rows`, for which what lists are asked works.

    What would need its length as a number raises Unread.
    """

    def __init__(self, pieces: Iterable[Any]) -> None:
        self.pieces = list(pieces)
        super().__init__(map(_shown, self.pieces))

    @staticmethod
    def of(value: Any) -> list[Any]:
        """The pieces of any list or tuple."""
        return value.pieces if isinstance(value, Steps) else list(value)

    @property
    def count(self) -> Any:
        """How many elements there are, a size."""
        return sum(piece.count if isinstance(piece, Rows) else 1 for piece in self.pieces)

    def whole(self) -> Any:
        """All elements along a new first axis."""
        if len(self.pieces) == 1 and isinstance(self.pieces[0], Rows):
            return self.pieces[0].stacked
        parts = [
            piece.stacked
            if isinstance(piece, Rows)
            else pytree.tree_map(lambda each: torch.as_tensor(each).unsqueeze(0), piece)
            for piece in self.pieces
        ]
        return pytree.tree_map(lambda *each: torch.cat(each), *parts)

    def joined(self, axis: int, *, new: bool) -> torch.Tensor:
        """All of them along a new axis, or along one that they have."""
        pieces = [piece for piece in self.pieces if isinstance(piece, Rows)]
        rank = pieces[0].stacked.dim() - 1 + new
        axis %= rank
        parts = [
            (
                piece.stacked.movedim(0, axis)
                if new
                else piece.stacked.movedim(0, axis).flatten(axis, axis + 1)
            )
            if isinstance(piece, Rows)
            else (piece.unsqueeze(axis) if new else piece)
            for piece in self.pieces
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, axis)

    def reverse(self) -> None:
        pieces = self[::-1].pieces
        self.clear()
        self.extend(Steps(pieces))

    def clear(self) -> None:
        self.pieces.clear()
        super().clear()

    def append(self, value: Any) -> None:
        self.pieces.append(value)
        super().append(value)

    def insert(self, index: SupportsIndex, value: Any) -> None:
        if index != 0:
            raise Unread("a place in a list that a loop fills")
        self.pieces.insert(0, value)
        super().insert(0, value)

    def extend(self, values: Iterable[Any]) -> None:
        for piece in Steps.of(values):
            self.pieces.append(piece)
            super().append(_shown(piece))

    def _unread(self, *unused: Any, **named: Any) -> Any:
        raise Unread("a change of a list that a loop fills, or what asks for each of its elements")

    pop: Any = _unread
    remove: Any = _unread
    sort: Any = _unread
    index: Any = _unread
    __delitem__: Any = _unread
    __setitem__: Any = _unread
    __imul__: Any = _unread
    __mul__: Any = _unread
    __contains__: Any = _unread
    __reversed__: Any = _unread

    def copy(self) -> Steps:
        return Steps(self.pieces)

    def __iadd__(self, values: Any) -> Any:
        self.extend(values)
        return self

    def __add__(self, other: Any) -> Any:
        return Steps([*self.pieces, *Steps.of(other)])

    def __radd__(self, other: Any) -> Any:
        return Steps([*Steps.of(other), *self.pieces])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._slice(index)
        if isinstance(index, int):
            return self._element(index)
        (piece, *others) = self.pieces
        if others or not isinstance(piece, Rows):
            piece = Rows(self.whole())
        return piece.taken(index)

    def _element(self, index: int) -> Any:
        last, pieces = index < 0, self.pieces[:: -1 if index < 0 else 1]
        left = -index - 1 if last else index
        for at, piece in enumerate(pieces):
            if not isinstance(piece, Rows):
                if not left:
                    return piece
                left -= 1
            elif at == len(pieces) - 1 == 0 or (not left and piece.is_some):
                return piece.taken(-left - 1 if last else left)
            else:
                break
        return Rows(self.whole()).taken(index)

    def _slice(self, index: slice) -> Steps:
        """Raises Unread where it depends on the length which elements that are."""
        start, stop, step = index.start, index.stop, index.step
        if step == -1 and start is None and stop is None:
            return Steps(
                piece.turned() if isinstance(piece, Rows) else piece for piece in self.pieces[::-1]
            )
        are_known = all(end is None or type(end) is int for end in (start, stop))
        is_of_ends = (start is None or start >= 0) and (stop is None or stop < 0)
        if step not in (None, 1) or not (are_known and is_of_ends):
            raise Unread("a part of a list that a loop fills")
        left = self.pieces[start:stop]
        kept = set(map(id, left))
        if any(isinstance(piece, Rows) and id(piece) not in kept for piece in self.pieces):
            return Steps([Rows(Rows(self.whole()).taken(slice(start, stop)))])
        return Steps(left)

    def __iter__(self) -> Iterator[Any]:
        raise Unread("the elements of a list that a loop fills")

    def __len__(self) -> int:
        raise Unread("the length of a list that a loop fills")

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None


class Blank(Steps):
    """`[None] * n` of a size n: a list whose elements are given by their places.

    It is a list as any once it has all of them; before that, what asks for one raises Unread.
    """

    def __init__(self, blank: Any, size: Any) -> None:
        self.blank, self._size = blank, size
        self._parts: list[tuple[Any, Any, Any]] = []
        list.__init__(self)

    def fill(self, start: Any, stop: Any, stacked: Any) -> None:
        """Elements of which the first is at `start` and the last before `stop`."""
        self._parts.append((start, stop, Rows(stacked)))
        list.append(self, _shown(Rows(stacked)))

    def __setitem__(self, index: Any, value: Any) -> None:
        if type(index) is not int or index < 0:
            raise Unread("a place in a list that a loop fills")
        self._parts.append((index, index + 1, value))
        list.append(self, value)

    @property
    def is_full(self) -> bool:
        try:
            return bool(self.pieces)
        except Unread:
            return False

    @property
    def pieces(self) -> list[Any]:  # type: ignore[override]
        found: list[Any] = []
        left, at = list(self._parts), 0
        while left:
            following = next((part for part in left if _is_same(part[0], at)), None)
            if following is None:
                break
            left.remove(following)
            _, at, piece = following
            found.append(piece)
        if left or not _is_same(at, self._size):
            raise Unread("a list of which a loop fills other places than all of them once")
        return found

    @property
    def count(self) -> Any:
        return self._size

    append: Any = Steps._unread
    insert: Any = Steps._unread
    extend: Any = Steps._unread
    reverse: Any = Steps._unread
    clear: Any = Steps._unread


def _is_same(size: Any, other: Any) -> bool:
    """Whether two sizes are the same, whatever the dims are."""
    one, two = (
        each.node.expr if isinstance(each, torch.SymInt) else each for each in (size, other)
    )
    return bool(one == two)


def axis_of_join(args: Sequence[Any], named: Mapping[str, Any]) -> int:
    """Of a call of `JOINS`."""
    axis: int = named.get("dim", args[1] if len(args) > 1 else 0)
    return axis


def is_builtin(called: object, own: object) -> bool:
    """Whether what a name stands for is Python's own, or during a trace ours, of open sizes."""
    return called is own or str(getattr(called, "__module__", "")).startswith("attngraph.")


def _shown(piece: Any) -> Any:
    """What torch finds in the list, which it never computes with."""
    return pytree.tree_leaves(piece.stacked)[0] if isinstance(piece, Rows) else piece


class Lists:
    """What a rewritten function asks of values that may be such lists.

    `plain` is what the code calls, which answers for any other value, and wherever a name of
    Python's is one of the model's own.
    """

    steps: ClassVar[frozenset[int]] = frozenset()
    """The numbers of steps of loops that are scans, though no size is open."""
    parted: ClassVar[bool] = False
    """Whether an open axis is cut into blocks as into a list of an open length."""

    @staticmethod
    def blank(one: list[Any], times: Any) -> Any:
        """`[None] * n`"""
        is_open = isinstance(times, torch.SymInt) and times.node.expr.free_symbols
        is_open = is_open or (type(times) is int and times in Lists.steps)
        return Blank(one[0], times) if is_open else one * times

    @staticmethod
    def listed(plain: Callable[..., Any], value: Any) -> Any:
        return value.copy() if plain is list and isinstance(value, Steps) else plain(value)

    @staticmethod
    def as_tuple(plain: Callable[..., Any], value: Any) -> Any:
        return value.copy() if plain is tuple and isinstance(value, Steps) else plain(value)

    @staticmethod
    def typed(plain: Any, value: Any) -> Any:
        """`torch.LongTensor(value)`"""
        if not isinstance(value, Steps):
            return plain(value)
        is_default = plain is torch.Tensor  # whose dtype is that of each tensor
        return value.whole().to(torch.get_default_dtype() if is_default else plain.dtype)

    @staticmethod
    def turned(plain: Callable[..., Any], value: Any) -> Any:
        return value[::-1] if plain is reversed and isinstance(value, Steps) else plain(value)

    @staticmethod
    def length(plain: Callable[..., Any], value: Any) -> Any:
        if not is_builtin(plain, len):
            return plain(value)
        if isinstance(value, Steps):
            return value.count
        is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
        return value.shape[0] if is_tensor else len(value)

    @staticmethod
    def total(plain: Callable[..., Any], value: Any) -> Any:
        is_one = plain is sum and isinstance(value, Steps)
        return value.whole().sum(0) if is_one else plain(value)

    @staticmethod
    def chained(*parts: Any) -> Any:
        """`[*a, b, *c]`, of parts that are lists."""
        if any(isinstance(part, Steps) for part in parts):
            return Steps(piece for part in parts for piece in Steps.of(part))
        return [each for part in parts for each in part]

    @staticmethod
    def chained_tuple(*parts: Any) -> Any:
        """`(*a, b, *c)`."""
        made = Lists.chained(*parts)
        return made if isinstance(made, Steps) else tuple(made)
