"""Loops over the experts that some token chose: `for e in counts.gt(0).nonzero():`.

How many there are, only a run tells. An expert that no token chose has no rows to compute, so that
the loop over all of them does the same, and that is what a trace follows if the model does: it is
run with a turn for each expert, at inputs that leave experts out, and returns the same bits.

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

_FOUND = (torch.nonzero, torch.Tensor.nonzero, torch.where, torch.Tensor.where)
_KEPT = frozenset(
    ["flatten", "squeeze", "reshape", "view", "__getitem__", "to", "long", "int", "detach"]
)
"""Operators that hand on the same indices, if they leave their number."""
_TURNS = (torch.Tensor.unbind, torch.unbind)
_BEYOND = re.compile(r"index (\d+) (?:is )?out of (?:range|bounds)")
_BEYOND_ALL = re.compile(r"index (\d+) is out of bounds for dimension \d+ with size \1\b")


class Hits:
    """Indices at which a vector of known length is true, as a trace or a run meets them.

    `places` are the loops over them, and whether a run of one had fewer turns than places. `ends`
    are those whose turns end before the last place, and where.
    """

    def __init__(self, ends: Mapping[Place, int] | None = None) -> None:
        self.places: dict[Place, bool] = {}
        self.ends = dict(ends or {})
        self._counts: dict[Place, int] = {}
        self._known: dict[int, tuple[torch.Tensor, int]] = {}

    def turns(
        self, func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...] | None:
        """The items of a loop over such indices, one for each place of the vector."""
        if func not in _TURNS or not args or (len(args) > 1 and args[1]) or named.get("dim"):
            return None
        indices, count = self._known.get(id(args[0]), (None, 0))
        at = place()
        if indices is None or at is None:
            return None
        leaves_out = isinstance(indices.shape[0], int) and indices.shape[0] < count
        self.places[at] = self.places.get(at, False) or leaves_out
        self._counts[at] = count
        each = [torch.tensor([index]) for index in range(self.ends.get(at, count))]
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

    def see(self, func: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
        """Remembers a result that is such indices."""
        source = args[0] if args else None
        if not isinstance(source, torch.Tensor):
            return
        if func in _FOUND and len(args) == 1:
            (found, *rest) = result if isinstance(result, tuple) else (result,)
            if not rest and source.ndim == 1 and isinstance(source.shape[0], int):
                self._known[id(found)] = (found, source.shape[0])
            return
        _, count = self._known.get(id(source), (None, 0))
        if not count or getattr(func, "__name__", "") not in _KEPT:
            return
        if isinstance(result, torch.Tensor) and result.ndim in (1, 2):
            is_long = str(result.shape[0]) == str(source.shape[0])
            if is_long and (result.ndim == 1 or result.shape[1] == 1):
                self._known[id(result)] = (result, count)


class _AllTurns(TorchFunctionMode):
    def __init__(self, hits: Hits) -> None:
        super().__init__()
        self._hits = hits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        turns = self._hits.turns(func, args, named)
        if turns is not None:
            return turns
        result = func(*args, **named)
        self._hits.see(func, args, result)
        return result


def all_turns(traced: Hits | None) -> AbstractContextManager[Any]:
    """Within, the model runs with the turns of the traced loops."""
    return nullcontext() if traced is None else _AllTurns(Hits(traced.ends))


def does_nothing_else(
    module: torch.nn.Module, inputs: Inputs, requests: Sequence[Request], traced: Hits
) -> bool:
    """Whether the model does the same with the turns of the traced loops.

    Each has to have left some out in a run: at the sample, at one whose rows are alike, or at one
    row. Where a loop ends before its last place, the model fails in the next turn.
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
        with _AllTurns(hits):
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
        with _AllTurns(hits), inference(module):
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

    yield inputs
    yield pytree.tree_map(alike, inputs)
    if requests:
        yield resized(inputs, requests, lambda _: 1)


def all_places_note(at: Place) -> str:
    return (
        "A loop runs over the places where a mask is true, and a turn for each place does the "
        f"same, as runs of the model showed: the graph has them all at {quote(*at)}."
    )
