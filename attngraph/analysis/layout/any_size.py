"""Sizes as unknowns that are solved as it turns out which go together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy

from attngraph.ir import Dim, DimInfo
from attngraph.ir.dims import as_dim, product, rewritten, symbol, symbols_of

_LEAST = 16  # sizes up to which an axis keeps its own
_PRIMES = (1000003, 1000033, 1000037, 1000039, 1000081, 1000099, 1000117, 1000121)


class Sizes:
    """Unknowns for large sizes. Each remembers the number that it stands for, so that what can't be
    solved becomes that number again (`pin`): the numbers always are one solution.

    Dims that the graph itself has stay as they are; beside numbers, each counts as a prime.
    """

    def __init__(self, dims: Iterable[str]) -> None:
        names = sorted(dims)
        self._rigid = {
            name: _PRIMES[place % len(_PRIMES)] + 2 * (place // len(_PRIMES))
            for place, name in enumerate(names)
        }
        self._numbers: dict[str, int] = {}
        self._solved: dict[str, Dim] = {}
        self._factors: dict[Dim, tuple[Dim, ...]] = {}

    def fresh(self, size: Dim) -> Dim:
        """An unknown in the place of a large size; others stay."""
        if not isinstance(size, int) or size <= _LEAST:
            return size
        name = f"any.{len(self._numbers)}"
        self._numbers[name] = size
        return symbol(name)

    @property
    def unknowns(self) -> list[str]:
        """The names of the unknowns that nothing determines."""
        return [name for name in self._numbers if name not in self._solved]

    def infos(self, least: int) -> dict[str, DimInfo]:
        """The unknowns as dims, from `least` on."""
        return {name: DimInfo(low=least, high=self._numbers[name]) for name in self.unknowns}

    def resolved(self, value: Any) -> Any:
        """A size, shape or attribute without the unknowns that are solved."""
        while not symbols_of(value).isdisjoint(self._solved):
            value = rewritten(value, self._solved)
        return value

    def number(self, dim: Dim) -> int:
        """What the size is in the graph as it stands."""
        dim = self.resolved(dim)
        known: Mapping[str, int] = {**self._rigid, **self._numbers}
        return int(rewritten(dim, known)) if not isinstance(dim, int) else dim

    def unify(self, first: Dim, second: Dim) -> Dim:
        """Makes two sizes one, which they are in the graph as it stands."""
        first, second = self.resolved(first), self.resolved(second)
        if first == second:
            return first
        if isinstance(first, int) or isinstance(second, int):
            self.pin([first, second])
            return self.resolved(first)
        difference = sympy.expand(sympy.sympify(first) - sympy.sympify(second))
        for name in sorted(symbols_of(difference) & self._numbers.keys()):
            slope = difference.coeff(symbol(name))
            rest = sympy.expand(difference - slope * symbol(name))
            if slope in (1, -1) and name not in symbols_of(rest):
                found = as_dim(sympy.expand(-slope * rest))
                if self.number(found) == self._numbers[name]:
                    self._solved[name] = found
                    return self.resolved(first)
        if difference != 0:
            self.pin([first, second])
        return self.resolved(first)

    def pin(self, sizes: Any) -> None:
        """Gives every unknown of some sizes its number."""
        for name in symbols_of(self.resolved(sizes)) & self._numbers.keys():
            self._solved[name] = self._numbers[name]

    def regrouped(self, inner: Sequence[Dim], outer: Sequence[Dim]) -> tuple[Dim, ...]:
        """The sizes after a row-major reshape; `outer` are those in the graph as it stands."""
        result: list[Dim] = []
        left, right = list(inner), list(outer)
        while left or right:
            taken, given = [left.pop(0)] if left else [], [right.pop(0)] if right else []
            while (here := self._count(taken)) != (there := self._count(given)):
                if here < there and left:
                    taken.append(left.pop(0))
                elif right:
                    given.append(right.pop(0))
                else:  # a size of 1 has no part in any group
                    taken += left
                    left = []
                    break
            result += self._group(taken, given)
        return tuple(result)

    def joined(self, parts: Sequence[Dim]) -> Dim:
        """The size of an axis of these parts, into which a reshape may cut it again."""
        merged = product(parts)
        if merged not in parts:
            self._factors[merged] = tuple(parts)
        return merged

    def _count(self, dims: Iterable[Dim]) -> int:
        count = 1
        for dim in dims:
            count *= self.number(dim)
        return count

    def _group(self, taken: Sequence[Dim], given: Sequence[Dim]) -> list[Dim]:
        if len(taken) == len(given) == 1:
            return list(taken)
        queue = [factor for dim in taken for factor in self._split(dim)]
        result: list[Dim] = []
        for dim in given:
            need, parts = self.number(dim), list[Dim]()
            while need != 1:
                if not queue:
                    return self._given_up(taken, given)
                factor = queue.pop(0)
                size = self.number(factor)
                if need % size == 0:
                    parts.append(factor)
                    need //= size
                    continue
                halves = self._halved(factor, need)
                if halves is None:
                    return self._given_up(taken, given)
                parts.append(halves[0])
                queue.insert(0, halves[1])
                need = 1
            result.append(self.joined(parts))
        return result if not [f for f in queue if f != 1] else self._given_up(taken, given)

    def _split(self, dim: Dim) -> list[Dim]:
        dim = self.resolved(dim)
        if dim in self._factors:
            parts = [self.resolved(factor) for factor in self._factors[dim]]
            if dim not in parts:
                return [part for factor in parts for part in self._split(factor)]
        return [dim]

    def _halved(self, factor: Dim, major: int) -> tuple[Dim, Dim] | None:
        """A factor as (major, minor)."""
        size = self.number(factor)
        if size % major:
            return None
        if isinstance(factor, int):
            return major, size // major
        if not isinstance(factor, sympy.Symbol) or factor.name not in self._numbers:
            return None
        halves = self.fresh(major), self.fresh(size // major)
        self._solved[factor.name] = whole = product(halves)
        self._factors[whole] = halves
        return halves

    def _given_up(self, taken: Sequence[Dim], given: Sequence[Dim]) -> list[Dim]:
        self.pin(list(taken))
        return list(given)
