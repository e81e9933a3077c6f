"""Sizes at which every branch of an `If` and every number of steps of a loop is run.

A condition is a function of the dims' sizes, so the smallest size that enters a branch is looked
for: one dim after the other over its range, the others as small as they may be, then two at once,
and so on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import onnx_ir
import sympy

from attngraph.checks.if_conditions import conditions_of
from attngraph.ir import Graph, TensorType
from attngraph.ir.dims import DimInfo, product, substitute, symbol, symbols_of
from attngraph.ir.ranges import UNLIMITED, Ranges
from attngraph.ir.traits import ATTENTION

_LONGEST = 1 << 14
"""The largest size that is looked at."""
_MOST_ELEMENTS = 1 << 23
"""The largest square of a dim, times the other dims, that is run."""
_MOST_HELD = 1 << 26
"""The most elements of one value that is run; a check holds several such values, in float64."""
_COMBINED = 6
"""The most dims of which all combinations are looked at."""
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Goal:
    """An outcome that some case has to produce: `outcome` maps sizes, one array for each dim, to an
    array of integers, or None where sizes don't decide it; `wanted` are those to be seen.
    """

    name: str
    outcome: Callable[[Mapping[str, Any]], Any | None]
    wanted: tuple[int, ...]


@dataclass(frozen=True)
class Reached:
    """The sizes to add to the cases, and a sentence on each branch that they don't enter."""

    sizes: list[dict[str, int]]
    notes: list[str]


def goals_of(graph: Graph, model: onnx_ir.Model, names: Mapping[str, str]) -> list[Goal]:
    """Both branches of every `If` of the file, and one and two steps of every loop of the graph.

    `names` maps the file's inputs to those of `graph`.
    """
    shapes = {value.name: value.shape for value in graph.inputs}
    symbols = {dim: symbols_of(dim) for shape in shapes.values() for dim in shape}

    def of_dims(sizes: Mapping[str, Any]) -> dict[str, list[Any]]:
        return {
            taken: [_at(dim, sizes) if symbols[dim] <= sizes.keys() else -1 for dim in shapes[name]]
            for taken, name in names.items()
            if name in shapes
        }

    goals = []
    for condition in conditions_of(model):

        def asked(sizes: Mapping[str, Any], holds: Any = condition.holds) -> Any | None:
            found = holds(of_dims(sizes))
            return None if found is None else found.astype(int)

        goals.append(Goal(f"the If {condition.name}", asked, (0, 1)))
    for steps in dict.fromkeys(_loops(graph)):

        def counted(sizes: Mapping[str, Any], steps: Any = steps) -> Any | None:
            if not symbols_of(steps) <= sizes.keys():
                return None
            return numpy.minimum(_at(steps, sizes), 2)

        if symbols_of(steps):
            low = 0 if all(graph.dims[name].low == 0 for name in symbols_of(steps)) else 1
            goals.append(Goal(f"the loop over {steps}", counted, (*range(low, 2), 2)))
    return goals


def _loops(graph: Graph) -> Iterator[Any]:
    for node in graph:
        if node.op == "attn.scan" and node.attrs["scanned"]:
            scanned = node.inputs[node.attrs["carried"]]
            if scanned is not None and isinstance(scanned.type, TensorType):
                yield scanned.shape[0]


def largest_value(graph: Graph) -> Callable[[Sizes], int]:
    """The elements of a graph's largest value at given sizes, which name each dim of its inputs.

    The scores of an attention, (B, H, S, T), count as one: the model computes them.
    """
    counts = dict.fromkeys(
        sympy.sympify(product(value.shape))
        for node in graph
        for value in node.outputs
        if isinstance(value.type, TensorType)
    )
    for node in graph:
        query, key = node.inputs[:2] if node.op in ATTENTION else (None, None)
        if query is not None and key is not None and len(query.shape) == 3:
            scores = [query.shape[0], node.attrs["heads"], query.shape[1], key.shape[1]]
            counts[sympy.sympify(product(scores))] = None

    def largest(sizes: Sizes) -> int:
        known = [count for count in counts if symbols_of(count) <= sizes.keys()]
        return max((int(substitute(count, sizes)) for count in known), default=0)

    return largest


