"""Builds a table with one column per place, from as near its inputs as the columns allow."""

from __future__ import annotations

import torch

from attngraph.analysis.layout.axes import Atom, Axes, Operand, resolve, spread
from attngraph.analysis.layout.columns import Column, has_columns, known, rows, steps
from attngraph.analysis.layout.element_ids import is_pointwise
from attngraph.ir import Builder, Node, Value
from attngraph.passes.rewriting.materialize import materialize


class Narrow:
    """Tables of one reading; their columns are indexed by the atom `pair`."""

    def __init__(self, build: Builder, count: int) -> None:
        self.build = build
        self.count = count
        self.pair = Atom(count)

    def operand(self, operand: Operand) -> Operand | None:
        """The columns at each place, in order. None where they lie in several dims."""
        value, axes = operand.value, operand.axes
        if not _has_fixed(axes):
            return operand
        if self._is_whole(value, axes):
            return Operand(value, self._labelled(axes))
        parts = steps(operand, self.count)
        if parts is not None and len(parts) == 1:
            above = self.operand(parts[0].operand)
            if above is not None:
                return above
        node = value.producer
        if (
            node is not None
            and is_pointwise(node)
            and _has_fixed(axes)
            and (made := self._again(node, axes))
        ):
            return made
        if node is not None and (made := self._rows(node, axes)):
            return made
        return self._cut(value, axes)

    def _is_whole(self, value: Value, axes: Axes) -> bool:
        """Whether the places are all columns of one dim, in their order, and nothing is fixed."""
        for dim, size in zip(axes, value.shape, strict=True):
            atoms = resolve(dim)
            if all(atom.const is None for atom in atoms):
                continue
            if size != self.count or known(atoms, self.count) != list(range(self.count)):
                return False
        return has_columns(axes)

    def _labelled(self, axes: Axes) -> Axes:
        return tuple((self.pair,) if _is_fixed(dim) else resolve(dim) for dim in axes)

    def _again(self, node: Node, axes: Axes) -> Operand | None:
        """A pointwise op on narrow inputs."""
        target: list[tuple[Atom, ...]] = []
        for dim in axes:
            if any(atom.const is not None for atom in resolve(dim)) and not _is_fixed(dim):
                return None
            target.append(() if _is_fixed(dim) else resolve(dim))
        last = max(at for at, dim in enumerate(axes) if _is_fixed(dim))
        target[last] = (self.pair,)
        inputs: list[Value | None] = []
        for source in node.inputs:
            if source is None:
                inputs.append(None)
                continue
            inner = self.operand(spread(source, axes, node.output.shape))
            if inner is None:
                return None
            inputs.append(materialize(self.build, inner, tuple(target), broadcast=False))
        return Operand(self.build(node.op, *inputs, **node.attrs), tuple(target))

    def _rows(self, node: Node, axes: Axes) -> Operand | None:
        """Rows of a narrow table."""
        gathered = rows(node, axes)
        if gathered is None:
            return None
        table, index = gathered
        rank = len(index.value.shape)
        if _has_fixed(axes[:rank]) or not _has_fixed(axes[rank:]):
            return None
        marker = (Atom(table.shape[0]),)
        inner = self.operand(Operand(table, (marker, *axes[rank:])))
        if inner is None:
            return None
        middle = tuple(resolve(dim) for dim in axes[rank:] if not _is_fixed(dim))
        source = materialize(self.build, inner, (marker, *middle, (self.pair,)))
        result = (
            self.build("aten.embedding", source, index.value) if len(source.shape) == 2 else None
        )
        if result is None:
            return None
        return Operand(result, (*(resolve(dim) for dim in axes[:rank]), (self.pair,)))

    def _cut(self, value: Value, axes: Axes) -> Operand | None:
        """The places cut out of the one dim along which they differ; the other dims selected."""
        places: dict[int, list[int]] = {}
        for position, dim in enumerate(axes):
            if any(atom.const is not None for atom in resolve(dim)):
                index = known(dim, self.count)
                if index is None:
                    return None
                places[position] = index
        differing = [at for at, index in places.items() if len(set(index)) > 1]
        if len(differing) > 1 or (self.count > 1 and not differing):
            return None
        along = differing[0] if differing else max(places)
        left = list(axes)
        if (narrow := self._take(value, along, places[along])) is None:
            return None
        left[along] = (self.pair,)
        for position in sorted(places.keys() - {along}, reverse=True):
            chosen = places[position][0]
            narrow = self.build("aten.select.int", narrow, dim=position, index=chosen)
            del left[position]
        return Operand(narrow, tuple(map(resolve, left)))

    def _take(self, value: Value, dim: int, index: list[int]) -> Value | None:
        step = index[1] - index[0] if len(index) > 1 else 1
        if step > 0 and index == list(range(index[0], index[-1] + 1, step)):
            if len(index) == value.shape[dim]:
                return value
            end = index[-1] + 1
            return self.build(
                "aten.slice.Tensor", value, dim=dim, start=index[0], end=end, step=step
            )
        places = self.build.constant(torch.tensor(index), "columns")
        return self.build("aten.index_select", value, places, dim=dim)


def _is_fixed(dim: tuple[Atom, ...]) -> bool:
    atoms = resolve(dim)
    return bool(atoms) and all(atom.const is not None for atom in atoms)


def _has_fixed(axes: Axes) -> bool:
    return any(
        isinstance(atom, Column) or atom.const is not None for d in axes for atom in resolve(d)
    )
