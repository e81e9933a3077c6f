"""Conditions on sizes in sentences for users, as few as possible.

A trace asks the same of its sizes in many forms. What is enforced are the conditions themselves;
these are looked at with many sizes, only to tell them in short.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import sympy

from attngraph.ir.conditions import Condition, at_sizes, shown
from attngraph.ir.dims import DimInfo, symbol, symbols_of

_FIRST = 40
_FURTHER = (64, 100, 127, 128, 255, 256, 777, 1000, 1024, 10_007, 1 << 17, 1_000_003, 1 << 30)
_FEW = 6
"""Sizes that are told one by one, if no others are excluded."""
_TOGETHER = {2: (0, 1, 2, 3, 5, 8, 13, 1000, 1_000_002), 3: (0, 1, 2, 7, 1_000_002)}
"""Steps from the least sizes at which conditions on several dims are looked at, by their number."""
_ELSEWHERE = 8
"""A step at which other dims are looked at, while all sizes of one are."""

_NAMED = 4
"""Numbers in a condition that sizes are looked at around."""

_Point = dict[sympy.Symbol, sympy.Integer]


def demands(
    conditions: Sequence[Condition],
    dims: Mapping[str, DimInfo],
    place_of: Callable[[Condition], str],
) -> Iterator[str]:
    """A sentence for each dim of which a few sizes are excluded, and for each other condition that
    excludes any; `place_of` says where the code asks it, ` at model.py:12 (…)`. What no line of it
    asks is told of the trace: torch takes any size for two or more, and n - 1 with it.
    """
    known: list[Condition] = []
    for name, sizes, excluding in excluded_sizes(conditions, dims):
        where = next((place for each in excluding if (place := place_of(each))), "")
        *others, last = map(str, sizes)
        said = f"{', '.join(others)} or {last}" if others else last
        yield f"Dim {name!r} can't be {said}{_demanded(where)}."
        known += excluding
    for condition in told([each for each in conditions if each not in known], dims, known):
        yield f"Sizes have {shown(condition)}{_demanded(place_of(condition))}."


def _demanded(where: str) -> str:
    return f": the model demands it{where}" if where else ", as torch.export traces the model"


def excluded_sizes(
    conditions: Sequence[Condition], dims: Mapping[str, DimInfo]
) -> Iterator[tuple[str, list[int], list[Condition]]]:
    """The dims of which just a few small sizes are excluded, with these and the conditions that
    exclude them.
    """
    alone: dict[str, list[tuple[set[int], Condition]]] = {}
    for name, sizes, condition in _excluded_alone(conditions, dims):
        alone.setdefault(name, []).append((sizes, condition))
    for name, info in dims.items():
        own = [condition for condition in conditions if symbols_of(condition) == {name}]
        excluding = {size: _failing(own, {symbol(name): size}) for size in _sizes(info)}
        own = [each for each in own if any(each in failing for failing in excluding.values())]
        found = {size for size, failing in excluding.items() if failing}
        if found and (len(found) > _FEW or max(found) >= info.low + _FIRST // 2):
            continue
        found = found.union(*(sizes for sizes, _ in alone.get(name, ())))
        if found:
            yield name, sorted(found), [*own, *(each for _, each in alone.get(name, ()))]


def _excluded_alone(
    conditions: Iterable[Condition], dims: Mapping[str, DimInfo]
) -> Iterator[tuple[str, set[int], Condition]]:
    """Conditions on several dims that fail by the size of one, whatever the others are."""
    for condition in conditions:
        names = symbols_of(condition)
        points = _points(condition, [], dims) if len(names) > 1 else None
        if points is None:
            continue
        failing = [at for at in points if not _holds(condition, at)]
        for name in sorted(names):
            own = symbol(name)
            found = {int(at[own]) for at in failing}
            if not found or len(failing) < sum(int(at[own]) in found for at in points):
                continue
            others = {symbol(n): dims[n].low + _ELSEWHERE for n in names - {name}}
            sizes = {
                size for size in _sizes(dims[name]) if _failing([condition], {**others, own: size})
            }
            if len(sizes) <= _FEW and found <= sizes and max(sizes) < dims[name].low + _FIRST // 2:
                yield name, sizes, condition
                break


def _failing(conditions: Iterable[Condition], at: Mapping[sympy.Symbol, int]) -> list[Condition]:
    point = {name: sympy.Integer(size) for name, size in at.items()}
    return [condition for condition in conditions if not _holds(condition, point)]


def told(
    conditions: Iterable[Condition], dims: Mapping[str, DimInfo], known: Sequence[Condition] = ()
) -> list[Condition]:
    """Those that exclude sizes which the others and those that are `known` don't, the plainest.

    One on more dims than can be looked at stays.
    """
    kept = sorted(conditions, key=lambda each: (sympy.count_ops(each), str(each)))
    seen: dict[tuple[Condition, ...], bool] = {}

    def holds(condition: Condition, at: _Point) -> bool:
        place = (condition, *(at.get(name) for name in sorted(condition.free_symbols, key=str)))
        if place not in seen:
            seen[place] = _holds(condition, at)
        return seen[place]

    for condition in reversed(kept[:]):
        others = [*known, *(each for each in kept if each is not condition)]
        points = _points(condition, others, dims)
        if points is None:
            continue
        failing = (at for at in points if not holds(condition, at))
        if not any(all(holds(other, at) for other in others) for at in failing):
            kept.remove(condition)
    return kept


def _points(
    condition: Condition, others: Iterable[Condition], dims: Mapping[str, DimInfo]
) -> list[_Point] | None:
    """Sizes to look at, of all dims of a condition and of those that it is compared with: small and
    large ones, the largest, and of up to two dims those that the condition itself names.
    """
    names = symbols_of(condition)
    wanted = names.union(*(symbols_of(o) for o in others if symbols_of(o) & names))
    if not wanted <= dims.keys() or len(wanted) not in {1, *_TOGETHER}:
        return None
    named = [int(number) for number in condition.atoms(sympy.Integer)][:_NAMED]
    each = []
    for info in (dims[name] for name in sorted(wanted)):
        steps = _TOGETHER.get(len(wanted), ())
        sizes = [info.low + step for step in steps] or [*_sizes(info)]
        sizes += [] if info.high is None else [info.high]
        if len(wanted) <= 2:
            sizes += [near for number in named for near in (number, info.low + number)]
        each.append(sorted({*_within(info, sizes)}))
    symbols = [symbol(name) for name in sorted(wanted)]
    return [
        dict(zip(symbols, map(sympy.Integer, sizes), strict=True))
        for sizes in itertools.product(*each)
    ]


def _sizes(info: DimInfo) -> list[int]:
    return _within(info, (*range(info.low, info.low + _FIRST), *_FURTHER))


def _within(info: DimInfo, sizes: Iterable[int]) -> list[int]:
    low, high = info.low, info.high
    return [size for size in sizes if size >= low and (high is None or size <= high)]


def _holds(condition: Condition, at: _Point) -> bool:
    """Whether it holds there; one that speaks of other dims says nothing."""
    return at_sizes(condition, at) is not sympy.false
