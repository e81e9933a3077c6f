"""Reads many elements at once: lead axes stay variables, the features are known index by index.

Where axes.py follows whole axes, here each of n *places* has an index of its own along the
features, so that cuts, concatenations and reorderings of features can be followed too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from attngraph.analysis.layout.axes import Atom, Axes, Operand, broadcast_axes, climb, resolve
from attngraph.analysis.layout.moves import Cut, Reversed, Rolled, move_of
from attngraph.ir import Dim, Node, Value
from attngraph.ir.dims import divide
from attngraph.ir.ops import attribute, input_of
from attngraph.ir.traits import INDEX, JOIN


class Column(Atom):
    """An index that is known at each place."""

    __slots__ = ("places",)

    def __init__(self, size: Dim, places: Iterable[int]) -> None:
        super().__init__(size, 0)
        self.places = tuple(places)

    def split(self, minor: Dim) -> bool:
        major = divide(self.size, minor)
        if major is None or not isinstance(minor, int):
            return False
        high = Column(major, (place // minor for place in self.places))
        self.parts = (high, Column(minor, (place % minor for place in self.places)))
        return True


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the places, by number, and the operand whose columns they are."""

    places: tuple[int, ...]
    operand: Operand


def known(atoms: Iterable[Atom], count: int) -> list[int] | None:
    """The index along a dim at each of `count` places; None where it has a variable part."""
    index = [0] * count
    for atom in resolve(atoms):
        if atom.const is None or not isinstance(atom.size, int):
            return None
        places = atom.places if isinstance(atom, Column) else (atom.const,) * count
        index = [outer * atom.size + inner for outer, inner in zip(index, places, strict=True)]
    return index


def has_columns(axes: Axes) -> bool:
    """Whether the elements differ from place to place."""
    return any(isinstance(atom, Column) for dim in axes for atom in resolve(dim))


def chosen(axes: Axes, places: Sequence[int]) -> Axes:
    """The axes at some of the places only."""
    return tuple(
        tuple(
            Column(atom.size, (atom.places[place] for place in places))
            if isinstance(atom, Column)
            else atom
            for atom in resolve(dim)
        )
        for dim in axes
    )


def steps(operand: Operand, count: int) -> list[Part] | None:
    """Past one op that moves elements, into one or several inputs. None at anything else."""
    value, axes = operand.value, operand.axes
    node = value.producer
    if node is None:
        return None
    if node.op in JOIN:
        return _joined(node, axes, count)
    move, moved = move_of(value), None
    match move:
        case Cut(single=False):
            moved = _cut(move, axes, count)
        case Reversed(source, [dim]):
            moved = _placed(source, axes, dim, count, lambda at, size: size - 1 - at)
        case Rolled(source, dim, int(by)):
            moved = _placed(source, axes, dim, count, lambda at, size: (at - by) % size)
        case None if node.op in INDEX:
            moved = _looked_up(node, axes, count)
    above = moved or climb(operand)
    return None if above is None else [Part(tuple(range(count)), above)]


def _joined(node: Node, axes: Axes, count: int) -> list[Part] | None:
    sources = input_of(node, "tensors")
    dim = attribute(node, "dim") % len(axes)
    index = known(axes[dim], count)
    stacked = node.op == "aten.stack"
    sizes = [1 if stacked else source.shape[dim] for source in sources]
    if index is None or not all(isinstance(size, int) for size in sizes):
        return None
    parts, first = [], 0
    for source, size in zip(sources, sizes, strict=True):
        places = tuple(at for at, place in enumerate(index) if first <= place < first + size)
        if places:
            inner = () if size == 1 else (Column(size, (index[at] - first for at in places)),)
            rest = chosen((*axes[:dim], (), *axes[dim + 1 :]), places)
            middle = () if stacked else (inner,)
            parts.append(Part(places, Operand(source, (*rest[:dim], *middle, *rest[dim + 1 :]))))
        first += size
    return parts


def _cut(cut: Cut, axes: Axes, count: int) -> Operand | None:
    first, step = cut.first, cut.step
    if first is None or not isinstance(step, int):
        return None
    return _placed(cut.source, axes, cut.dim, count, lambda at, size: first + step * at)


def _placed(
    source: Value, axes: Axes, dim: int, count: int, place: Callable[[int, int], int]
) -> Operand | None:
    """The source, where place i along a dim is place(i, size) of it."""
    index, size = known(axes[dim], count), source.shape[dim]
    if index is None or not isinstance(size, int):
        return None
    inner = () if size == 1 else (Column(size, (place(at, size) for at in index)),)
    return Operand(source, (*axes[:dim], inner, *axes[dim + 1 :]))


def _looked_up(node: Node, axes: Axes, count: int) -> Operand | None:
    """x[..., index] with a constant list of features."""
    if (found := _gathered(node)) is None:
        return None
    source, dim, table = found
    if table.data is None or len(table.shape) != 1 or table.data.is_meta:
        return None
    entries = table.data.tolist()
    return _placed(source, axes, dim % len(axes), count, lambda at, size: entries[at] % size)


def rows(node: Node, axes: Axes) -> tuple[Value, Operand] | None:
    """(table, how its rows are chosen) of a gather of rows."""
    found = _gathered(node)
    if found is None or found[1] != 0:
        return None
    table, _, index = found
    lead = axes[: len(index.shape)]
    return table, Operand(index, broadcast_axes(lead, index.shape, index.shape))


def _gathered(node: Node) -> tuple[Value, int, Value] | None:
    """(source, dim, index) where an index along a dim says which slices of the source are taken."""
    if node.op == "aten.embedding":
        source, index = node.inputs[:2]
        dim = 0
    elif node.op == "aten.index_select":
        source, index = node.inputs
        dim = attribute(node, "dim")
    elif node.op in INDEX:
        source, *indices = node.inputs
        given = [at for at, value in enumerate(indices) if value is not None]
        if len(given) != 1:
            return None
        (dim,) = given
        index = indices[dim]
    else:
        return None
    if source is None or index is None or index.dtype == torch.bool:
        return None
    return source, dim, index
