"""The sizes that a compiled model is right for: a range for each dim, and what relates dims."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy

from attngraph.errors import IRError, UsageError
from attngraph.ir.conditions import Condition, format_condition, parse_condition, shown
from attngraph.ir.derived_axes import DerivedAxis, derived_axes
from attngraph.ir.dims import DimInfo, symbol, symbols_of
from attngraph.ir.graph import Graph
from attngraph.metadata import json_object

RANGES_KEY = "attngraph.ranges"
"""Under which a file's metadata has them."""
GUARD_PREFIX = "sizes must have "
"""How the name begins of the node that fails in a file for any other sizes."""
_FUNCTIONS = {
    "min": min,
    "max": max,
    "abs": abs,
    "float": float,
    "round": round,
    "math": math,
    "__builtins__": {},
}


@dataclass(frozen=True)
class Ranges:
    """`dims` has the least and the largest size of each dim of the inputs, None for no limit.

    `relations` are the conditions beside them, such as past + seq ≤ 12. `axes` of inputs have
    sizes that are made of a dim, such as 8*c.
    """

    dims: Mapping[str, tuple[int, int | None]]
    relations: tuple[Condition, ...] = ()
    axes: tuple[DerivedAxis, ...] = ()

    @classmethod
    def of(cls, graph: Graph) -> Ranges:
        """The ranges of a graph's inputs. A low end of 2 is torch.export's own, and counts as 1."""
        used = dict.fromkeys(
            name
            for value in graph.inputs
            for dim in value.shape
            for name in sorted(symbols_of(dim))
        )
        dims = {name: _bounds(graph.dims[name]) for name in used if name in graph.dims}
        known = [c for c in graph.conditions if symbols_of(c) <= dims.keys()]
        return cls(dims, tuple(known), tuple(derived_axes(graph)))

    def limits(self) -> Iterator[Condition]:
        """What is required of dims, as conditions; that no size is below 1 goes without."""
        for name, (low, high) in self.dims.items():
            if high is not None:
                yield sympy.Le(symbol(name), high)
            if low > 1:
                yield sympy.Ge(symbol(name), low)
        yield from self.relations

    def broken(self, sizes: Mapping[str, int]) -> str:
        """The first requirement that these sizes break, for people; empty if there is none.

        What depends on a dim whose size isn't given is not asked.
        """
        for name, size in sizes.items():
            low, high = self.dims.get(name, (0, None))
            if size < low or (high is not None and size > high):
                return f"{name} {'≥' if size < low else '≤'} {low if size < low else high}"
        for relation, names, holds in self._checks:
            if not all(name in sizes for name in names):
                continue
            try:
                if holds(*(sizes[name] for name in names)):
                    continue
            except ZeroDivisionError:  # n % (n - 2), which the model can't compute at n = 2
                pass
            return shown(relation)
        return ""

    @cached_property
    def _checks(self) -> list[tuple[Condition, tuple[str, ...], Callable[..., bool]]]:
        found = []
        for relation in self.relations:
            names = tuple(sorted(symbols_of(relation)))
            places = {symbol(name): symbol(f"_n{at}") for at, name in enumerate(names)}
            # What is evaluated is printed from the parsed condition, so a file can't bring code.
            text = format_condition(relation.xreplace(places))
            arguments = ", ".join(map(str, places.values()))
            found.append((relation, names, eval(f"lambda {arguments}: {text}", _FUNCTIONS)))
        return found

    def to_json(self) -> str:
        said: dict[str, Any] = {
            "dims": {name: list(bounds) for name, bounds in self.dims.items()},
            "relations": [format_condition(relation) for relation in self.relations],
        }
        if self.axes:
            said["axes"] = [axis.to_json() for axis in self.axes]
        return json.dumps(said, sort_keys=True)

    @classmethod
    def of_file(cls, metadata: Mapping[str, str], path: object) -> Ranges:
        """The ranges that a file states; none where another tool made it. Raises UsageError."""
        if RANGES_KEY not in metadata:
            return cls({})
        try:
            return cls.from_json(metadata[RANGES_KEY])
        except IRError as error:
            raise UsageError(
                f"{path} was changed, or made by another attngraph: the ranges of its dims can't "
                "be read. Optimize the model again."
            ) from error

    @classmethod
    def from_json(cls, text: str) -> Ranges:
        """Raises IRError for a text that `to_json` didn't write."""
        try:
            said = json_object(text)
            dims = {str(name): (int(low), high) for name, (low, high) in said["dims"].items()}
            if any(high is not None and not isinstance(high, int) for _, high in dims.values()):
                raise ValueError
            relations = tuple(map(parse_condition, said["relations"]))
            return cls(dims, relations, tuple(map(DerivedAxis.from_json, said.get("axes", []))))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise IRError("The ranges of its dims can't be read.") from error


UNLIMITED = Ranges({})
"""The ranges of which nothing is known."""


def _bounds(info: DimInfo) -> tuple[int, int | None]:
    return 1 if info.low == 2 else info.low, info.high
