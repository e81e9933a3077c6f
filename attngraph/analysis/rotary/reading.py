"""Reads y = x ⊙ C + P(x) ⊙ S, with P a signed exchange of features in pairs: a rotation.

Each feature of y is read as a sum of products of elements of x and of tables (feature_sums.py);
then the sums are compared with those of a rotation by halves or by neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from attngraph.analysis.layout.axes import Atom, Axes, Operand, regroup, resolve
from attngraph.analysis.layout.columns import Column, known
from attngraph.analysis.layout.element_ids import ONE, Element, ElementIds
from attngraph.analysis.layout.feature_sums import ANCHORS, UNDER_RESHAPE, Reading, Term, region
from attngraph.ir import ScalarType, Value
from attngraph.ir.dims import same
from attngraph.ir.traits import RESHAPE

_MOST_FEATURES = 1024
_IN_A_PAIR = 2  # features of x that one of y is made of


@dataclass(frozen=True, slots=True)
class Table:
    """`factor` · Π of elements of `operands`, at one place per pair."""

    factor: float
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Rotation:
    """`output` is `source` with `pairs` of features turned by the angles of `cos` and `sin`.

    The axes that aren't features are indexed by atoms that source, tables and output share.
    `features` are those of the source, in order; where they are all turned, the output may have
    first the pairs' first features and then the second ones, or the other way round.
    """

    output: Operand
    source: Operand
    features: tuple[Atom, ...]
    pairs: int
    interleaved: bool
    cos: Table
    sin: Table


# A term, which of its places is meant, and the feature of x that it reads there.
_Place: TypeAlias = tuple[Term, int, int]


def read_rotation(y: Value) -> Rotation | None:
    """The rotation that a value is, in the nearest x that it can be read in."""
    if not _may_be(y):
        return None
    width = int(y.shape[-1])
    for x in region(y):
        if x is not y and same(x.tensor_type.numel, y.tensor_type.numel) and x.shape:
            reading = Reading(y, x, width)
            terms = reading.sums(_IN_A_PAIR)
            found = None if terms is None else _match(reading, terms)
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
    if node.op in RESHAPE:
        inner = node.inputs[0].producer if node.inputs[0] is not None else None
        return inner is not None and inner.op in UNDER_RESHAPE
    return node.op in ANCHORS


def _match(reading: Reading, terms: Sequence[Term]) -> Rotation | None:
    """The rotation that the sums are, if they are one."""
    source = _source_axes(terms, reading.x, reading.lead, reading.width)
    if source is None:
        return None
    operand, features, columns = source
    at_place: list[list[_Place]] = [[] for _ in range(reading.width)]
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
    for interleaved, result in ((False, False), (True, True), (True, False), (False, True)):
        order = _reordered(features, pairs, interleaved, result)
        tables = order and _tables(at_place, pairs, interleaved, result)
        if order and tables:
            output = Operand(reading.y, (*reading.lead, order))
            return Rotation(output, operand, features, pairs, interleaved, *tables)
    return None


def _reordered(
    features: tuple[Atom, ...], pairs: int, interleaved: bool, result: bool
) -> tuple[Atom, ...] | None:
    """The features in the order of the result, in which pairs may be neighbours or not."""
    if interleaved == result:
        return features
    grouped = regroup(features, (pairs, 2) if interleaved else (2, pairs))
    return None if grouped is None else (*grouped[1], *grouped[0])


def _source_axes(
    terms: Sequence[Term], x: Value, lead: Axes, width: int
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
    sums: Sequence[Sequence[_Place]], pairs: int, interleaved: bool, result: bool
) -> tuple[Table, Table] | None:
    """(cos, sin) where every pair of features is turned by one angle.

    Pairs are neighbours in the source if `interleaved`, and in the result if `result`.
    """
    coefficients = _Coefficients()
    cosines: list[_Place] = []
    sines: list[_Place] = []
    for pair in range(pairs):
        a, b = _pair(pair, pairs, interleaved)
        upper, lower = _pair(pair, pairs, result)
        first, second = _parted(sums[upper], a, b), _parted(sums[lower], b, a)
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


def _pair(pair: int, pairs: int, interleaved: bool) -> tuple[int, int]:
    return (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)


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
