"""Reads y = x ⊙ C + P(x) ⊙ S, with P a signed exchange of features in pairs: a rotation.

Nothing is matched: each feature of y is read as a sum of products of elements of x and of tables,
through cuts, concatenations, reshapes and matrix products; then the sums are compared with those of
a rotation by halves or by neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

from attngraph.ir import Node, ScalarType, Value
from attngraph.ir.dims import same
from attngraph.ir.ops import attribute
from attngraph.passes.axes import (
    COPIES,
    LAYOUTS,
    RESHAPES,
    Atom,
    Axes,
    Operand,
    broadcast_axes,
    fresh_axes,
    resolve,
)
from attngraph.passes.columns import Column, chosen, known, steps
from attngraph.passes.contraction import read_contraction
from attngraph.passes.element_ids import ONE, Element, ElementIds
from attngraph.passes.scalars import scale_of

_SUMS = frozenset(["aten.add.Tensor", "aten.sub.Tensor"])
_JOINS = frozenset(["aten.cat", "aten.stack"])
_CONTRACTIONS = frozenset(["aten.matmul", "aten.bmm", "aten.einsum", "aten.sum.dim_IntList"])
_FACTORS = frozenset(["aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Scalar", "aten.neg"])
_MOVES = frozenset(
    ["aten.flip", "aten.roll", "aten.index_select", "aten.index.Tensor", "aten.div.Tensor"]
)
_READ = _SUMS | _JOINS | _CONTRACTIONS | _FACTORS | _MOVES | RESHAPES | LAYOUTS | COPIES
ANCHORS = _SUMS | _JOINS
_UNDER_RESHAPE = _JOINS | _CONTRACTIONS | _SUMS
_REGION = 48
_MOST_FEATURES = 1024


@dataclass(frozen=True, slots=True)
class Table:
    """`factor` · Π of elements of `operands`, at one place per pair."""

    factor: float
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Rotation:
    """`output` is `source` with `pairs` of features turned by the angles of `cos` and `sin`.

    `lead` are the axes that aren't features, by atoms that source, tables and output share;
    `features` those of the source and of the output, in order.
    """

    output: Operand
    source: Operand
    features: tuple[Atom, ...]
    pairs: int
    interleaved: bool
    cos: Table
    sin: Table


@dataclass(frozen=True, slots=True)
class _Term:
    """`factor` · Π tables · x[source] at some places."""

    places: tuple[int, ...]
    factor: float
    tables: tuple[Operand, ...]
    source: Axes


# A term, which of its places is meant, and the feature of x that it reads there.
_Place: TypeAlias = tuple[_Term, int, int]


class _Unread(Exception):
    """The region holds something else than products with x and sums of them."""


def read_rotation(y: Value) -> Rotation | None:
    """The rotation that a value is, in the nearest x that it can be read in."""
    if not _may_be(y):
        return None
    width = int(y.shape[-1])
    region = _region(y)
    for x in region:
        if x is not y and same(x.tensor_type.numel, y.tensor_type.numel) and x.shape:
            found = _Reading(y, x, width).rotation()
            if found is not None:
                return found
    return None


def _may_be(y: Value) -> bool:
    node = y.producer
    if node is None or isinstance(y.type, ScalarType):
        return False
    if not y.dtype.is_floating_point or len(y.shape) < 2:
        return False
    width = y.shape[-1]
    if not isinstance(width, int) or not 2 <= width <= _MOST_FEATURES:
        return False
    if node.op in RESHAPES:
        inner = node.inputs[0].producer if node.inputs[0] is not None else None
        return inner is not None and inner.op in _UNDER_RESHAPE
    return node.op in ANCHORS


def _region(y: Value) -> list[Value]:
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


class _Reading:
    """One attempt to read y as a rotation of x."""

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
                sources = [source for source in node.inputs if source is not None]
                self._depends[value] = any(self.depends(source) for source in sources)
        return self._depends[value]

    def rotation(self) -> Rotation | None:
        if not self.depends(self.y):
            return None
        places = tuple(range(self.width))
        start = Operand(self.y, (*self.lead, (Column(self.width, places),)))
        try:
            terms = list(self._terms(start, places))
        except _Unread:
            return None
        return self._match(terms)

    def _terms(self, operand: Operand, places: tuple[int, ...]) -> Iterator[_Term]:
        """The sum that each place of an operand that depends on x is."""
        self._steps += 1
        value, axes, count = operand.value, operand.axes, len(places)
        if value is self.x:
            yield _Term(places, 1.0, (), axes)
            return
        node = value.producer
        if node is None or not self.depends(value) or self._steps > 64 * _REGION:
            raise _Unread
        if (scaling := scale_of(node)) is not None:
            for term in self._terms(Operand(scaling[0], axes), places):
                yield replace(term, factor=term.factor * scaling[1])
        elif node.op in _SUMS:
            alpha = attribute(node, "alpha")
            if not isinstance(alpha, (int, float)):
                raise _Unread
            sign = -float(alpha) if node.op == "aten.sub.Tensor" else float(alpha)
            for source, factor in zip(node.inputs, (1.0, sign), strict=True):
                for term in self._terms(_side(node, source, axes), places):
                    yield replace(term, factor=term.factor * factor)
        elif node.op == "aten.mul.Tensor":
            first, second = (_side(node, source, axes) for source in node.inputs)
            yield from self._product(first, second, places)
        elif (parts := steps(operand, count)) is not None:
            for part in parts:
                yield from self._terms(part.operand, tuple(places[at] for at in part.places))
        else:
            yield from self._contraction(node, axes, places)

    def _product(self, first: Operand, second: Operand, places: tuple[int, ...]) -> Iterator[_Term]:
        if self.depends(first.value) == self.depends(second.value):
            raise _Unread
        mine, table = (first, second) if self.depends(first.value) else (second, first)
        position = {place: at for at, place in enumerate(places)}
        for term in self._terms(mine, places):
            kept = [position[place] for place in term.places]
            factor = Operand(table.value, chosen(table.axes, kept))
            yield replace(term, tables=(*term.tables, factor))

    def _contraction(self, node: Node, axes: Axes, places: tuple[int, ...]) -> Iterator[_Term]:
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

    def _weighted(self, left: Operand, right: Operand, places: tuple[int, ...]) -> Iterator[_Term]:
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

    def _match(self, terms: Sequence[_Term]) -> Rotation | None:
        """The rotation that the sums are, if they are one."""
        source = _source_axes(terms, self.x, self.lead, self.width)
        if source is None:
            return None
        operand, features, columns = source
        at_place: list[list[_Place]] = [[] for _ in range(self.width)]
        for term, index in zip(terms, columns, strict=True):
            for at, place in enumerate(term.places):
                at_place[place].append((term, at, index[at]))
        turned = [place for place, sums in enumerate(at_place) if len(sums) == 2]
        pairs = len(turned) // 2
        if not turned or turned != list(range(2 * pairs)):
            return None
        for place, sums in enumerate(at_place[2 * pairs :], 2 * pairs):
            if len(sums) != 1 or sums[0][2] != place or sums[0][0].tables:
                return None
            if sums[0][0].factor != 1.0:
                return None
        for interleaved in (False, True):
            if (tables := _tables(at_place, pairs, interleaved)) is not None:
                output = Operand(self.y, (*self.lead, features))
                return Rotation(output, operand, features, pairs, interleaved, *tables)
        return None


def _side(node: Node, source: Value | None, axes: Axes) -> Operand:
    if source is None:
        raise _Unread
    return Operand(source, broadcast_axes(axes, source.shape, node.output.shape))


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


def _source_axes(
    terms: Sequence[_Term], x: Value, lead: Axes, width: int
) -> tuple[Operand, tuple[Atom, ...], list[list[int]]] | None:
    """x with its features as atoms, those atoms, and for each term its features by number.

    None where terms read x in different layouts, or a lead axis more or less than once.
    """
    wanted = [atom for dim in lead for atom in resolve(dim)]
    layout: list[list[Atom | None]] | None = None
    columns = []
    for term in terms:
        dims = [resolve(dim) for dim in term.source]
        flat = [atom for dim in dims for atom in dim]
        where = [at for at, atom in enumerate(flat) if atom.const is not None]
        if not where or where != list(range(where[0], where[-1] + 1)):
            return None
        index = known((flat[at] for at in where), len(term.places))
        sizes = [flat[at].size for at in where]
        total = 1
        for size in sizes:
            total *= int(size) if isinstance(size, int) else 0
        if index is None or total != width:
            return None
        columns.append(index)
        shown: list[list[Atom | None]] = [
            [None if atom.const is not None else atom for atom in dim] for dim in dims
        ]
        shown = [[a for at, a in enumerate(dim) if a or not at or dim[at - 1]] for dim in shown]
        if layout is None:
            layout = shown
        elif layout != shown:
            return None
    if layout is None:
        return None
    found = [atom for dim in layout for atom in dim if atom is not None]
    if len(found) != len(wanted) or set(found) != set(wanted):
        return None
    return _with_features(x, layout, width, columns)


def _with_features(
    x: Value, layout: Sequence[Sequence[Atom | None]], width: int, columns: list[list[int]]
) -> tuple[Operand, tuple[Atom, ...], list[list[int]]] | None:
    axes, features, rest = [], [], width
    for size, dim in zip(x.shape, layout, strict=True):
        atoms: list[Atom] = []
        for atom in dim:
            if atom is not None:
                atoms.append(atom)
                continue
            share = size if len(dim) == 1 else width
            if not isinstance(share, int) or rest % share:
                return None
            rest //= share
            feature = Atom(share)
            features.append(feature)
            atoms.append(feature)
        axes.append(tuple(atoms))
    if rest != 1:
        return None
    return Operand(x, tuple(axes)), tuple(features), columns


def _tables(
    sums: Sequence[Sequence[_Place]], pairs: int, interleaved: bool
) -> tuple[Table, Table] | None:
    """(cos, sin) where every pair of features is turned by one angle."""
    coefficients = _Coefficients()
    cosines: list[_Place] = []
    sines: list[_Place] = []
    for pair in range(pairs):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)
        first, second = _parted(sums[a], a, b), _parted(sums[b], b, a)
        if first is None or second is None:
            return None
        factor, sine = coefficients.of(second[1])
        if coefficients.of(first[0]) != coefficients.of(second[0]):
            return None
        if coefficients.of(first[1]) != (-factor, sine):
            return None
        cosines.append(first[0])
        sines.append(second[1])
    cos, sin = _table(cosines), _table(sines)
    return None if cos is None or sin is None else (cos, sin)


class _Coefficients:
    """What tells the coefficient of a term from others."""

    def __init__(self) -> None:
        self._ids = ElementIds()
        self._known: dict[int, list[Element]] = {}

    def of(self, place: _Place) -> Element:
        """The product of the term's factor and tables at its place."""
        term, at, _ = place
        if id(term) not in self._known:
            each = [self._ids.of(table, len(term.places)) for table in term.tables]
            entries = zip(*each, strict=True) if each else [()] * len(term.places)
            self._known[id(term)] = [
                self._ids.product([(term.factor, ONE), *entry]) for entry in entries
            ]
        return self._known[id(term)][at]


