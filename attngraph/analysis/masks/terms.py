"""Takes a bias apart into masks (0 or a fill) and the terms that stay added.

The terms that stay keep their order and their rounding: what is left is the same ops, without the
masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from attngraph.analysis.layout.index_maps import Index, aligned, source_index
from attngraph.analysis.masks.choices import Choice
from attngraph.analysis.masks.predicates import Predicate, negation
from attngraph.analysis.masks.reading import Reader
from attngraph.analysis.masks.row_policy import ABSORBING_FILL
from attngraph.analysis.values.intervals import Intervals
from attngraph.analysis.values.scalars import converted, fill_of, is_cast
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute

_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Fill:
    """A term that is 0 where the predicate holds, and `number` elsewhere; `source` computes it."""

    predicate: Predicate
    number: float
    source: Value


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of `value`: its op over what is left of its inputs; one input: that itself."""

    value: Value
    inputs: tuple[Tree, ...]
    same_op: bool = True


Tree: TypeAlias = Value | Rest | None


@dataclass
class Split:
    """The masks found in a bias and what is left: the value itself where nothing was taken."""

    fills: list[Fill] = field(default_factory=list)
    rest: Tree = None


class Splitter:
    """Splits biases; `inner` are the values it looked into."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.inner: set[Value] = set()
        self._memory: dict[tuple[Value, Index, frozenset[Value] | None], Split] = {}
        self._depth = 0

    def split(self, value: Value, index: Index, taken: frozenset[Value] | None = None) -> Split:
        """The fills of `value` whose source is in `taken` (None: all), and what is left."""
        key = (value, index, taken)
        if key not in self._memory:
            self._depth += 1
            self._memory[key] = self._split(value, index, taken)
            self._depth -= 1
        return self._memory[key]

    def _split(self, value: Value, index: Index, taken: frozenset[Value] | None) -> Split:
        self.inner.add(value)
        reading = self.reader.read(value, index)
        if isinstance(reading, Choice):
            return self._leaf(value, reading, taken)
        node = value.producer
        if node is None or self._depth > _DEPTH:
            return self._kept(value)
        if node.op == "aten.add.Tensor" and attribute(node, "alpha") == 1:
            return self._sum(node, value, index, taken)
        if (filled := self._filled(node, value, index, taken)) is not None:
            return filled
        if is_cast(node) and len(node.inputs) == 1 and value.dtype.is_floating_point:
            above: tuple[Value, Index] | None = (node.inputs[0], index) if node.inputs[0] else None
        else:
            above = source_index(value, index, self.reader.domain)
        if above is None or len(node.outputs) != 1 or not above[0].dtype.is_floating_point:
            return self._kept(value)
        inner = self.split(*above, taken)
        fills = [replace(f, number=converted(f.number, value.dtype)) for f in inner.fills]
        if inner.rest is above[0]:
            return Split(fills, value)
        return Split(fills, None if inner.rest is None else Rest(value, (inner.rest,)))

    def _kept(self, value: Value) -> Split:
        self.inner.discard(value)
        return Split([], value)

    def _leaf(self, value: Value, reading: Choice, taken: frozenset[Value] | None) -> Split:
        if reading.constant == 0:
            return Split([], None)
        fill: Fill | None = None
        if reading.no == 0 and reading.yes <= ABSORBING_FILL:
            fill = Fill(negation(reading.predicate), reading.yes, value)
        elif reading.yes == 0 and reading.no <= ABSORBING_FILL:
            fill = Fill(reading.predicate, reading.no, value)
        if fill is None or (taken is not None and value not in taken):
            return Split([], value)
        return Split([fill], None)

    def _sum(self, node: Node, value: Value, index: Index, taken: frozenset[Value] | None) -> Split:
        left, right = node.operands
        if not (left.dtype.is_floating_point and right.dtype.is_floating_point):
            return self._kept(value)
        sides = [self.split(side, aligned(side, index), taken) for side in (left, right)]
        fills = [
            replace(fill, number=converted(fill.number, value.dtype))
            for side in sides
            for fill in side.fills
        ]
        rests = [side.rest for side in sides if side.rest is not None]
        if rests == [left, right]:
            return Split(fills, value)
        if not rests:
            return Split(fills, None)
        return Split(fills, Rest(value, tuple(rests), same_op=len(rests) == 2))

    def _filled(
        self, node: Node, value: Value, index: Index, taken: frozenset[Value] | None
    ) -> Split | None:
        """where(mask, x, fill): x stays, plus a mask."""
        found = fill_of(node)
        if found is None:
            return None
        source, predicate, keep, fill = found
        fill = converted(fill, value.dtype)
        if not fill <= ABSORBING_FILL or not source.dtype.is_floating_point:
            return None
        if taken is not None and value not in taken:
            return self._kept(value)
        inner = self.split(source, aligned(source, index), taken)
        if inner.fills:  # the outer fill replaces the inner one: not a sum
            return self._kept(value)
        held = self.reader.predicate(predicate, aligned(predicate, index))
        kept = held if keep else negation(held)
        rest = None if inner.rest is None else Rest(value, (inner.rest,), same_op=False)
        return Split([Fill(kept, fill, value)], rest)


def leaves(tree: Tree) -> Iterator[Value]:
    """The values that stay as they were."""
    if isinstance(tree, Rest):
        for item in tree.inputs:
            yield from leaves(item)
    elif tree is not None:
        yield tree


def magnitude(tree: Tree) -> float:
    """A bound of |x| over all elements; inf where none is proved (it may hold -inf)."""
    if tree is None:
        return 0.0
    if isinstance(tree, Rest):
        bound = sum(magnitude(item) for item in tree.inputs)
        return bound if bound <= torch.finfo(tree.value.dtype).max else math.inf
    return Intervals().largest(tree)
