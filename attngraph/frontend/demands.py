"""What is told of the conditions on sizes: as few sentences as say the same.

A trace asks the same of its sizes in many forms. What is enforced are the conditions themselves;
these are looked at with many sizes, only to tell them in short.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import sympy

from attngraph.ir.conditions import Condition, at_sizes
from attngraph.ir.dims import DimInfo, symbol, symbols_of

_FIRST = 40
_FURTHER = (64, 100, 127, 128, 255, 256, 777, 1000, 1024, 10_007, 1 << 17, 1_000_003, 1 << 30)
_FEW = 6
"""Sizes that are told one by one, if no others are excluded."""
_TOGETHER = {2: (0, 1, 2, 3, 5, 8, 13, 1000, 1_000_002), 3: (0, 1, 2, 7, 1_000_002)}
"""Steps from the least sizes at which conditions on several dims are looked at, by their number."""

_Point = dict[sympy.Symbol, sympy.Integer]


def excluded_sizes(
    conditions: Sequence[Condition], dims: Mapping[str, DimInfo]
) -> Iterator[tuple[str, list[int], list[Condition]]]:
    """The dims of which a few small sizes alone are excluded, with these and the conditions that
    exclude them.
    """
    for name, info in dims.items():
        own = [condition for condition in conditions if symbols_of(condition) == {name}]
        sizes = _sizes(info)
        excluding = {
            size: [each for each in own if not _holds(each, {symbol(name): sympy.Integer(size)})]
            for size in sizes
        }
        found = [size for size in sizes if excluding[size]]
        if found and len(found) <= _FEW and found[-1] < info.low + _FIRST // 2:
            yield name, found, [each for each in own if any(each in e for e in excluding.values())]


def told(
    conditions: Iterable[Condition], dims: Mapping[str, DimInfo], known: Sequence[Condition] = ()
) -> list[Condition]:
    """Those that exclude sizes which the others and those that are `known` don't, the plainest.

    One on more dims than can be looked at stays.
    """
    kept = sorted(conditions, key=lambda each: (sympy.count_ops(each), str(each)))
    for condition in reversed(kept[:]):
        others = [*known, *(each for each in kept if each is not condition)]
        points = _points(symbols_of(condition), others, dims)
        if points is None:
            continue
        failing = (at for at in points if not _holds(condition, at))
        if not any(all(_holds(other, at) for other in others) for at in failing):
            kept.remove(condition)
    return kept


def _points(
    names: frozenset[str], others: Iterable[Condition], dims: Mapping[str, DimInfo]
) -> list[_Point] | None:
    """Sizes to look at, of all dims of a condition and of those that it is compared with."""
    wanted = names.union(*(symbols_of(o) for o in others if symbols_of(o) & names))
    if not wanted <= dims.keys() or len(wanted) not in {1, *_TOGETHER}:
        return None
    each = []
    for info in (dims[name] for name in sorted(wanted)):
        steps = _TOGETHER.get(len(wanted), ())
        each.append(_within(info, (info.low + step for step in steps)) if steps else _sizes(info))
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
