"""Loops over the experts that some token chose: `for e in counts.gt(0).nonzero():`.

How many there are, only a run tells. An expert that no token chose has no rows to compute, so that
the loop over all of them does the same, and that is what a trace follows if the model does: it is
run with a turn for each expert, at inputs that leave experts out, and returns the same bits.

So does `for e in experts.unique():`, where `experts` is what a top-k says of their axis, which has
as many places as there are experts: the indices of a top-k, a sort or an argmax are places of an
axis, wherever they lie, and so are those that are left of them, once each.

A vector may have a place more than there are experts, as `one_hot(…, num_classes=count + 1)` makes
it. A turn for it looks up an expert that isn't there, and so does the model wherever a token
chooses that: such turns are left out, if a run of the model with them raises IndexError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from attngraph.frontend.interface.shapes import Request
from attngraph.frontend.rewording.cut_for_memory import place
from attngraph.frontend.rewording.resampled import Inputs, output_of, resized
from attngraph.frontend.watching.asked import Place
from attngraph.frontend.watching.locations import quote
from attngraph.inference import inference
from attngraph.ir.traits import CAST, GATHERED, LARGEST, LAYOUT, SORTED

_FOUND = (torch.nonzero, torch.Tensor.nonzero, torch.where, torch.Tensor.where)
_KEPT = frozenset(
    ["flatten", "squeeze", "reshape", "view", "__getitem__", "to", "long", "int", "detach"]
)
"""Operators that hand on the same indices, if they leave their number."""
_TURNS = (torch.Tensor.unbind, torch.unbind)
_PLACES = frozenset(op.split(".")[1] for op in LARGEST | SORTED)
"""Operators that give places of an axis."""
_MOVED = {op.split(".")[1] for op in LAYOUT | CAST | GATHERED} - {"repeat_interleave"}
_MOVED |= {"__getitem__", "__get__", "long", "int", "cpu"}
"""Operators that give some of the numbers that they are given first, in other places; `__get__` is
that of `x.T`, and what `repeat_interleave` is given may be how often."""
_UNIQUE = (torch.unique, torch.Tensor.unique)
_BEYOND = re.compile(r"index (\d+) (?:is )?out of (?:range|bounds)")
_BEYOND_ALL = re.compile(r"index (\d+) is out of bounds for dimension \d+ with size \1\b")


class Hits:
    """Indices at which a vector of known length is true, as a trace or a run meets them, or those
    of an axis of known length that were chosen.

    `places` are the loops over them, and whether a run of one had fewer turns than places. `ends`
    are those whose turns end before the last place, and where.
    """

    def __init__(self, ends: Mapping[Place, int] | None = None) -> None:
        self.places: dict[Place, bool] = {}
        self.ends = dict(ends or {})
        self._counts: dict[Place, int] = {}
        self._known: dict[int, tuple[torch.Tensor, int]] = {}
        self._chosen: dict[int, tuple[torch.Tensor, int]] = {}  # places, of which some may be twice

    def turns(
        self, func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...] | list[Any] | None:
        """The items of a loop over such indices, one for each place of the vector."""
        is_list = getattr(func, "__name__", "") == "tolist"
        if not (is_list or func in _TURNS) or not args:
            return None
        if (len(args) > 1 and args[1]) or named.get("dim"):
            return None
        indices, count = self._known.get(id(args[0]), (None, 0))
        at = place()
        if indices is None or at is None:
            return None
        leaves_out = isinstance(indices.shape[0], int) and indices.shape[0] < count
        self.places[at] = self.places.get(at, False) or leaves_out
        self._counts[at] = count
        end = self.ends.get(at, count)
        if is_list:
            return [index if indices.ndim == 1 else [index] for index in range(end)]
        each = [torch.tensor([index], dtype=indices.dtype) for index in range(end)]
        return tuple(each if indices.ndim == 2 else [index[0] for index in each])

    def shorten(self, error: str) -> bool:
        """Whether loops end earlier now, before a turn for which there is nothing to look up."""
        if (match := _BEYOND.search(error)) is None:
            return False
        end = int(match[1])
        found = {at: end for at, count in self._counts.items() if count == end + 1 > 1}
        self._counts.clear()
        is_new = not found.keys() <= self.ends.keys()
        self.ends |= found
        return is_new

    def see(
        self, func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any], result: Any
    ) -> None:
        """Remembers a result that is such indices."""
        source, name = args[0] if args else None, getattr(func, "__name__", "")
        if _writes(source, name, named):
            self._chosen.clear()
            self._known.pop(id(source), None)
        if not isinstance(source, torch.Tensor):
            return
        self._see_chosen(name, source, args, named, result)
        if func in _UNIQUE:
            _, count = self._chosen.get(id(source), (None, 0))
            if count and isinstance(result, torch.Tensor) and named.get("dim") is None:
                self._known[id(result)] = (result, count)
            return
        if func in _FOUND and len(args) == 1:
            (found, *rest) = result if isinstance(result, tuple) else (result,)
            if not rest and source.ndim == 1 and isinstance(source.shape[0], int):
                self._known[id(found)] = (found, source.shape[0])
            return
        _, count = self._known.get(id(source), (None, 0))
        if not count or name not in _KEPT:
            return
        if isinstance(result, torch.Tensor) and result.ndim in (1, 2):
            is_long = str(result.shape[0]) == str(source.shape[0])
            if is_long and (result.ndim == 1 or result.shape[1] == 1):
                self._known[id(result)] = (result, count)

    def _see_chosen(
        self,
        name: str,
        source: torch.Tensor,
        args: Sequence[Any],
        named: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Remembers a result that is places of an axis."""
        _, count = self._chosen.get(id(source), (None, 0))
        parts = result if isinstance(result, (tuple, list)) else (result,)
        moved = parts if name in _MOVED else parts[:1] if name in _PLACES else ()
        for part in moved if count else ():
            if isinstance(part, torch.Tensor) and _holds(part, count):
                self._chosen[id(part)] = (part, count)
        if name not in _PLACES or len(parts) != (1 if name.startswith("arg") else 2):
            return  # others give first what is at the places
        at = 2 if name == "topk" else 1
        dim = named.get("dim", args[at] if len(args) > at else None if name == "argmax" else -1)
        size = source.numel() if dim is None else source.shape[dim]
        if isinstance(parts[-1], torch.Tensor) and isinstance(size, int):
            self._chosen[id(parts[-1])] = (parts[-1], size)


