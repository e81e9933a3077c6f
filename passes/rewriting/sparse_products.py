"""Products without the rows of a weight that meet zeros only.

The result is exactly the whole product's, since a zero times a finite weight is zero.
"""

from __future__ import annotations

from typing import Any

from attngraph.ir import Node
from attngraph.ir.ops import attribute

_LEAST = 1 << 16  # elements of an operand from which leaving rows out pays
# op → (the positions of the two operands, their summed axes)
_SUMMED = {
    "aten.linear": ((0, -1), (1, -1)),
    "aten.mm": ((0, -1), (1, -2)),
    "aten.bmm": ((0, -1), (1, -2)),
    "aten.matmul": ((0, -1), (1, -2)),
    "aten.addmm": ((1, -1), (2, -2)),
}
PRODUCTS = frozenset([*_SUMMED, "aten.einsum"])


def only_needed(node: Node, inputs: list[Any]) -> list[Any]:
    """The inputs of a product without the summed positions at which one operand is zero."""
    if all(value is None or value.numel() < _LEAST for value in inputs):
        return inputs
    if node.op != "aten.einsum":
        return _cut(inputs, *_SUMMED[node.op])
    terms, _, result = attribute(node, "equation").replace(" ", "").partition("->")
    labels = terms.split(",")
    if len(labels) != 2 or "." in terms or not result:
        return inputs
    for label in sorted(set(labels[0]) & set(labels[1]) - set(result)):
        first, second = (term.index(label) for term in labels)
        inputs = _cut(inputs, (0, first), (1, second))
    return inputs


def _cut(inputs: list[Any], first: tuple[int, int], second: tuple[int, int]) -> list[Any]:
    (left, left_axis), (right, right_axis) = first, second
    a, b = inputs[left], inputs[right]
    if a.ndim < 2 or b.ndim < 2 or a.shape[left_axis] != b.shape[right_axis]:
        return inputs
    small, axis = (a, left_axis) if a.numel() <= b.numel() else (b, right_axis)
    needed = small.movedim(axis, 0).reshape(small.shape[axis], -1).ne(0).any(1).nonzero()[:, 0]
    if len(needed) == small.shape[axis]:
        return inputs
    result = list(inputs)
    # index_select would first copy a whole operand that isn't contiguous.
    result[left] = a.movedim(left_axis, 0)[needed].movedim(0, left_axis)
    result[right] = b.movedim(right_axis, 0)[needed].movedim(0, right_axis)
    return result
