"""What may be NaN where inputs are finite: rows without keys, and means of nothing.

A fill that is written over a score takes NaN away; a number that is added to it doesn't. Operators
add their masks, so it matters where scores may be NaN. Inputs and weights count as numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from attngraph.analysis.masks.masking import masking_of
from attngraph.analysis.masks.reach import is_bounded
from attngraph.analysis.values.intervals import Intervals
from attngraph.ir import Node, TensorType, Value
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import CAST, LAYOUT, LOG_SOFTMAX, SOFTMAX, SUM


def may_be_nan(values: Iterable[Value | None]) -> bool:
    """Whether one of the values depends on what a model itself may make NaN."""
    given = [value for value in values if value is not None]
    _, above = backward_slice(given, _has_no_nan)
    return any(map(_makes_nan, above))


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
    return node.op == "aten.div.Tensor" and _may_count_nothing(node.inputs[1])


def _may_count_nothing(divisor: Value | None) -> bool:
    """Whether a divisor is a count, or a sum, that may be 0."""
    while divisor is not None and divisor.producer is not None:
        node = divisor.producer
        counts = not divisor.dtype.is_floating_point
        if counts or node.op in SUM:
            low, high = Intervals().of(divisor)
            return low <= 0 <= high
        if node.op not in CAST | LAYOUT:
            return False
        divisor = node.inputs[0]
    return False
