"""Loops over the experts that some token chose: `for e in counts.gt(0).nonzero():`.

How many there are, only a run tells. An expert that no token chose has no rows to compute, so that
the loop over all of them does the same, and that is what a trace follows if the model does: it is
run with a turn for each expert, at inputs that leave experts out, and returns the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from attngraph.frontend.branches import Place
from attngraph.frontend.cut_for_memory import place
from attngraph.frontend.locations import quote
from attngraph.frontend.resampled import Inputs, output_of, resized
from attngraph.frontend.shapes import Request

_FOUND = (torch.nonzero, torch.Tensor.nonzero, torch.where, torch.Tensor.where)
_KEPT = frozenset(
    ["flatten", "squeeze", "reshape", "view", "__getitem__", "to", "long", "int", "detach"]
)
"""What hands on the same indices, if it leaves their number."""
_TURNS = (torch.Tensor.unbind, torch.unbind)


class Hits:
    """Indices at which a vector of known length is true, as a trace or a run meets them.

    `places` are the loops over them, and whether a run of one had fewer turns than places.
    """

    def __init__(self) -> None:
        self.places: dict[Place, bool] = {}
        self._known: dict[int, tuple[torch.Tensor, int]] = {}

    def turns(
        self, func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...] | None:
        """What a loop over such indices runs through, with a turn for each place of the vector."""
        if func not in _TURNS or not args or (len(args) > 1 and args[1]) or named.get("dim"):
            return None
        indices, count = self._known.get(id(args[0]), (None, 0))
        at = place()
        if indices is None or at is None:
            return None
        leaves_out = isinstance(indices.shape[0], int) and indices.shape[0] < count
        self.places[at] = self.places.get(at, False) or leaves_out
        each = [torch.tensor([index]) for index in range(count)]
        return tuple(each if indices.ndim == 2 else [index[0] for index in each])

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

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        turns = self._hits.turns(func, args, named)
        if turns is not None:
            return turns
        result = func(*args, **named)
        self._hits.see(func, args, result)
        return result


def does_nothing_else(
    module: torch.nn.Module, inputs: Inputs, requests: Sequence[Request], places: set[Place]
) -> bool:
    """Whether the model does the same with a turn for every place in these loops.

    Each has to have left some out in a run: at the sample, at one whose rows are alike, or at one
    row.
    """
    left_out: set[Place] = set()
    for tried in _inputs(inputs, requests):
        expected, hits = output_of(module, tried), Hits()
        if expected is None:
            continue
        with _AllTurns(hits):
            found = output_of(module, tried)
        if found is None or len(found) != len(expected):
            return False
        if not all(_is_same(a, b) for a, b in zip(found, expected, strict=True)):
            return False
        left_out |= {at for at, is_short in hits.places.items() if is_short}
    return places <= left_out


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 0, 0, equal_nan=True)


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
