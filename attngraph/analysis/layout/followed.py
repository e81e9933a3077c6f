"""Follows single elements of a value to where they come from, at sizes that are given.

axes.py names whole axes and index_maps.py affine indices. Here an element is followed by its place
in numbers, so that no pad, overlap or write into a part of a tensor stands in the way: at given
sizes each of those says of every place which place of which operand it is. Only the places that are
asked for are computed, and no tensor of the graph, but for those that follow from the sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from attngraph.analysis.layout.moves import (
    Broadcast,
    Copied,
    Cut,
    Interleaved,
    Move,
    Permuted,
    Regrouped,
    Repeated,
    Reversed,
    Rolled,
    move_of,
)
from attngraph.analysis.values.running import run_nodes
from attngraph.analysis.values.scalars import scale_of
from attngraph.ir import Node, TensorType, Value
from attngraph.ir.dims import product, substitute
from attngraph.ir.ops import attribute, input_of, inputs_of
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import ADDITIVE, MUTATING, PAD, RANDOM, UNFOLD

_LARGEST = 1 << 24  # elements of what is computed from sizes, and of a constant

_PLACES = (torch.int64, torch.int32)

Index = tuple[torch.Tensor, ...]
"""A place for each element: one tensor of integers (N,) per dim."""


@dataclass(frozen=True, slots=True)
class Term:
    """`factor` (N,) times the elements of `value` at `index`; a factor of 0 says that an element
    has no such term, and its index nothing.
    """

    value: Value
    index: Index
    factor: torch.Tensor

    @property
    def present(self) -> torch.Tensor:
        """Which elements have the term."""
        return self.factor != 0


@dataclass(frozen=True, slots=True)
class Elements:
    """N elements, each a number (N,) plus terms. No two terms of one element are of one value."""

    number: torch.Tensor
    terms: tuple[Term, ...] = ()

    def scaled(self, factor: float) -> Elements:
        terms = (replace(term, factor=term.factor * factor) for term in self.terms)
        return Elements(self.number * factor, tuple(terms))


class Followed:
    """Where the elements of values come from, at `sizes` of the graph's dims, and no further than
    `ends`.
    """

    def __init__(self, sizes: Mapping[str, int], ends: Collection[Value] = ()) -> None:
        self.sizes, self.ends = sizes, ends
        self._fixed: dict[Value, torch.Tensor | None] = {}

    def shape(self, value: Value) -> tuple[int, ...]:
        """The value's shape in numbers."""
        return tuple(int(substitute(dim, self.sizes)) for dim in value.shape)

    def of(self, value: Value, index: Index) -> Elements:
        """The elements at `index`.

        What is followed ends at a value that no rule is for, which is then a term. Raises
        ValueError where one element has two terms of one value.
        """
        if value not in self.ends and (fixed := self._numbers(value)) is not None:
            return Elements(fixed[index].to(torch.float64))
        node, move = (None, None) if value in self.ends else (value.producer, move_of(value))
        if move is not None:
            return self.of(move.source, self._moved(move, value, index))
        found = None if node is None or len(node.outputs) != 1 else self._through(node, index)
        if found is not None:
            return found
        ones = torch.ones(_count(index), dtype=torch.float64)
        return Elements(torch.zeros_like(ones), (Term(value, index, ones),))

    def _through(self, node: Node, index: Index) -> Elements | None:
        """What another op than a layout gives; None where there is no rule for it."""
        source = node.inputs[0] if node.inputs else None
        if source is None:
            return None
        if (scaling := scale_of(node)) is not None:
            return self.of(scaling[0], index).scaled(scaling[1])
        match node.op:
            case "aten.cat":
                return self._joined(node, index)
            case "aten.stack":
                return self._stacked(node, index)
            case "aten.slice_scatter" | "aten.select_scatter":
                return self._written(node, index)
            case "aten.where.self":
                return self._chosen(node, index)
            case "aten.index.Tensor":
                return self._rows(node, index)
            case "aten.gather":
                return self._gathered(node, source, index)
        if node.op in PAD:
            return self._padded(node, source, index)
        if node.op in UNFOLD:
            return self._unfolded(node, source, index)
        if node.op in ADDITIVE and attribute(node, "alpha") == 1:
            left, right = (self._broadcast(node, side, index) for side in node.inputs if side)
            return _sum(left, right.scaled(-1.0 if node.op == "aten.sub.Tensor" else 1.0))
        return None

    def _moved(self, move: Move, value: Value, index: Index) -> Index:
        inner, outer = self.shape(move.source), self.shape(value)
        match move:
            case Copied():
                return index
            case Regrouped():
                return split_places(flat_places(index, outer), inner)
            case Broadcast():
                return _aligned(index, inner)
            case Permuted():
                return tuple(index[axis] for axis in move.inverse)
            case Reversed(_, dims):
                return _changed(index, {dim: inner[dim] - 1 - index[dim] for dim in dims})
            case Rolled(_, dim):
                by = int(substitute(move.by, self.sizes))
                return _changed(index, {dim: (index[dim] - by) % inner[dim]})
            case Repeated():
                lead = len(index) - len(inner)
                return tuple(at % size for at, size in zip(index[lead:], inner, strict=True))
            case Interleaved(_, dim):
                times = int(substitute(move.times, self.sizes))
                return _changed(index, {dim: index[dim] // times})
            case Cut(_, dim):
                start, step = (int(substitute(n, self.sizes)) for n in (move.start, move.step))
                first = torch.tensor(_counted(start, inner[dim]))
                if move.single:
                    return (*index[:dim], first.expand(_count(index)), *index[dim:])
                return _changed(index, {dim: first + step * index[dim]})
        raise ValueError(f"no rule for {move}")

    def _broadcast(self, node: Node, side: Value, index: Index) -> Elements:
        return self.of(side, _aligned(index, self.shape(side)))

    def _joined(self, node: Node, index: Index) -> Elements:
        dim = attribute(node, "dim") % len(index)
        parts, start = [], 0
        for part in input_of(node, "tensors"):
            size = self.shape(part)[dim]
            inside = (index[dim] >= start) & (index[dim] < start + size)
            parts.append((part, inside, _changed(index, {dim: index[dim] - start})))
            start += size
        return self._parts(parts, _count(index))

    def _stacked(self, node: Node, index: Index) -> Elements:
        dim, parts = attribute(node, "dim") % len(index), input_of(node, "tensors")
        inner = (*index[:dim], *index[dim + 1 :])
        each = [(part, index[dim] == place, inner) for place, part in enumerate(parts)]
        return self._parts(each, _count(index))

    def _written(self, node: Node, index: Index) -> Elements:
        """A part of one tensor that another was written over."""
        base, source = node.operands
        dim = attribute(node, "dim") % len(index)
        size, at = self.shape(base)[dim], index[dim]
        if node.op == "aten.select_scatter":
            place = int(substitute(attribute(node, "index"), self.sizes)) % size
            inside, inner = at == place, (*index[:dim], *index[dim + 1 :])
        else:
            start, end, step = (attribute(node, name) for name in ("start", "end", "step"))
            start = _counted(int(substitute(start or 0, self.sizes)), size)
            end = _counted(int(substitute(size if end is None else end, self.sizes)), size)
            step = int(substitute(step, self.sizes))
            inside = (at >= start) & (at < end) & ((at - start) % step == 0)
            inner = _changed(index, {dim: (at - start) // step})
        return self._parts([(source, inside, inner), (base, ~inside, index)], _count(index))

    def _chosen(self, node: Node, index: Index) -> Elements | None:
        """A choice that the sizes decide."""
        predicate, chosen, other = node.operands
        if (fixed := self._numbers(predicate)) is None:
            return None
        first = fixed[_aligned(index, tuple(fixed.shape))].bool()
        sides = [(chosen, first), (other, ~first)]
        parts = [(side, inside, _aligned(index, self.shape(side))) for side, inside in sides]
        return self._parts(parts, _count(index))

    def _padded(self, node: Node, source: Value, index: Index) -> Elements | None:
        if node.op == "aten.pad" and attribute(node, "mode") != "constant":
            return None
        value = attribute(node, "value") or 0
        if not isinstance(value, int | float):
            return None
        widths = [int(substitute(width, self.sizes)) for width in attribute(node, "pad")]
        inner, inside = list(index), torch.ones(_count(index), dtype=torch.bool)
        for place in range(len(widths) // 2):
            dim = len(index) - 1 - place
            inner[dim] = index[dim] - widths[2 * place]
            inside &= (inner[dim] >= 0) & (inner[dim] < self.shape(source)[dim])
        found = self._parts([(source, inside, tuple(inner))], _count(index))
        return replace(found, number=torch.where(inside, found.number, float(value)))

    def _unfolded(self, node: Node, source: Value, index: Index) -> Elements:
        *inner, place = index
        dim, step = attribute(node, "dimension") % len(inner), attribute(node, "step")
        at = inner[dim] * int(substitute(step, self.sizes)) + place
        return self.of(source, _changed(tuple(inner), {dim: at}))

    def _rows(self, node: Node, index: Index) -> Elements | None:
        """Rows by places that the sizes decide, along axes that lie beside each other."""
        source, places = inputs_of(node, "self", "indices")
        dims = [dim for dim, place in enumerate(places) if place is not None]
        fixed = [self._numbers(places[dim]) for dim in dims]
        if dims != list(range(dims[0], dims[-1] + 1)):
            return None
        tables = [
            table for table in fixed if table is not None and not table.dtype.is_floating_point
        ]
        if len(tables) != len(dims) or any(table.dtype == torch.bool for table in tables):
            return None
        rank, lead = max(table.dim() for table in tables), dims[0]
        at, sizes = index[lead : lead + rank], self.shape(source)
        chosen = [
            table[_aligned(at, tuple(table.shape))] % sizes[dim]
            for dim, table in zip(dims, tables, strict=True)
        ]
        return self.of(source, (*index[:lead], *chosen, *index[lead + rank :]))

    def _gathered(self, node: Node, source: Value, index: Index) -> Elements | None:
        """Elements by places along an axis that the sizes decide."""
        table = self._numbers(input_of(node, "index"))
        dim = attribute(node, "dim") % len(index)
        return None if table is None else self.of(source, _changed(index, {dim: table[index]}))

    def _parts(self, parts: Sequence[tuple[Value, torch.Tensor, Index]], count: int) -> Elements:
        """Elements of which each is inside one of some parts, or in none."""
        number = torch.zeros(count, dtype=torch.float64)
        terms: dict[Value, Term] = {}
        for value, inside, index in parts:
            where = inside.nonzero().squeeze(1)
            if not len(where):
                continue
            found = self.of(value, tuple(at.expand(count)[where] for at in index))
            number[where] = found.number
            for term in found.terms:
                if term.value not in terms:
                    blank = torch.zeros(count, dtype=torch.int64)
                    whole = tuple(blank.clone() for _ in term.index)
                    terms[term.value] = Term(term.value, whole, torch.zeros_like(number))
                known = terms[term.value]
                known.factor[where] = term.factor
                for old, new in zip(known.index, term.index, strict=True):
                    old[where] = new
        return Elements(number, tuple(terms.values()))

    def _numbers(self, value: Value) -> torch.Tensor | None:
        """What is a constant, or follows from the sizes alone."""
        if value not in self._fixed:
            self._fixed[value] = self._computed(value)
        return self._fixed[value]

    def _computed(self, value: Value) -> torch.Tensor | None:
        if not isinstance(value.type, TensorType) or math.prod(self.shape(value)) > _LARGEST:
            return None
        if value.data is not None:
            return None if value.data.is_meta else value.data.detach()
        if value.producer is None:
            return None
        leaves, nodes = backward_slice([value], lambda at: at.data is not None)
        memory = {leaf: leaf.data.detach() for leaf in leaves if leaf.data is not None}
        if len(memory) < len(leaves) or any(node.op in RANDOM | MUTATING for node in nodes):
            return None
        made = [at for node in nodes for at in node.outputs]
        if any(isinstance(at.type, TensorType) and self._is_large(at) for at in (*leaves, *made)):
            return None
        ran = run_nodes(nodes, memory, self.sizes, wide=False)
        found = None if ran is None else ran[value]
        return found if isinstance(found, torch.Tensor) else None

    def _is_large(self, value: Value) -> bool:
        return int(substitute(product(value.shape), self.sizes)) > _LARGEST


def _count(index: Index) -> int:
    return max((at.numel() for at in index), default=1)


def flat_places(index: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """The places of elements in row-major order."""
    flat = torch.zeros_like(index[0]) if index else torch.zeros(1, dtype=torch.int64)
    for at, size in zip(index, shape, strict=True):
        flat = flat * size + at
    return flat


def split_places(flat: torch.Tensor, shape: Sequence[int]) -> Index:
    """The index of each of some places in row-major order."""
    return torch.unravel_index(flat, tuple(shape)) if shape else ()


def _aligned(index: Index, shape: Sequence[int]) -> Index:
    """The index into an operand that was broadcast."""
    kept = index[len(index) - len(shape) :]
    return tuple(
        torch.zeros_like(at) if size == 1 else at for at, size in zip(kept, shape, strict=True)
    )


def _changed(index: Index, dims: Mapping[int, torch.Tensor]) -> Index:
    return tuple(dims.get(dim, at) for dim, at in enumerate(index))


def _counted(place: int, size: int) -> int:
    """A place that may count from the end, within the axis."""
    return min(max(place + size if place < 0 else place, 0), size)


def _sum(left: Elements, right: Elements) -> Elements:
    mine = {term.value: term for term in left.terms}
    if any(bool((mine[t.value].present & t.present).any()) for t in right.terms if t.value in mine):
        raise ValueError("one value is there twice")
    for term in right.terms:
        known = mine.get(term.value)
        if known is None:
            mine[term.value] = term
            continue
        index = tuple(
            torch.where(term.present, new, old)
            for old, new in zip(known.index, term.index, strict=True)
        )
        mine[term.value] = Term(term.value, index, known.factor + term.factor)
    return Elements(left.number + right.number, tuple(mine.values()))
