"""Axes of inputs whose sizes are made of a dim, such as 8*c: which sizes those are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy

from attngraph.errors import IRError
from attngraph.ir.dims import format_dim, parse_dim, shown_dim, symbol
from attngraph.ir.graph import Graph


@dataclass(frozen=True)
class DerivedAxis:
    """An axis of the input `name` has `times` · dim + `plus` elements, and no other number."""

    name: str
    axis: int
    dim: str
    times: int
    plus: int

    @property
    def size(self) -> sympy.Expr:
        return self.times * symbol(self.dim) + self.plus

    @property
    def told(self) -> str:
        """For people: `x.shape[1] = 8*c`."""
        return f"{self.name}.shape[{self.axis}] = {shown_dim(self.size)}"

    @property
    def taken(self) -> str:
        """For people, the sizes that it takes: `multiples of 8`."""
        return f"sizes {shown_dim(self.size)}" if self.plus else f"multiples of {self.times}"

    def at(self, size: int) -> int | None:
        """The size of the dim where this one has that size; None where it can't have that."""
        whole, rest = divmod(size - self.plus, self.times)
        return None if rest else whole

    def to_json(self) -> list[Any]:
        return [self.name, self.axis, format_dim(self.size)]

    @classmethod
    def from_json(cls, said: list[Any]) -> DerivedAxis:
        """Raises IRError, ValueError or TypeError for what `to_json` didn't write."""
        name, axis, text = said
        found = _of(str(name), int(axis), parse_dim(text))
        if found is None:
            raise IRError(f"{text} is not the size of a derived axis.")
        return found


def derived_axes(graph: Graph) -> Iterator[DerivedAxis]:
    """The axes of inputs whose size not every number can be."""
    dims = [dim for value in graph.inputs for dim in value.shape]
    for value in graph.inputs:
        for axis, dim in enumerate(value.shape):
            found = _of(value.name, axis, dim)
            if found is None:
                continue
            others = [each for each in dims if each != dim and _names(each, found.dim)]
            if found.times > 1 or others:
                yield found


def _names(dim: Any, name: str) -> bool:
    """Whether that dim is read from an axis of this size, as one of a single dim is."""
    return isinstance(dim, sympy.Expr) and dim.free_symbols == {symbol(name)}


def _of(name: str, axis: int, dim: Any) -> DerivedAxis | None:
    """An axis that is a multiple of one dim, plus a number; None for any other, and a dim alone."""
    if not isinstance(dim, sympy.Expr) or dim.is_Symbol or len(dim.free_symbols) != 1:
        return None
    (root,) = dim.free_symbols
    plus, rest = sympy.expand(dim).as_coeff_Add()
    times, alone = rest.as_coeff_Mul()
    if alone != root or not (times.is_Integer and times > 0 and plus.is_Integer):
        return None
    return DerivedAxis(name, axis, str(root), int(times), int(plus))
