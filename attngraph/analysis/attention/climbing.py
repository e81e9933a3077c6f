"""Steps up from an operand, which keep its axes: past layout, into a concatenation, under a sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attngraph.analysis.layout.axes import Atom, Axes, Operand, climb, fresh_axes, sides_of
from attngraph.analysis.values.scalars import number, widens
from attngraph.ir import Node
from attngraph.ir.ops import attribute
from attngraph.ir.traits import JOIN, PLAIN_SOFTMAX

_MOST_PLACES = 32


def past_layout(operand: Operand) -> Operand | None:
    """Past a layout op, a cast to more bits, or the 0 that Python's `sum` begins with."""
    node = operand.value.producer
    if node is None or not node.inputs or node.inputs[0] is None:
        return None
    is_zero = node.op == "aten.add.Scalar" and number(attribute(node, "other")) == 0
    if widens(node) or is_zero:
        return Operand(node.inputs[0], operand.axes)
    return climb(operand)


def softmax_of(operand: Operand) -> tuple[Operand, int] | None:
    """(x, its axis) where a value is softmax(x)."""
    node = operand.value.producer
    source = None if node is None or node.op not in PLAIN_SOFTMAX else node.inputs[0]
    if node is None or source is None or source.dtype != operand.value.dtype:
        return None
    return Operand(source, operand.axes), attribute(node, "dim") % len(source.shape)


def chosen_part(operand: Operand) -> Operand | None:
    """The part of a concatenation in which a fixed place lies."""
    node = operand.value.producer
    if node is None or node.op not in JOIN:
        return None
    dim = attribute(node, "dim") % len(operand.axes)
    atoms = operand.dims[dim]
    if len(atoms) != 1 or atoms[0].const is None:
        return None
    place, before, after = atoms[0].const, operand.axes[:dim], operand.axes[dim + 1 :]
    for part in node.operands:
        size = part.shape[dim] if node.op != "aten.stack" else 1
        if not isinstance(size, int):
            return None
        if place < size:
            index = () if size == 1 else (Atom(size, place),)
            inner = (*before, *after) if node.op == "aten.stack" else (*before, index, *after)
            return Operand(part, inner)
        place -= size
    return None


def at_places(source: Operand, dim: int) -> list[Operand]:
    """A value at each place of an axis, if these are few."""
    size = source.value.shape[dim]
    few = size if isinstance(size, int) and 1 < size <= _MOST_PLACES else 0
    before, after = source.axes[:dim], source.axes[dim + 1 :]
    return [Operand(source.value, (*before, (Atom(size, at),), *after)) for at in range(few)]


def summed_over(node: Node, axes: Axes) -> tuple[Operand, int] | None:
    """What is summed over one axis, and which that is."""
    dims: Sequence[int] = attribute(node, "dim") or ()
    source = node.inputs[0]
    if len(dims) != 1 or source is None:
        return None
    dim = dims[0] % len(source.shape)
    keys = fresh_axes([source.shape[dim]])[0]
    after = dim + bool(attribute(node, "keepdim"))
    return Operand(source, (*axes[:dim], keys, *axes[after:])), dim


def factored(node: Node, axes: Axes) -> Iterator[tuple[Operand, Operand, int]]:
    """(a side of a product or quotient, the other, its power)."""
    left, right = sides_of(node, axes)
    if node.op == "aten.div.Tensor":
        yield left, right, -1
    else:
        yield left, right, 1
        yield right, left, 1
