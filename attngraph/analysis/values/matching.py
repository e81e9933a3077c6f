"""Small readings that the arithmetic fusions share: offsets, scales, polynomials, sole readers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attngraph.analysis.values.scalars import number, scale_of, uniform
from attngraph.ir import Graph, Node, TensorType, Value
from attngraph.ir.dims import same_shape
from attngraph.ir.ops import attribute

_DEPTH = 6  # the longest chain in the GELUs that people write is four ops
_DEGREE = 3

Polynomial = dict[int, float]


def producer(value: Value | None, *ops: str) -> Node | None:
    """The node that makes a value, where its op is one of `ops`."""
    node = None if value is None else value.producer
    return node if node is not None and node.op in ops else None


def only_read_by(graph: Graph, value: Value, node: Node) -> bool:
    """Whether nothing but one operand of `node` needs the value."""
    uses = value.uses
    return len(uses) == 1 and uses[0][0] is node and value not in graph.outputs


def same_type(a: Value, b: Value) -> bool:
    """Equal dtype and provably equal shape."""
    if not isinstance(a.type, TensorType) or not isinstance(b.type, TensorType):
        return False
    return a.dtype == b.dtype and same_shape(a.shape, b.shape)


def without_trailing(*inputs: Value | None) -> list[Value | None]:
    """Inputs without the absent ones at the end, which a node doesn't store."""
    kept = list(inputs)
    while kept and kept[-1] is None:
        kept.pop()
    return kept


def equals(found: float, expected: float, dtype: torch.dtype) -> bool:
    """Whether two numbers are one to the dtype's rounding."""
    return abs(found - expected) <= torch.finfo(dtype).eps * abs(expected)


def scalings(value: Value) -> Iterator[tuple[Value, float]]:
    """(x, c) with value = c·x: the value itself, then up through each constant factor."""
    factor = 1.0
    while True:
        yield value, factor
        scaling = None if value.producer is None else scale_of(value.producer)
        if scaling is None:
            return
        value, factor = scaling[0], factor * scaling[1]


def offset_of(node: Node) -> tuple[Value, float] | None:
    """(x, c) where the node computes x + c for a known number c."""
    is_shift = node.op == "aten.add.Scalar"
    if not (is_shift or node.op == "aten.add.Tensor") or attribute(node, "alpha") != 1:
        return None
    source = node.inputs[0]
    if is_shift:
        added = number(attribute(node, "other"))
    else:
        other = node.inputs[1]
        added = uniform(other)
        if added is None:
            source, added = other, uniform(source)
    if source is None or added is None or not same_type(source, node.output):
        return None
    return source, added


def polynomial(value: Value, x: Value, depth: int = _DEPTH) -> Polynomial | None:
    """A value as a polynomial in x of degree 3 at most, {power: coefficient}; None if it isn't.

    Every intermediate has x's type, so that nothing is broadcast or rounded to another dtype.
    """
    if value is x:
        return {1: 1.0}
    node = value.producer
    if node is None or depth == 0 or not same_type(value, x):
        constant = uniform(value)
        return None if constant is None else {0: constant}
    if (scaling := scale_of(node)) is not None:
        return _times(polynomial(scaling[0], x, depth - 1), {0: scaling[1]})
    if (offset := offset_of(node)) is not None:
        return _plus(polynomial(offset[0], x, depth - 1), {0: offset[1]})
    operands = [None if v is None else polynomial(v, x, depth - 1) for v in node.inputs]
    match node.op:
        case "aten.mul.Tensor":
            return _times(*operands)
        case "aten.square":
            return _times(operands[0], operands[0])
        case "aten.pow.Tensor_Scalar":
            exponent = attribute(node, "exponent")
            if exponent not in (2, 3):
                return None
            square = _times(operands[0], operands[0])
            return square if exponent == 2 else _times(square, operands[0])
        case "aten.add.Tensor" | "aten.sub.Tensor":
            factor = number(attribute(node, "alpha"))
            if factor is None:
                return None
            sign = -factor if node.op == "aten.sub.Tensor" else factor
            return _plus(operands[0], _times(operands[1], {0: sign}))
    return None


def _times(a: Polynomial | None, b: Polynomial | None) -> Polynomial | None:
    if a is None or b is None:
        return None
    result: Polynomial = {}
    for i, x in a.items():
        for j, y in b.items():
            result[i + j] = result.get(i + j, 0.0) + x * y
    return result if max(result) <= _DEGREE else None


def _plus(a: Polynomial | None, b: Polynomial | None) -> Polynomial | None:
    if a is None or b is None:
        return None
    return {power: a.get(power, 0.0) + b.get(power, 0.0) for power in a.keys() | b.keys()}


def is_polynomial(value: Value, x: Value, expected: Polynomial) -> bool:
    """Whether a value is that polynomial in x, to the rounding of x's dtype."""
    found = polynomial(value, x)
    if found is None or found.keys() != expected.keys():
        return False
    return all(equals(found[power], expected[power], x.dtype) for power in expected)
