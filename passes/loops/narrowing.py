"""Takes away an axis along which a value is the same everywhere, by the ops that make it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from attngraph.analysis.layout.element_ids import is_pointwise
from attngraph.ir import Builder, Node, Value
from attngraph.ir.dims import product, same
from attngraph.ir.ops import attribute
from attngraph.ir.traits import EXPAND, RESHAPE, SLICE


@dataclass
class Narrowing:
    """`data` gives a constant's numbers."""

    build: Builder
    data: Callable[[Value], torch.Tensor | None]
    _made: dict[tuple[Value, int], Value | None] = field(default_factory=dict)

    def of(self, value: Value, axis: int) -> Value | None:
        """The value with size 1 along an axis; None where it may differ along it."""
        if value.shape[axis] == 1:
            return value
        known = value, axis
        if known not in self._made:
            node = value.producer
            self._made[known] = (
                self._constant(value, axis) if node is None else self._again(node, axis)
            )
        return self._made[known]

    def _constant(self, value: Value, axis: int) -> Value | None:
        numbers = self.data(value)
        if (
            numbers is None
            or numbers.is_meta
            or not torch.equal(numbers, _first(numbers, axis).expand_as(numbers))
        ):
            return None
        return self.build("aten.slice.Tensor", value, dim=axis, start=0, end=1)

    def _again(self, node: Node, axis: int) -> Value | None:
        shape = list(node.outputs[0].shape)
        source = node.inputs[0] if node.inputs else None
        if node.op in EXPAND and source is not None:
            own = axis - len(shape) + len(source.shape)
            made = source if own < 0 else self.of(source, own)
            shape[axis] = 1
            return None if made is None else self.build("aten.expand", made, size=shape)
        if node.op in RESHAPE and source is not None:
            before = product(shape[:axis])
            for own, size in enumerate(source.shape):
                if same(size, shape[axis]) and same(product(source.shape[:own]), before):
                    made = self.of(source, own)
                    shape[axis] = 1
                    return None if made is None else self.build("aten.reshape", made, shape=shape)
            return None
        if node.op in SLICE and source is not None and attribute(node, "dim") % len(shape) != axis:
            made = self.of(source, axis)
            return None if made is None else self.build(node.op, made, **node.attrs)
        if not is_pointwise(node):
            return None
        inputs: list[Value | None] = []
        for value in node.inputs:
            own = axis - len(shape) + (0 if value is None else len(value.shape))
            inner = value if value is None or own < 0 else self.of(value, own)
            if inner is None and value is not None:
                return None
            inputs.append(inner)
        return self.build(node.op, *inputs, **node.attrs)


def _first(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x.narrow(axis, 0, 1)
