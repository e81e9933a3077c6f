"""The inputs that parity is checked on, made from the model's sample: other sizes, other values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from attngraph.checks.probing import Draw, contrasting_draws, drawn, draws_of, sizes_for
from attngraph.checks.roles import Role, bounds_of, roles_of, without_masks
from attngraph.checks.sizes import (
    choose_sizes,
    equal_sizes,
    filled_integers,
    is_counting,
    lowered_integers,
    resized_inputs,
    summed_integers,
)
from attngraph.frontend.capture import Captured
from attngraph.ir import Graph, TensorType
from attngraph.ir.dims import substitute, symbol, symbols_of
from attngraph.ir.ranges import Ranges
from attngraph.ir.traits import LARGEST, SORTED

_TIMES, _SHORT = 16, 128  # the sizes that are tried for what a quotient does: as often, or up to
_MOST_WORK = 1 << 36
"""Multiplications in one run above which no inputs are drawn that hide whole rows."""


@dataclass(frozen=True)
class Drawn:
    """Inputs of the checker's own; of each `kind` one set that the model takes is enough.

    `make` raises where a dtype has no such values.
    """

    label: str
    kind: tuple[bool, bool | None, bool, bool]
    make: Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class _Derived:
    """An axis of an input that is `factor` · a dim + `offset`."""

    index: int
    axis: int
    name: str
    factor: int
    offset: int


@dataclass(frozen=True)
class Integers:
    """What becomes of a sample's integers at other sizes.

    They stay in their columns unless they are `turned`. Where they are `lowered`, the largest are
    less by as much as the axes are shorter, as places and lengths along these have to be. Where
    they are `ended`, rows keep their last ones. Where they are `filled`, the largest are the size
    of the dim whose size they are in the sample, as the longest of some lengths may have to be.
    Where they are `summed`, their sum is, as that of the lengths of packed sequences has to be.
    """

    turned: bool = True
    lowered: bool = False
    ended: bool = False
    filled: bool = False
    summed: bool = False


class SampleInputs:
    """Inputs of a captured model, in the order of the graph's. Nothing is run here.

    `pristine` is the graph as it was captured; passes rewrite the other one. `tied` maps a dim to
    one whose size it is to have, and `integers` says what becomes of the sample's.
    """

    def __init__(self, captured: Captured, pristine: Graph) -> None:
        self.captured = captured
        self.tied: dict[str, str] = {}
        self.integers = Integers()
        self._pristine = pristine
        self._bounds = bounds_of(pristine)
        self._is_sorted = any(node.op in SORTED | LARGEST for node in pristine)
        self._derived = list(_derived(pristine, captured.dynamic.values()))

    @property
    def limits(self) -> Ranges:
        """The sizes that the captured graph is right for."""
        return Ranges.of(self.captured.graph)

    def sizes(self) -> list[dict[str, int]]:
        """The sample's sizes, up to two more, and one that the graph divides into several parts."""
        sample = self.sizes_of(self.captured.args)
        if not sample:
            return [{}]
        limits = self.limits

        def allowed(sizes: Mapping[str, int]) -> bool:
            return not limits.broken(sizes)

        others = choose_sizes(sample, self._ranges(sample), allowed)
        found = [sample, *map(self._together, others)]
        if (several := self._several(found)) and allowed(several):
            found.append(several)
        return [sizes for place, sizes in enumerate(found) if sizes not in found[:place]]

    def _several(self, found: Sequence[dict[str, int]]) -> dict[str, int]:
        """Sizes at which the quotients are 2 or more that are less at all of those, as far as the
        ranges and the time for longer runs allow: one block of 32 tokens shows nothing of what is
        done with blocks. Empty if there are none.
        """
        smallest = min(found, key=lambda each: math.prod(each.values()))
        sizes = dict(smallest)
        ranges, before = self._ranges(sizes), dict(sizes)
        for quotient in _quotients(self.captured.graph):
            (name,) = symbols_of(quotient)
            if name not in sizes or any(_at(quotient, each) > 1 for each in (*found, sizes)):
                continue
            longest = max(_TIMES * sizes[name], _SHORT)
            most, tried = min(ranges[name][1] or longest, longest), dict(sizes)
            while tried[name] < most and _at(quotient, tried) < 2:
                tried[name] = min(2 * tried[name] + 1, most)
            sizes = sizes if _at(quotient, tried) < 2 else tried  # no long run that shows nothing
        return self._together(sizes) if sizes != before else {}

    def equal_sizes(self) -> list[dict[str, int]]:
        """Dims that the trace took for unequal, given one size: Python may have asked for that."""
        sample, *_ = self.sizes()
        apart = [pair for pair in self.captured.apart if sample.keys() >= set(pair)]
        sizes = equal_sizes(sample, self._ranges(sample), apart)
        return [] if sizes == sample or self.limits.broken(sizes) else [sizes]

    def is_costly(self, weights: int) -> bool:
        """Whether a run of the sample, with that many weights, is too long to draw hidden rows."""
        tokens = max((tensor.shape[:2].numel() for tensor in self.captured.args), default=1)
        return weights * tokens > _MOST_WORK

    def draws(self, *, hides_rows: bool) -> Iterator[Drawn]:
        """Other values, the preferred first."""
        captured = self.captured
        sample, *_ = self.sizes()
        rows = [name for (_, axis), name in captured.dynamic.items() if axis == 0]
        batch = max(rows, key=rows.count, default=None)
        roles = roles_of(self._pristine, captured.args)
        if not hides_rows:  # a mask may leave a row without keys where the code masks as well
            roles = without_masks(roles)
        for draw in draws_of(roles, captured.args, constant=bool(captured.branches)):
            if draw.hides_rows and not hides_rows:
                continue
            sizes = self._together(sizes_for(draw, sample, self._pristine.dims, batch))
            if self.limits.broken(sizes):
                sizes = sample
            make = partial(self._drawn, draw, roles, sizes)
            kind = draw.hides_rows, draw.constant, draw.padded, draw.turned
            yield Drawn(f"{label_of(sizes)}, {draw.label}", kind, make)

    def contrasts(self, tensors: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Other values at the sizes of `tensors`, on which two sides of a choice may differ."""
        args = self.captured.args
        roles = roles_of(self._pristine, args)
        for draw in contrasting_draws(roles, args):
            with contextlib.suppress(RuntimeError, TypeError, ValueError):  # no such values
                yield drawn(draw, roles, args, tensors)

    def sizes_of(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """The size of each dynamic dim, of one that no axis has itself from a multiple of it."""
        dynamic = self.captured.dynamic.items()
        found = {name: int(tensors[index].shape[axis]) for (index, axis), name in dynamic}
        for each in self._derived:
            size = int(tensors[each.index].shape[each.axis])
            found[each.name] = (size - each.offset) // each.factor
        return found

    def at(self, sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
        """The sample's inputs at these sizes; an axis that is derived from them follows."""
        dynamic, known = dict(self.captured.dynamic), dict(sizes)
        for index, value in enumerate(self.captured.graph.inputs):
            for axis, dim in enumerate(value.shape):
                is_derived = not isinstance(dim, int) and (index, axis) not in dynamic
                if is_derived and symbols_of(dim) <= sizes.keys():
                    dynamic[index, axis] = str(dim)
                    known[str(dim)] = substitute(dim, sizes)
        resized = resized_inputs(
            self.captured.args,
            dynamic,
            known,
            turned=self.integers.turned,
            ended=self.integers.ended,
            untied=self._is_sorted,
        )
        if self.integers.lowered:
            sample = self.sizes_of(self.captured.args)
            shorter = max((sample[name] - sizes[name] for name in sample), default=0)
            resized = tuple(lowered_integers(tensor, shorter) for tensor in resized)
        if self.integers.filled:
            filled = self.filled()
            resized = tuple(
                filled_integers(tensor, sizes[filled[place]]) if place in filled else tensor
                for place, tensor in enumerate(resized)
            )
        if self.integers.summed:
            summed = self.summed()
            resized = tuple(
                summed_integers(tensor, sizes[summed[place]]) if place in summed else tensor
                for place, tensor in enumerate(resized)
            )
        below = {
            place: substitute(size, sizes)
            for place, size in self._bounds.items()
            if symbols_of(size) <= sizes.keys()
        }
        return tuple(
            tensor % below[place] if below.get(place, 0) > 0 else tensor
            for place, tensor in enumerate(resized)
        )

    def filled(self) -> dict[int, str]:
        """The dim whose size an input's largest integer is in the sample, by the input's place."""
        return self._counted(lambda tensor: int(tensor.max()))

    def summed(self) -> dict[int, str]:
        """The dim whose size the sum of an input (N,) is in the sample, by the input's place."""
        return self._counted(lambda tensor: int(tensor.sum()) if tensor.dim() == 1 else 0)

    def _counted(self, count: Callable[[torch.Tensor], int]) -> dict[int, str]:
        """The dim whose size a number of an input's integers is in the sample."""
        sizes = self.sizes_of(self.captured.args)
        found: dict[int, str] = {}
        for place, tensor in enumerate(self.captured.args):
            if is_counting(tensor):
                number = count(tensor)
                names = [name for name, size in sizes.items() if size == number]
                found |= {place: names[0]} if len(names) == 1 and number > 1 else {}
        return found

    def _together(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes with tied dims equal, as far as the ranges allow."""
        tied = {name: sizes[self.tied.get(name, name)] for name in sizes}
        return dict(sizes) if self.limits.broken(tied) else tied

    def _drawn(
        self, draw: Draw, roles: Sequence[Role], sizes: Mapping[str, int]
    ) -> tuple[torch.Tensor, ...]:
        return drawn(draw, roles, self.captured.args, self.at(sizes))

    def _ranges(self, sample: Mapping[str, int]) -> dict[str, tuple[int, int | None]]:
        dims = self.captured.graph.dims
        return {name: (dims[name].low, dims[name].high) for name in sample}


def _derived(graph: Graph, named: Iterable[str]) -> Iterator[_Derived]:
    """For each dim that is no input's axis itself, one that is a multiple of it: 32 · h."""
    known = {*named}
    for index, value in enumerate(graph.inputs):
        for axis, dim in enumerate(value.shape):
            names = symbols_of(dim) - known
            if len(names) != 1 or symbols_of(dim) != names:
                continue
            (name,) = names
            size = sympy.expand(dim)
            factor = size.coeff(symbol(name))
            offset = size - factor * symbol(name)
            if factor.is_Integer and factor > 0 and offset.is_Integer:
                known.add(name)
                yield _Derived(index, axis, name, int(factor), int(offset))


def _quotients(graph: Graph) -> list[sympy.Expr]:
    """The quotients of one dim among the sizes of a graph's values."""
    types = (value.type for node in graph for value in node.outputs)
    shapes = (each.shape for each in types if isinstance(each, TensorType))
    found = {
        quotient
        for dim in set(chain.from_iterable(shapes))
        if isinstance(dim, sympy.Expr)
        for quotient in dim.atoms(FloorDiv)
        if len(symbols_of(quotient)) == 1
    }
    return sorted(found, key=str)


def _at(quotient: sympy.Expr, sizes: Mapping[str, int]) -> int:
    return int(substitute(quotient, dict(sizes)))


def label_of(sizes: Mapping[str, int]) -> str:
    """`batch=2, seq=8`."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "sample"