def _at(dim: Any, sizes: Mapping[str, Any]) -> Any:
    """A dim at sizes that are integers or arrays of them."""
    names = sorted(symbols_of(dim))
    if not names:
        return dim
    if len(names) == 1 and str(dim) == names[0]:
        return sizes[names[0]]
    if dim.is_polynomial() and all(number.is_Integer for number in dim.atoms(sympy.Number)):
        of_sizes = sympy.lambdify([symbol(name) for name in names], dim, "numpy")
        return of_sizes(*(sizes[name] for name in names))
    columns = numpy.broadcast_arrays(*(numpy.atleast_1d(sizes[name]) for name in names))
    rows = zip(*(column.tolist() for column in columns), strict=True)
    found = [int(substitute(dim, dict(zip(names, row, strict=True)))) for row in rows]
    return numpy.array(found)


def reach(
    goals: Sequence[Goal],
    known: Sequence[Sizes],
    dims: Mapping[str, DimInfo],
    limits: Ranges = UNLIMITED,
    largest: Callable[[Sizes], int] = lambda sizes: 0,
) -> Reached:
    """The smallest sizes within the limits that produce what the `known` ones don't.

    `largest` says how many elements the model's largest value has at some sizes.
    """
    found: list[dict[str, int]] = []
    notes: list[str] = []
    names = list(dict.fromkeys(name for sizes in known for name in sizes))
    least = {name: max(_low(dims[name]), 1) for name in names}
    for goal in goals:
        seen: set[int] = set()
        for sizes in (*known, *found):
            outcome = goal.outcome(sizes)
            if outcome is not None:
                seen.update(numpy.atleast_1d(outcome).tolist())
        if not seen:
            notes.append(f"Which sizes decide {goal.name} is not known, so a branch may not run.")
            continue
        for wanted in goal.wanted:
            if wanted in seen:
                continue
            chosen = _smallest(goal, wanted, least, dims, limits)
            if chosen is None:
                continue  # no size in the range enters it
            if _too_large(chosen) or largest(chosen) > _MOST_HELD:
                said = ", ".join(f"{name}={size}" for name, size in chosen.items())
                notes.append(
                    f"A branch of {goal.name} was not run: it takes {said}, which is too large to "
                    "try. Compile with a smaller range to leave it out."
                )
            else:
                found.append(chosen)
                seen.add(wanted)
    return Reached(found, notes)


def _smallest(
    goal: Goal,
    wanted: int,
    least: Mapping[str, int],
    dims: Mapping[str, DimInfo],
    limits: Ranges,
) -> dict[str, int] | None:
    best: dict[str, int] | None = None
    together = 0
    counts = range(1, len(least) + 1) if len(least) <= _COMBINED else (1, len(least))
    for varied in itertools.chain.from_iterable(
        itertools.combinations(least, count) for count in counts
    ):
        if best is not None and len(varied) > together:
            break
        low = max(_low(dims[name]) for name in varied)
        highs = [dims[name].high for name in varied]
        high = min([_LONGEST, *(high for high in highs if high is not None)])
        span = numpy.arange(low, high + 1)
        if not len(span):
            continue
        sizes: dict[str, Any] = {**least, **dict.fromkeys(varied, span)}
        outcome = goal.outcome(sizes)
        if outcome is None:
            continue
        (places,) = numpy.nonzero(numpy.broadcast_to(outcome, span.shape) == wanted)
        sized = (
            {name: int(span[place]) if name in varied else least[name] for name in least}
            for place in places
        )
        chosen = next((sizes for sizes in sized if not limits.broken(sizes)), None)
        if chosen is not None and (best is None or sum(chosen.values()) < sum(best.values())):
            best, together = chosen, len(varied)
    return best


def _low(info: DimInfo) -> int:
    """A lower bound of 2 is torch.export's own, not the model's."""
    return 1 if info.low == 2 else info.low


def _too_large(sizes: Sizes) -> bool:
    longest = max(sizes.values(), default=1)
    return longest * math.prod(max(size, 1) for size in sizes.values()) > _MOST_ELEMENTS