def _holds(places: torch.Tensor, count: int) -> bool:
    """Whether a dtype has each place of so many."""
    kind = places.dtype
    is_integer = not kind.is_floating_point and not kind.is_complex and kind != torch.bool
    return is_integer and torch.iinfo(kind).max >= count - 1


def _writes(source: Any, name: str, named: Mapping[str, Any]) -> bool:
    """Whether an operator writes over numbers that may be places of an axis."""
    if named.get("out") is not None:
        return True
    if name != "__setitem__" and (not name.endswith("_") or name.endswith("__")):
        return False
    return not isinstance(source, torch.Tensor) or not source.is_floating_point()


class AllTurns(TorchFunctionMode):
    """Within, the model runs with the turns of loops, and remembers what it meets of them."""

    def __init__(self, hits: Hits) -> None:
        super().__init__()
        self._hits = hits
        self.is_spare = False
        """Whether a turn is running that the model itself hasn't: of an expert without rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        turns = self._hits.turns(func, args, named)
        if turns is not None:
            kind = _List if isinstance(turns, list) else _Tuple
            return kind(turns).told_to(self, {*args[0].flatten().tolist()})
        result = func(*args, **named)
        self._hits.see(func, args, named, result)
        return result

    def told(self, items: Iterator[Any], own: set[int]) -> Iterator[Any]:
        for at, item in enumerate(items):
            self.is_spare = at not in own
            try:
                yield item
            finally:  # where the loop is left, too
                self.is_spare = False


def all_turns(traced: Hits | None) -> AbstractContextManager[Any]:
    """Within, the model runs with the turns of the traced loops."""
    return nullcontext() if traced is None else AllTurns(Hits(traced.ends))


class _Told:
    """Items of a loop that tells which of its turns are the model's own."""

    _mode: AllTurns
    _own: set[int]

    def told_to(self, mode: AllTurns, own: set[int]) -> Any:
        self._mode, self._own = mode, own
        return self

    def __iter__(self) -> Iterator[Any]:
        return self._mode.told(super().__iter__(), self._own)  # type: ignore[misc]


class _List(_Told, list[Any]):
    pass


class _Tuple(_Told, tuple[Any, ...]):
    pass


def does_nothing_else(
    module: torch.nn.Module, inputs: Inputs, requests: Sequence[Request], traced: Hits
) -> bool:
    """Whether the model does the same with the turns of the traced loops.

    Each has to have left some out in a run: at the sample, at one whose rows are alike, at such
    ones of other numbers, or at one row. Where a loop ends before its last place, the model fails
    in the next turn.
    """
    left_out: set[Place] = set()
    for at, end in traced.ends.items():
        others = {place: last for place, last in traced.ends.items() if place != at}
        if not _fails(module, inputs, Hits(others), end):
            return False
    for tried in _inputs(inputs, requests):
        expected, hits = output_of(module, tried), Hits(traced.ends)
        if expected is None:
            continue
        with AllTurns(hits):
            found = output_of(module, tried)
        if found is None or len(found) != len(expected):
            return False
        if not are_same(found, expected):
            return False
        left_out |= {at for at, is_short in hits.places.items() if is_short}
    return {*traced.places} <= left_out


def _fails(module: torch.nn.Module, inputs: Inputs, hits: Hits, index: int) -> bool:
    """Whether the model, with these turns, looks up this index where it is one too many."""
    try:
        with AllTurns(hits), inference(module):
            module(*inputs[0], **inputs[1])
    except IndexError as error:
        found = _BEYOND_ALL.search(str(error))
        return found is not None and int(found[1]) == index
    except Exception:
        return False
    return False


def are_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether two runs gave the same numbers."""

    def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
        is_like = a.shape == b.shape and a.dtype == b.dtype
        return is_like and torch.allclose(a, b, 0, 0, equal_nan=True)

    return all(is_same(a, b) for a, b in zip(found, expected, strict=True))


def _inputs(inputs: Inputs, requests: Sequence[Request]) -> Iterator[Inputs]:
    def alike(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.numel():
            return leaf
        for axis in range(leaf.ndim if not leaf.is_floating_point() else max(leaf.ndim - 1, 0)):
            leaf = leaf.narrow(axis, 0, 1).expand_as(leaf)
        return leaf.clone()

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.dtype == torch.bool:
            return ~leaf
        return leaf + 0.5 if leaf.is_floating_point() else leaf

    yield inputs
    yield pytree.tree_map(alike, inputs)
    yield pytree.tree_map(lambda leaf: other(alike(leaf)), inputs)  # of zeros no sum shows
    if requests:
        yield resized(inputs, requests, lambda _: 1)


def all_places_note(at: Place) -> str:
    return (
        "A loop runs over the places where a mask is true, or that were chosen, and a turn for "
        "each place does the same, as runs of the model showed: the graph has them all at "
        f"{quote(*at)}."
    )
