"""What may be NaN where inputs are finite: rows without keys, means of nothing, and rows of zeros
that are divided by their own norm, or of which the logarithm is taken.

A fill that is written over a score takes NaN away; a number that is added to it doesn't. Operators
add their masks, so it matters where scores may be NaN. Inputs and weights count as numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf

from attngraph.analysis.masks.masking import masking_of
from attngraph.analysis.masks.reach import is_bounded
from attngraph.analysis.values.intervals import Intervals
from attngraph.analysis.values.scalars import number
from attngraph.ir import Node, TensorType, Value
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import (
    CAST,
    CHOICE,
    LAYOUT,
    LOG_SOFTMAX,
    LOGARITHM,
    MAGNITUDE,
    POWER,
    RECIPROCAL,
    REDUCTION,
    ROOT,
    SOFTMAX,
)

_ZERO_AT_ZERO = CAST | LAYOUT | MAGNITUDE | POWER | ROOT


def may_be_nan(values: Iterable[Value | None]) -> bool:
    """Whether one of the values depends on what a model itself may make NaN."""
    return bool(nan_makers(values))


def nan_makers(values: Iterable[Value | None], known: Collection[Value] = ()) -> set[Node]:
    """The nodes that may make NaN of numbers, and on which one of the values depends other than by
    those that are `known`."""
    given = [value for value in values if value is not None]
    _, above = backward_slice(given, lambda value: value in known or _has_no_nan(value))
    return {node for node in above if _makes_nan(node)}


def keeping_nan(values: Iterable[Value]) -> set[Value]:
    """Values whose NaN reaches the given ones: no choice or `nan_to_num` takes it away."""

    def is_chosen(value: Value) -> bool:
        return _has_no_nan(value) or (value.producer is not None and value.producer.op in CHOICE)

    leaves, above = backward_slice(values, is_chosen)
    return {*leaves, *(value for node in above for value in node.outputs)}


def may_be_zero(divisor: Value | None) -> bool:
    """Whether a divisor is a count, or a sum or norm of a row, that may be 0.

    A row of zeros is no rare thing, as any other number is: padding is one.
    """
    while divisor is not None and divisor.producer is not None:
        node = divisor.producer
        counts = not divisor.dtype.is_floating_point
        if counts or node.op in REDUCTION:
            return _includes_zero(divisor)
        if node.op not in _ZERO_AT_ZERO and node.op != "aten.mul.Scalar":
            return False
        divisor = node.inputs[0]
    return False


def _has_no_nan(value: Value) -> bool:
    node = value.producer
    counts = not isinstance(value.type, TensorType) or not value.dtype.is_floating_point
    return counts or (node is not None and node.op == "aten.nan_to_num")


def _makes_nan(node: Node) -> bool:
    if node.op == "attn.attention":
        masking = masking_of(node)
        hides = masking.mask is not None or masking.is_bounded
        hides |= masking.bias is not None and not is_bounded(masking.bias, inf)
        return masking.masked_rows == "nan" and hides
    if node.op in SOFTMAX | LOG_SOFTMAX:
        logits = node.inputs[0]
        return logits is not None and not is_bounded(logits, inf)
    if node.op in LOGARITHM and node.op != "aten.log1p":
        return _includes_zero(node.inputs[0])
    if node.op == "aten.div.Tensor":
        return may_be_zero(node.inputs[1])
    return _is_reciprocal(node) and may_be_zero(node.inputs[0])


def _includes_zero(value: Value | None) -> bool:
    low, high = Intervals().of(value)
    return low <= 0 <= high


def _is_reciprocal(node: Node) -> bool:
    """Whether it is a reciprocal, which is infinite at 0: times a row of zeros, that is NaN."""
    if node.op != "aten.pow.Tensor_Scalar":
        return node.op in RECIPROCAL
    exponent = number(attribute(node, "exponent"))
    return exponent is not None and exponent < 0
