"""The ranges of sizes that were asked for, beside those that a trace holds for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import sympy

from attngraph.errors import CaptureError
from attngraph.frontend.interface.shapes import Request
from attngraph.frontend.sizes.demands import demands
from attngraph.frontend.sizes.suspects import is_end, unequal
from attngraph.frontend.watching.locations import quote
from attngraph.frontend.watching.questions import Question
from attngraph.ir.conditions import Condition, always, at_sizes, shown
from attngraph.ir.dims import DimInfo, symbol, symbols_of
from attngraph.ir.ranges import Ranges

_MOST_TRIED = 1 << 12
"""Sizes of a dim at which a condition is tried, each."""


def asked(request: Request | None) -> tuple[int, int | None]:
    return (1, None) if request is None else (request.low or 1, request.high)


class Parting(NamedTuple):
    """Where the model's code does one thing at sizes of a dim up to the `last`, and another beyond.
    A trace is of those that are `above`, or of the others.
    """

    name: str
    last: int
    above: bool
    place: str


class NarrowedError(CaptureError):
    """A range that was asked for by number can't be had, where the model's code parts it."""

    parting: Parting | None = None


class Places:
    """The line of the model where a condition was asked."""

    def __init__(self, own: Sequence[tuple[Condition, Question]]) -> None:
        self._own = own

    def of(self, condition: Condition) -> str:
        return self._first(lambda own: shown(own) == shown(condition))

    def of_end(self, name: str, beyond: int, within: int) -> str:
        """Of the question that tells these two sizes of one dim apart."""
        at = [{symbol(name): sympy.Integer(size)} for size in (beyond, within)]
        return self._first(
            lambda own: (
                symbols_of(own) == {name}
                and [at_sizes(own, place) for place in at] == [sympy.false, sympy.true]
            )
        )

    def _first(self, fits: object) -> str:
        assert callable(fits)
        for condition, question in self._own:
            if fits(condition) and not question.file.startswith("<"):  # code that torch made
                return f" at {quote(question.file, question.line)}"
        return ""


def holds_everywhere(condition: Condition, wanted: Mapping[str, Request]) -> bool:
    """Whether a condition on one dim holds at each of the sizes that were asked for, tried all."""
    name = _sole_dim(condition, wanted)
    if name is None:
        return False
    low, high = asked(wanted[name])
    if high is None or high - low > _MOST_TRIED:
        return False
    only = Ranges({}, (condition,))
    return not any(only.broken({name: size}) for size in range(low, high + 1))


def leaves_out(
    condition: Condition, wanted: Mapping[str, Request], dims: Mapping[str, DimInfo]
) -> bool:
    """Whether a condition on one dim may not hold for some of the sizes that were asked for."""
    name = _sole_dim(condition, wanted)
    if name is None:
        return False
    low, high = asked(wanted[name])
    range_ = replace(dims[name], low=max(low, 2), high=high)
    return always(condition, {name: range_}) is not True


def _sole_dim(condition: Condition, wanted: Mapping[str, Request]) -> str | None:
    """The dim that a condition is on, if it is on one alone, and that was asked for."""
    names = symbols_of(condition)
    return next(iter(names)) if len(names) == 1 and names <= wanted.keys() else None


def _ends(
    wanted: Mapping[str, Request], dims: Mapping[str, DimInfo], places: Places
) -> Iterator[tuple[str, str, bool, str]]:
    """(dim, bound, whether another was asked for by number, place) of each end that is narrower."""
    for name, info in dims.items():
        request = wanted.get(name)
        low, high = asked(request)
        if info.high is not None and (high is None or high > info.high):
            where = places.of_end(name, info.high + 1, info.high)
            yield name, f"at most {info.high}", high is not None, where
        if info.low > max(low, 2):
            where = places.of_end(name, info.low - 1, info.low)
            yield name, f"at least {info.low}", bool(request and request.low), where


def partings(
    wanted: Mapping[str, Request], dims: Mapping[str, DimInfo], places: Places
) -> Iterator[Parting]:
    """Each narrower end that the model's own code asks for."""
    for name, info in dims.items():
        low, high = asked(wanted.get(name))
        if name not in wanted:
            continue
        if info.high is not None and (high is None or high > info.high):
            yield Parting(name, info.high, False, places.of_end(name, info.high + 1, info.high))
        if info.low > max(low, 2):
            yield Parting(name, info.low - 1, True, places.of_end(name, info.low - 1, info.low))


def require_asked(
    wanted: Mapping[str, Request],
    dims: Mapping[str, DimInfo],
    conditions: Sequence[Condition],
    places: Places,
    refusal: CaptureError | None,
) -> None:
    """Raises CaptureError where an end that was asked for by number can't be reached."""
    for name, bound, by_number, where in _ends(wanted, dims, places):
        if by_number:
            told = narrowed(wanted[name], f"{name} is {bound}", where)
            own = [each for each in partings(wanted, dims, places) if each.place]
            told.parting = own[0] if len(own) == 1 else None
            raise told
    # Others may be 0: the past of a decoder is empty at first.
    infos = {name: replace(info, low=0) for name, info in dims.items()}
    empty = {symbol(n): sympy.Symbol(n, integer=True, nonnegative=True) for n in dims}
    for name, request in wanted.items():
        for end in (request.low, request.high):
            if not end or end < 2:
                continue
            place = {symbol(name): sympy.Integer(end)}
            for condition in conditions:
                if unequal(condition) is not None:
                    continue
                if always(at_sizes(condition, {**empty, **place}), infos) is False:
                    told = narrowed(request, shown(condition), places.of(condition))
                    raise told if refusal is None or is_end(condition) else refusal


def narrowed(request: Request, demand: str, where: str) -> NarrowedError:
    low, high = asked(request)
    sizes = f"{low}..{'' if high is None else high}"
    return NarrowedError(
        f"I{str(request)[1:]} can't be {sizes}: the model demands {demand}{where}. Ask for a range "
        f"that it takes, or for whatever it takes: --dim {request.name}=auto, or "
        f"Dim({request.name!r}) without ends."
    )


def at_most(
    wanted: Mapping[str, Request], dims: Mapping[str, DimInfo], places: Places
) -> Iterator[str]:
    for name, bound, _, where in _ends(wanted, dims, places):
        if name in wanted and bound.startswith("at most"):
            yield f"Dim {name!r} is {bound}: the model demands it{where}."


def demands_of(demanded: Mapping[Condition, str], dims: Mapping[str, DimInfo]) -> list[str]:
    """Sentences on conditions and lower ends, with their places."""
    from_one = {name: replace(info, low=min(info.low, 1)) for name, info in dims.items()}
    return list(demands(list(demanded), from_one, demanded.__getitem__))
