"""Reads the features of one value as sums of products of elements of another and of tables.

Nothing is matched: a feature is followed upwards through cuts, concatenations, reshapes, products
with tables and matrix products, to the feature of x that it is a multiple of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from attngraph.analysis.layout.axes import Atom, Axes, Operand, fresh_axes, sides_of
from attngraph.analysis.layout.columns import Column, chosen, known, steps
from attngraph.analysis.layout.contraction import read_contraction
from attngraph.analysis.values.scalars import scale_of
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute
from attngraph.ir.traits import (
    ADDITIVE,
    INDEX,
    JOIN,
    LAYOUT,
    MATMUL,
    MULTIPLICATION,
    NEGATION,
    ROLL,
    SUM,
)

_CONTRACTIONS = MATMUL | SUM
_FACTORS = MULTIPLICATION | NEGATION
_READ = ADDITIVE | _FACTORS | _CONTRACTIONS | JOIN | LAYOUT | INDEX | ROLL
ANCHORS = ADDITIVE | JOIN
UNDER_RESHAPE = ANCHORS | _CONTRACTIONS
_REGION = 48


@dataclass(frozen=True, slots=True)
class Term:
    """`factor` · Π tables · x[source] at some places."""

    places: tuple[int, ...]
    factor: float
    tables: tuple[Operand, ...]
    source: Axes


class _Unread(Exception):
    """The region holds something else than products with x and sums of them."""


class Reading:
    """One attempt to read the `width` features of y as sums over those of x."""

    def __init__(self, y: Value, x: Value, width: int) -> None:
        self.y, self.x, self.width = y, x, width
        self.lead = fresh_axes(y.shape[:-1])
        self._depends: dict[Value, bool] = {x: True}
        self._steps = 0

    def depends(self, value: Value) -> bool:
        """Whether a value is made from x by readable ops."""
        if value not in self._depends:
            self._depends[value] = False
            node = value.producer
            if node is not None and node.op in _READ:
                sources = node.operands
                self._depends[value] = any(self.depends(source) for source in sources)
        return self._depends[value]

    def sums(self, most: int) -> list[Term] | None:
        """The terms of all features of y; None where one is something else than a sum of at most
        so many, as after a dense matrix.
        """
        if not self.depends(self.y):
            return None
        places = tuple(range(self.width))
        start = Operand(self.y, (*self.lead, (Column(self.width, places),)))
        counts, found = [0] * self.width, list[Term]()
        try:
            for term in self._terms(start, places):
                found.append(term)
                for place in term.places:
                    counts[place] += 1
                    if counts[place] > most:
                        return None
        except _Unread:
            return None
        return found

    def _terms(self, operand: Operand, places: tuple[int, ...]) -> Iterator[Term]:
        """The sum that each place of an operand that depends on x is."""
        self._steps += 1
        value, axes, count = operand.value, operand.axes, len(places)
        if value is self.x:
            yield Term(places, 1.0, (), axes)
            return
        node = value.producer
        if node is None or not self.depends(value) or self._steps > 64 * _REGION:
            raise _Unread
        if (scaling := scale_of(node)) is not None:
            for term in self._terms(Operand(scaling[0], axes), places):
                yield replace(term, factor=term.factor * scaling[1])
        elif node.op in ADDITIVE:
            alpha = attribute(node, "alpha")
            if not isinstance(alpha, (int, float)):
                raise _Unread
            sign = -float(alpha) if node.op == "aten.sub.Tensor" else float(alpha)
            for side, factor in zip(sides_of(node, axes), (1.0, sign), strict=True):
                for term in self._terms(side, places):
                    yield replace(term, factor=term.factor * factor)
        elif node.op == "aten.mul.Tensor":
            first, second = sides_of(node, axes)
            yield from self._product(first, second, places)
        elif (parts := steps(operand, count)) is not None:
            for part in parts:
                yield from self._terms(part.operand, tuple(places[at] for at in part.places))
        else:
            yield from self._contraction(node, axes, places)

    def _product(self, first: Operand, second: Operand, places: tuple[int, ...]) -> Iterator[Term]:
        if self.depends(first.value) == self.depends(second.value):
            raise _Unread
        mine, table = (first, second) if self.depends(first.value) else (second, first)
        position = {place: at for at, place in enumerate(places)}
        for term in self._terms(mine, places):
            kept = [position[place] for place in term.places]
            factor = Operand(table.value, chosen(table.axes, kept))
            yield replace(term, tables=(*term.tables, factor))

    def _contraction(self, node: Node, axes: Axes, places: tuple[int, ...]) -> Iterator[Term]:
        """A sum over few features, such as a product with a matrix of rotations."""
        contraction = read_contraction(node, axes) if node.op in _CONTRACTIONS else None
        if contraction is None or contraction.addends or contraction.factor != 1.0:
            raise _Unread
        sizes = [atom.size for atom in contraction.summed]
        if not all(isinstance(size, int) and size <= self.width for size in sizes):
            raise _Unread
        for index in product(*(range(int(size)) for size in sizes)):
            fixed = {
                atom: Atom(atom.size, at)
                for atom, at in zip(contraction.summed, index, strict=True)
            }
            left, right = (
                Operand(side.value, tuple(tuple(fixed.get(a, a) for a in dim) for dim in side.axes))
                for side in (contraction.left, contraction.right)
            )
            yield from self._weighted(left, right, places)

    def _weighted(self, left: Operand, right: Operand, places: tuple[int, ...]) -> Iterator[Term]:
        """A product, in which the entries of a constant count as numbers."""
        mine, table = (left, right) if self.depends(left.value) else (right, left)
        entries = _entries(table, len(places))
        if entries is None:
            yield from self._product(left, right, places)
            return
        for weight in set(entries) - {0.0}:
            kept = [at for at, entry in enumerate(entries) if entry == weight]
            source = Operand(mine.value, chosen(mine.axes, kept))
            for term in self._terms(source, tuple(places[at] for at in kept)):
                yield replace(term, factor=term.factor * weight)


def region(y: Value) -> list[Value]:
    """Float values that y is made from by readable ops, nearest first; few where none multiply."""
    found: dict[Value, None] = {y: None}
    queue, products = [y], 0
    while queue and len(found) < _REGION:
        node = queue.pop(0).producer
        if node is None or node.op not in _READ:
            continue
        products += node.op in _CONTRACTIONS or node.op == "aten.mul.Tensor"
        for source in node.inputs:
            if source is not None and source not in found:
                found[source] = None
                queue.append(source)
    if not products:
        return []
    return [value for value in found if value.dtype.is_floating_point]


def _entries(table: Operand, count: int) -> list[float] | None:
    """The numbers at each place, where the table is a constant and no lead axis indexes it."""
    data = table.value.data
    if data is None or data.is_meta or data.is_complex():
        return None
    index = [known(dim, count) for dim in table.axes]
    if any(at is None for at in index):
        return None
    rows = zip(*(at for at in index if at is not None), strict=True) if index else [()] * count
    return [float(data[tuple(row)]) for row in rows]
