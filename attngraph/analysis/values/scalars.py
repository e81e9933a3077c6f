"""Numbers hidden in graphs: 0-d constants, `full` tensors, and scalar operands."""

from __future__ import annotations

import math
from numbers import Real
from typing import TypeAlias

import torch

from attngraph.ir import Node, Value
from attngraph.ir.dims import symbols_of
from attngraph.ir.ops import attribute, evaluate
from attngraph.ir.traits import ADDITIVE, CAST, EXPAND, LAYOUT, POINTWISE, RANDOM, RESHAPE, TRIANGLE

Filling: TypeAlias = tuple[Value, Value, bool, float]
"""(x, predicate, keep, fill): x with `fill` where the predicate is not `keep`."""
_FORMULA = 4


def is_cast(node: Node) -> bool:
    """Whether a node only converts its input's dtype."""
    return node.op in CAST


def widens(node: Node) -> bool:
    """Whether a node is a cast that keeps every value of its input.

    Only such a cast can be left out of a formula. One to fewer bits rounds, and a float beyond the
    range of the new dtype becomes infinite.
    """
    source = node.inputs[0] if node.inputs else None
    if source is None or not is_cast(node):
        return False
    return keeps_values(source.dtype, node.output.dtype)


def keeps_values(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether each number of one dtype is one of the other."""
    if source == target or source == torch.bool:
        return True
    if source.is_floating_point or source.is_complex:
        return torch.promote_types(source, target) == target
    if target.is_floating_point:
        return torch.iinfo(source).max * torch.finfo(target).eps <= 2
    return not target.is_complex and torch.promote_types(source, target) == target


def narrows_no_more(node: Node, result: torch.dtype) -> bool:
    """Whether a cast rounds no more than `result` does, the dtype in which all of it is returned.

    To leave it out is then within the rounding of the result, as long as nothing overflows in it.
    """
    target = node.output.dtype
    if not (is_cast(node) and target.is_floating_point and result.is_floating_point):
        return False
    return torch.finfo(target).eps <= torch.finfo(result).eps


def uniform(value: Value | None, depth: int = _FORMULA) -> float | None:
    """The number that every element of a value equals, where that is known.

    `depth` is how many pointwise functions of numbers are looked through: a sum of all layers'
    results is one as well.
    """
    if value is None:
        return None
    if value.data is not None:
        data = value.data
        if data.is_complex() or data.numel() == 0 or data.numel() > 4096:
            return None
        first = data.detach().flatten()[0]
        return float(first) if bool((data == first).all()) else None
    node = value.producer
    if node is None:
        return None
    if node.op == "aten.full":
        found = number(attribute(node, "fill_value"))
        return None if found is None else converted(found, value.dtype)
    if node.op in RESHAPE | EXPAND:
        return uniform(node.inputs[0], depth)
    if is_cast(node):
        found = uniform(node.inputs[0], depth)
        return found if found is None or widens(node) else converted(found, value.dtype)
    is_formula = depth > 0 and node.op in POINTWISE and node.op not in RANDOM
    return _of_uniform(node, depth - 1) if is_formula else None


def _of_uniform(node: Node, depth: int) -> float | None:
    """The number that a pointwise function gives of such operands, as −1e9 times ones."""
    if symbols_of(list(node.attrs.values())):
        return None
    given = []
    for source in node.inputs:
        found = None if source is None else uniform(source, depth)
        if source is None or found is None:
            return None
        shape = (1,) if source.shape else ()  # some operators take single numbers alone
        given.append(torch.full(shape, found, dtype=torch.float64).to(source.dtype))
    (made,) = evaluate(node, given, {})
    return None if made.is_complex() else float(made)


def converted(number: float, dtype: torch.dtype) -> float:
    """A number as a dtype holds it: rounded, or infinite beyond its range."""
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def number(value: object) -> float | None:
    """A Python number as a float; None for a symbolic one."""
    return float(value) if isinstance(value, (Real, bool)) else None


def shift_of(node: Node) -> float | None:
    """c, where a node of `SHIFT` computes x + c for a known number c."""
    other, alpha = number(attribute(node, "other")), number(attribute(node, "alpha"))
    if other is None or alpha is None:
        return None
    return -alpha * other if "sub" in node.op else alpha * other


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


def is_binary(value: Value | None) -> bool:
    """Whether every element is provably 0 or 1."""
    if value is None:
        return False
    if value.dtype == torch.bool:
        return True
    if value.data is not None:
        data = value.data
        return not data.is_complex() and bool(((data == 0) | (data == 1)).all())
    if uniform(value) in (0.0, 1.0):
        return True
    node = value.producer
    if node is None or not node.inputs:
        return False
    if node.op == "aten.mul.Tensor":
        return all(is_binary(side) for side in node.inputs)
    if node.op == "aten.scatter.value":
        return number(attribute(node, "value")) in (0, 1) and is_binary(node.inputs[0])
    if node.op == "aten.scatter.src":
        return is_binary(node.inputs[0]) and is_binary(node.inputs[2])
    return node.op in LAYOUT | CAST | TRIANGLE and is_binary(node.inputs[0])


def blend_of(node: Node) -> Filling | None:
    """As `fill_of`, for m·x ± c·(1 - m) with m of zeros and ones."""
    if node.op not in ADDITIVE or attribute(node, "alpha") != 1:
        return None
    subtracts = node.op == "aten.sub.Tensor"
    for index in (0,) if subtracts else (0, 1):
        kept, filled = node.inputs[index], node.inputs[1 - index]
        product = kept.producer if kept is not None else None
        if product is None or product.op != "aten.mul.Tensor":
            continue
        for side in (0, 1):
            source, predicate = product.inputs[side], product.inputs[1 - side]
            if source is None or predicate is None or not is_binary(predicate):
                continue
            fill = _filled_by(filled, predicate)
            if fill is not None:
                return source, predicate, True, -fill if subtracts else fill
    return None


def _filled_by(value: Value | None, predicate: Value) -> float | None:
    """c where the value is c·(1 - m) for the given m; c ≠ 0."""
    found = _complement(value)
    if found is not None and found[1] is predicate:
        return found[0]
    if value is None or value.data is None or predicate.data is None:
        return None
    low, high = (float(bound) for bound in value.data.detach().aminmax())
    fill = low if abs(low) > abs(high) else high
    wanted = fill * (1 - predicate.data.to(value.dtype))
    if fill == 0 or not torch.broadcast_to(wanted, value.data.shape).equal(value.data):
        return None
    return fill


def _complement(value: Value | None) -> tuple[float, Value] | None:
    """(c, m) where the value is c·(1 - m)."""
    node = value.producer if value is not None else None
    if node is None:
        return None
    if (scaling := scale_of(node)) is not None and node.op != "aten.neg":
        inner = _complement(scaling[0])
        return None if inner is None else (scaling[1] * inner[0], inner[1])
    source = node.inputs[0] if node.inputs else None
    if node.op == "aten.rsub.Scalar" and attribute(node, "other") == 1 and source is not None:
        return 1.0, source
    if node.op == "aten.sub.Tensor" and uniform(source) == 1.0 and node.inputs[1] is not None:
        return 1.0, node.inputs[1]
    return None


def fill_of(node: Node) -> Filling | None:
    """Where a node puts a number in the place of some elements."""
    if node.op != "aten.where.self":
        return None
    predicate, chosen, other = node.operands
    if (fill := uniform(other)) is not None:
        return chosen, predicate, True, fill
    if (fill := uniform(chosen)) is not None:
        return other, predicate, False, fill
    return None
