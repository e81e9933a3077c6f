"""Numbers hidden in graphs: 0-d constants, `full` tensors, and scalar operands."""

from __future__ import annotations

import math
from numbers import Real

from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.axes import COPIES, RESHAPES

_CASTS = frozenset(["aten._to_copy", "aten.to.dtype"])


def is_cast(node: Node) -> bool:
    """Whether a node only converts its input's dtype."""
    return node.op in _CASTS


def uniform(value: Value | None) -> float | None:
    """The number that every element of a value equals, where that is known."""
    if value is None:
        return None
    if value.data is not None:
        data = value.data
        if data.is_complex() or data.numel() == 0 or data.numel() > 4096:
            return None
        first = data.flatten()[0]
        return float(first) if bool((data == first).all()) else None
    node = value.producer
    if node is None:
        return None
    match node.op:
        case "aten.full" | "aten.full_like" | "aten.new_full":
            return number(attribute(node, "fill_value"))
        case "aten.scalar_tensor":
            return number(attribute(node, "s"))
        case "aten.zeros" | "aten.zeros_like" | "aten.new_zeros":
            return 0.0
        case "aten.ones" | "aten.ones_like" | "aten.new_ones":
            return 1.0
        case "aten.expand":
            return uniform(node.inputs[0])
    if node.op in RESHAPES or node.op in COPIES or is_cast(node):
        return uniform(node.inputs[0])
    return None


def number(value: object) -> float | None:
    """A Python number as a float; None for a symbolic one."""
    return float(value) if isinstance(value, (Real, bool)) else None


def scale_of(node: Node) -> tuple[Value, float] | None:
    """(x, c) where the node computes c·x for a known number c ≠ 0."""
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return None
    match node.op:
        case "aten.mul.Scalar" | "aten.div.Scalar":
            factor = number(attribute(node, "other"))
        case "aten.neg":
            return source, -1.0
        case "aten.mul.Tensor":
            other = node.inputs[1]
            factor = uniform(other)
            if factor is None:
                source, factor = other, uniform(source)
        case "aten.div.Tensor":
            factor = uniform(node.inputs[1])
        case _:
            return None
    if factor is None or source is None or factor == 0 or not math.isfinite(factor):
        return None
    if source.dtype != node.output.dtype or source.shape != node.output.shape:
        return None
    return source, 1 / factor if node.op.startswith("aten.div") else factor


def fill_of(node: Node) -> tuple[Value, Value, bool, float] | None:
    """(x, predicate, keep, fill) where the node puts `fill` where the predicate is not `keep`."""
    if node.op.startswith("aten.masked_fill."):
        source, predicate = node.inputs[:2]
        fill = (
            number(attribute(node, "value"))
            if node.op.endswith("Scalar")
            else uniform(input_of(node, "value"))
        )
        if source is None or predicate is None or fill is None:
            return None
        return source, predicate, False, fill
    if node.op == "aten.where.self":
        predicate, chosen, other = node.inputs
    elif node.op == "aten.where.ScalarOther":
        predicate, chosen = node.inputs
        fill = number(attribute(node, "other"))
        if predicate is None or chosen is None or fill is None:
            return None
        return chosen, predicate, True, fill
    elif node.op == "aten.where.ScalarSelf":
        predicate, other = node.inputs
        fill = number(attribute(node, "self"))
        if predicate is None or other is None or fill is None:
            return None
        return other, predicate, False, fill
    else:
        return None
    if predicate is None or chosen is None or other is None:
        return None
    if (fill := uniform(other)) is not None:
        return chosen, predicate, True, fill
    if (fill := uniform(chosen)) is not None:
        return other, predicate, False, fill
    return None
