"""Keys that may be NaN, where a fill that is written over their scores would hide it."""

from __future__ import annotations

from collections.abc import Sequence

from attngraph.analysis.attention.logits import Factor, Mask
from attngraph.analysis.attention.site import SDPA, Site
from attngraph.analysis.masks.nans import keeping_nan, may_be_zero, nan_makers
from attngraph.ir import Node, Value


def nan_of_keys(
    site: Site, key: Value, factors: Sequence[Factor], values: Sequence[Value]
) -> Node | None:
    """What may make NaN of the keys or their factors, but not of `values`, where a fill hides it.

    A hidden key that is NaN is as good as any other there; an operator adds its mask to the score,
    as torch's own does, and the whole row is NaN. A value that is NaN makes a row NaN in either, as
    where keys and values are computed from one tensor; not where a mask writes 0 over such values.
    """
    fills = any(isinstance(step, Mask) and not step.times for step in site.steps)
    if not fills or site.anchor.op == SDPA:
        return None
    makers = nan_makers([key, *values_of(factors)], keeping_nan(values))
    for divisor in values_of([factor for factor in factors if factor.divides]):
        if divisor.producer is not None and may_be_zero(divisor):
            makers.add(divisor.producer)
    return min(makers, key=lambda maker: maker.number, default=None)


def values_of(factors: Sequence[Factor]) -> list[Value]:
    """The tensors among the factors."""
    return [factor.operand.value for factor in factors if factor.operand is not None]
