"""The shapes of a region's values while its sizes are unknowns, and the rules that give them.

A rule gives the shapes of a node's results from those of its operands, and says which sizes go
together; an op without one is read as elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from attngraph.analysis.layout.any_size import Sizes
from attngraph.ir import Dim, Node, Value
from attngraph.ir.ops import input_of

Shape: TypeAlias = tuple[Dim, ...]
FEWEST = 3  # the least size that an axis gets: 1 broadcasts, and 2 has one neighbour each


class Reader:
    """The shapes of what was read so far, by the rules of the ops."""

    def __init__(self, sizes: Sizes, rule_of: Callable[[str], Rule]) -> None:
        self.sizes, self.rule_of = sizes, rule_of
        self.shapes: dict[Value, Shape] = {}
        self.attrs: dict[Node, dict[str, Any]] = {}
        self.queries: dict[Value, Dim] = {}

    def resolved_attrs(self) -> Iterable[tuple[Node, Any]]:
        for node, attrs in self.attrs.items():
            yield node, {name: self.sizes.resolved(value) for name, value in attrs.items()}

    def read(self, node: Node) -> None:
        given = node.operands
        rule = self.rule_of(node.op)
        try:
            found = rule(self, node)
        except (ValueError, TypeError, AttributeError, IndexError):
            found = None  # an operand or attribute that the rule doesn't expect
        if found is None or not self._fits(node, found):
            self.sizes.pin([list(self.shapes[value]) for value in given])
            self.attrs.pop(node, None)
            found = [value.shape for value in node.outputs]
        self.shapes.update(zip(node.outputs, found, strict=True))

    def _fits(self, node: Node, found: Sequence[Shape]) -> bool:
        """Whether these are the shapes that the graph says, as far as numbers tell."""
        number = self.sizes.number
        return len(found) == len(node.outputs) and all(
            [number(dim) for dim in shape] == [number(dim) for dim in value.shape]
            for shape, value in zip(found, node.outputs, strict=True)
        )

    def shape(self, value: Value | None) -> Shape:
        """The shape of an operand. Raises ValueError where it is absent."""
        if value is None:
            raise ValueError
        return self.shapes[value]

    def of(self, node: Node, name: str) -> Shape:
        """The shape of a tensor argument. Raises ValueError where it is absent."""
        return self.shape(input_of(node, name))

    def set(self, node: Node, **attrs: Any) -> None:
        """The attributes of a node that hold sizes, as they are read."""
        self.attrs.setdefault(node, {}).update(attrs)

    def broadcast(self, shapes: Sequence[Shape], rank: int) -> Shape | None:
        """The shape of an elementwise result; None where the shapes don't broadcast."""
        result: list[Dim] = []
        for place in range(1, rank + 1):
            there = [shape[-place] for shape in shapes if len(shape) >= place]
            wide = [dim for dim in there if self.sizes.number(dim) != 1]
            if len({self.sizes.number(dim) for dim in wide}) > 1:
                return None
            for dim in wide[1:]:
                self.sizes.unify(wide[0], dim)
            result.append(wide[0] if wide else 1)
        return tuple(reversed(result))


Rule: TypeAlias = Callable[[Reader, Node], Sequence[Shape] | None]


class Rules(dict[str, Rule]):
    """The rules of some ops, each registered with `@rules.on(op, …)`."""

    def on(self, *ops: str) -> Callable[[Rule], Rule]:
        def register(rule: Rule) -> Rule:
            self.update((op, rule) for op in ops)
            return rule

        return register


def elementwise(reader: Reader, node: Node) -> Sequence[Shape] | None:
    """Whatever has the shape to which its operands broadcast."""
    shapes = [reader.shapes[value] for value in node.operands]
    if not shapes:
        return None
    found = reader.broadcast(shapes, max(map(len, shapes)))
    return None if found is None else [found] * len(node.outputs)


def with_size(shape: Shape, dim: int, size: Dim) -> Shape:
    """The shape with another size along one axis."""
    place = dim % len(shape)
    return (*shape[:place], size, *shape[place + 1 :])