def _parted(sums: Sequence[_Place], own: int, other: int) -> tuple[_Place, _Place] | None:
    """(the term of the feature itself, the term of its partner)."""
    by_feature = {place[2]: place for place in sums}
    if len(sums) != 2 or set(by_feature) != {own, other}:
        return None
    return by_feature[own], by_feature[other]


def _table(entries: Sequence[_Place]) -> Table | None:
    """One table of the entries, which must be read from the same values in the same way."""
    first = entries[0][0]
    terms = {id(term): term for term, _, _ in entries}.values()
    if not first.tables or any(
        term.factor != first.factor or len(term.tables) != len(first.tables) for term in terms
    ):
        return None
    operands = []
    for index, table in enumerate(first.tables):
        if any(term.tables[index].value is not table.value for term in terms):
            return None
        axes = _merged([(term.tables[index].axes, at) for term, at, _ in entries])
        if axes is None:
            return None
        operands.append(Operand(table.value, axes))
    return Table(first.factor, tuple(operands))


def _merged(entries: Sequence[tuple[Axes, int]]) -> Axes | None:
    """Axes whose column at each entry is that of the entry's axes at its place."""
    dims = []
    for dim in zip(*(axes for axes, _ in entries), strict=True):
        atoms: list[Atom] = []
        each = [resolve(index) for index in dim]
        if len({len(index) for index in each}) != 1:
            return None
        for same_atom in zip(*each, strict=True):
            if all(atom is same_atom[0] for atom in same_atom) and same_atom[0].const is None:
                atoms.append(same_atom[0])
                continue
            if any(atom.const is None or atom.size != same_atom[0].size for atom in same_atom):
                return None
            places = [
                atom.places[at] if isinstance(atom, Column) else atom.const or 0
                for atom, (_, at) in zip(same_atom, entries, strict=True)
            ]
            atoms.append(Column(same_atom[0].size, places))
        dims.append(tuple(atoms))
    return tuple(dims)
