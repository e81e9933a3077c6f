"""Rows of numbers that are divided by their Euclidean norm, however the division is written."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from attngraph.analysis.values.scalars import number, shift_of, uniform
from attngraph.analysis.walks import stripped
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute
from attngraph.ir.traits import (
    CAST,
    CLAMP,
    COPY,
    EXPAND,
    LAYOUT,
    MAXIMUM,
    MEAN,
    RESHAPE,
    ROOT,
    SHIFT,
    SUM,
)

_NORM = "aten.linalg_vector_norm"
_WIDEST = 1 << 20  # numbers of a row whose count isn't known


@dataclass(frozen=True)
class _Norm:
    """What is at least |x| along the last axis, and at least `least`; `by_mean` is |x| / √D."""

    x: Value
    least: float
    by_mean: bool = False


@dataclass(frozen=True)
class Divided:
    """x / y of a y that is at least |x| along the last axis, or |x| / √D if `by_mean`.

    It `vanishes` where nothing may be left of x's squares while y isn't larger than its numbers:
    what is divided by |x| alone may be infinite.
    """

    x: Value
    by_mean: bool
    vanishes: bool


def divided_by_norm(node: Node) -> Divided | None:
    """Rows that a node divides by their norm, or by more."""
    if len(node.inputs) != 2:
        return None
    first, second = node.inputs
    if first is None or second is None:
        return None
    pairs: list[tuple[Value, _Norm | None]] = []
    if node.op == "aten.div.Tensor":
        pairs = [(first, _root(second))]
    elif node.op == "aten.mul.Tensor":
        pairs = [(first, _inverse(second)), (second, _inverse(first))]
    for (x, norm), y in zip(pairs, (second, first), strict=False):
        if norm is not None and _is_of_its_row(y, x) and _is_same(x, norm.x):
            return Divided(x, norm.by_mean, vanishes=norm.least <= _lost(norm.x))
    return None


def _lost(x: Value) -> float:
    """The norm up to which nothing may be left of squares that are summed up in x's dtype."""
    width = x.shape[-1]
    size = width if isinstance(width, int) else _WIDEST
    return math.sqrt(size * torch.finfo(x.dtype).tiny)


def _inverse(value: Value) -> _Norm | None:
    """The norm |x| that a value is 1 over, or less."""
    node = _maker(value)
    source = None if node is None else _first(node)
    if node is None or source is None:
        return None
    if node.op == "aten.rsqrt":
        return _root_of(source)
    return _root(source) if node.op == "aten.reciprocal" else None


def _first(node: Node) -> Value | None:
    """What a node reads first, of which an arange has none."""
    return node.inputs[0] if node.inputs else None


def _root(value: Value) -> _Norm | None:
    """The norm |x| that a value is, or more."""
    node, least = _raised(value)
    source = None if node is None else _first(node)
    if node is None or source is None:
        return None
    if node.op in ROOT:
        found = _root_of(source)
        return None if found is None else replace(found, least=max(least, found.least))
    if node.op != _NORM or number(attribute(node, "ord")) != 2 or not _is_of_rows(node):
        return None
    return _Norm(source, least)


def _root_of(value: Value) -> _Norm | None:
    """The norm |x| whose square a value is, or more."""
    node, least = _raised(value)
    if node is None or node.op not in SUM | MEAN or not _is_of_rows(node):
        return None
    squares = None if node.inputs[0] is None else node.inputs[0].producer
    if squares is None:
        return None
    x = _first(squares)
    is_square = (
        squares.op == "aten.square"
        or (squares.op == "aten.pow.Tensor_Scalar" and attribute(squares, "exponent") == 2)
        or (squares.op == "aten.mul.Tensor" and squares.inputs[1] is x)
    )
    return _Norm(x, math.sqrt(least), node.op in MEAN) if is_square and x is not None else None


def _is_of_rows(node: Node) -> bool:
    """Whether a reduction is along the last axis alone."""
    source, axes = node.inputs[0], attribute(node, "dim")
    return source is not None and axes is not None and list(axes) in ([-1], [len(source.shape) - 1])


def _is_of_its_row(y: Value, x: Value) -> bool:
    """Whether y, before it is expanded, has a number for each row of x."""
    return stripped(y, EXPAND).shape == (*x.shape[:-1], 1)


def _raised(value: Value) -> tuple[Node | None, float]:
    """What makes y of max(y, ε) or y + ε, and ε, which is 0 of y itself."""
    node, least = _maker(value), 0.0
    while node is not None and (raise_ := _raise(node)) is not None:
        least = max(least, raise_)
        source = node.inputs[0]
        node = None if source is None else _maker(source)
    return node, least


def _raise(node: Node) -> float | None:
    """ε of a node that computes max(y, ε) or y + ε of ε ≥ 0."""
    found = None
    if node.op in CLAMP and len(node.inputs) == 1 and node.attrs.get("max") is None:
        found = number(node.attrs.get("min"))
    elif node.op in MAXIMUM or (node.op == "aten.add.Tensor" and attribute(node, "alpha") == 1):
        found = uniform(node.inputs[1])
    elif node.op in SHIFT:
        found = shift_of(node)
    return found if found is not None and found >= 0 else None


def _maker(value: Value) -> Node | None:
    """What makes a value, but for its size and for how its numbers are rounded."""
    node = value.producer
    while node is not None and node.op in EXPAND | RESHAPE | COPY | CAST:
        source = node.inputs[0]
        if source is None or not node.output.dtype.is_floating_point:
            return None
        node = source.producer
    return node


def _is_same(one: Value, other: Value) -> bool:
    """Whether two values have the same elements in the same places, but for their dtype."""
    one, other = _uncast(one), _uncast(other)
    while one is not other:
        first, second = one.producer, other.producer
        if first is None or second is None or first.op not in LAYOUT or first.op != second.op:
            return False
        if first.attrs != second.attrs or one.index != other.index or one.shape != other.shape:
            return False
        if first.inputs[1:] != second.inputs[1:]:
            return False
        sources = first.inputs[0], second.inputs[0]
        if sources[0] is None or sources[1] is None:
            return False
        one, other = _uncast(sources[0]), _uncast(sources[1])
    return True


def _uncast(value: Value) -> Value:
    while (node := value.producer) is not None and node.op in CAST | COPY:
        source = node.inputs[0]
        if source is None or not source.dtype.is_floating_point:
            break
        value = source
    return value
