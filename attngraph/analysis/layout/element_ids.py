"""Numbers the elements of tables so that equal numbers mean equal elements.

Two halves of `cat(freqs, freqs).cos()` have the same numbers, and so have equal columns of a
constant.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias

import torch

from attngraph.analysis.layout.axes import Atom, Axes, Operand, resolve, sides_of
from attngraph.analysis.layout.columns import Column, has_columns, known, rows, steps
from attngraph.analysis.values.scalars import scale_of
from attngraph.ir import Node, Value
from attngraph.ir.hashing import hashable
from attngraph.ir.traits import CAST, POINTWISE

_LARGEST = 1 << 24  # elements of a constant whose columns are compared


Element: TypeAlias = tuple[float, int]
"""A number times the element of that number; `ONE` is the element 1."""
ONE = 0


class ElementIds:
    """The numbers of one reading: they hold for its lead axes."""

    def __init__(self) -> None:
        self._ids: dict[Hashable, int] = {"one": ONE}
        self._classes: dict[Hashable, list[int]] = {}
        self._markers: dict[Hashable, Atom] = {}
        self._products: dict[int, list[int]] = {}

    def of(self, operand: Operand, count: int) -> list[Element]:
        """What the element at each place is."""
        value, axes = operand.value, operand.axes
        if value.data is not None and not value.data.is_meta:
            return self._constant(value, axes, count)
        parts = steps(operand, count)
        if parts is not None:
            result = [(0.0, ONE)] * count
            for part in parts:
                found = self.of(part.operand, len(part.places))
                for place, element in zip(part.places, found, strict=True):
                    result[place] = element
            return result
        node = value.producer
        if node is not None and is_pointwise(node) and any(node.inputs):
            return self._pointwise(node, axes, count)
        gathered = None if node is None else rows(node, axes)
        if gathered is not None and has_columns(axes[len(gathered[1].value.shape) :]):
            table, index = gathered
            inner = (self.marker(index), *axes[len(index.value.shape) :])
            return self.of(Operand(table, inner), count)
        return [(1.0, self._number((value, place))) for place in _signature(axes, count)]

    def _pointwise(self, node: Node, axes: Axes, count: int) -> list[Element]:
        if (scaling := scale_of(node)) is not None:
            found = self.of(Operand(scaling[0], axes), count)
            return [(scaling[1] * factor, number) for factor, number in found]
        sides = [self.of(side, count) for side in sides_of(node, axes)]
        entries = zip(*sides, strict=True)
        if node.op == "aten.mul.Tensor":
            return [self.product(entry) for entry in entries]
        key = (node.op, hashable(node.attrs), tuple(source is None for source in node.inputs))
        return [(1.0, self._number((key, *entry))) for entry in entries]

    def product(self, elements: Iterable[Element]) -> Element:
        """The product of elements, in whatever order they come."""
        factor, numbers = 1.0, []
        for number, element in elements:
            factor *= number
            numbers += self._products.get(element, [element] if element != ONE else [])
        if len(numbers) < 2:
            return factor, numbers[0] if numbers else ONE
        made = self._number(("product", *sorted(numbers)))
        self._products[made] = sorted(numbers)
        return factor, made

    def marker(self, index: Operand) -> tuple[Atom]:
        """An axis that stands for rows chosen by `index`: the same for the same choice."""
        key = (index.value, tuple(tuple(map(id, resolve(dim))) for dim in index.axes))
        return (self._markers.setdefault(key, Atom(0)),)

    def _number(self, key: Hashable) -> int:
        return self._ids.setdefault(key, len(self._ids))

    def _constant(self, value: Value, axes: Axes, count: int) -> list[Element]:
        """Columns of a constant are compared bit for bit; single elements are numbers."""
        fixed = [dim for dim in range(len(axes)) if known(axes[dim], count) is not None]
        varied = [dim for dim in range(len(axes)) if dim not in fixed]
        lead = tuple(tuple(map(_atom, resolve(axes[dim]))) for dim in varied)
        data = value.data
        if data is None or data.numel() > _LARGEST or any("column" in dim for dim in lead):
            return [(1.0, self._number((value, place))) for place in _signature(axes, count)]
        flat = [0] * count
        for dim in fixed:
            index = known(axes[dim], count) or []
            flat = [at * int(value.shape[dim]) + i for at, i in zip(flat, index, strict=True)]
        if not varied and not data.is_complex():
            return [(float(data.flatten()[at]), ONE) for at in flat]
        classes = self._columns(value, data, varied, fixed)
        return [(1.0, self._number((value, lead, classes[at]))) for at in flat]

    def _columns(
        self, value: Value, data: torch.Tensor, varied: list[int], fixed: list[int]
    ) -> list[int]:
        """For each combination of the fixed dims, what tells its column from others."""
        key = (value, tuple(varied))
        if key not in self._classes:
            rows = data.detach().permute(*varied, *fixed)
            rows = rows.reshape(*(data.shape[dim] for dim in varied), -1)
            columns = rows.reshape(-1, rows.shape[-1]) if varied else rows.reshape(1, -1)
            contents = columns.t().clone(memory_format=torch.contiguous_format).view(torch.uint8)
            seen: dict[bytes, int] = {}
            self._classes[key] = [
                seen.setdefault(content.tobytes(), at)
                for at, content in enumerate(contents.cpu().numpy())
            ]
        return self._classes[key]


def is_pointwise(node: Node) -> bool:
    """Whether each element of the only output depends on the inputs' elements at its place."""
    return len(node.outputs) == 1 and node.op in POINTWISE | CAST


def _atom(atom: Atom) -> Hashable:
    return "column" if isinstance(atom, Column) else (id(atom), atom.const)


def _signature(axes: Axes, count: int) -> list[Hashable]:
    """For each place, which variable or which index every dim has."""
    result: list[Hashable] = []
    flat: Sequence[tuple[Atom, ...]] = [resolve(dim) for dim in axes]
    for place in range(count):
        result.append(
            tuple(
                tuple(
                    (atom.places[place], str(atom.size))
                    if isinstance(atom, Column)
                    else _atom(atom)
                    for atom in dim
                )
                for dim in flat
            )
        )
    return result
