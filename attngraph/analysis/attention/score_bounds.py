"""How far scores and biases reach: whether fills are below them, and whether biases may cancel."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attngraph.analysis.attention.logits import Bias, Mask
from attngraph.analysis.attention.site import Site
from attngraph.analysis.layout.axes import resolve
from attngraph.analysis.masks.reach import is_scorelike, may_hide
from attngraph.analysis.masks.row_policy import ABSORBING_FILL
from attngraph.analysis.values.intervals import Interval, Intervals

_MODERATE = 1e12  # float32 has digits left for logits of some units next to it, or absorbs them
_UNDERFLOW = 104.0  # exp(-104) is 0 in float32


def weak_fills(steps: Sequence[Bias | Mask]) -> list[float]:
    """The finite fills of the graph that a logit could reach."""
    masks = [step for step in steps if isinstance(step, Mask)]
    fills = [mask.fill if mask.was is None else mask.was for mask in masks]
    return [fill for fill in fills if fill > ABSORBING_FILL]


def times_zero(steps: Sequence[Bias | Mask]) -> list[Bias]:
    """The biases of any number that a mask multiplies by 0 where it hides them."""
    last = max((at for at, s in enumerate(steps) if isinstance(s, Mask) and s.times), default=0)
    before = [step for step in steps[:last] if isinstance(step, Bias)]
    return [step for step in before if not is_scorelike(step.operand.value)]


def is_unreached(site: Site) -> bool:
    """Whether every score with its biases is proved to lie so far above the fills that a key under
    a fill has no weight beside one that is visible."""
    known = Intervals(weights=True)
    reach = site.softcap or _product(site, known)
    for step in site.steps:
        if isinstance(step, Bias):
            reach += abs(step.factor) * known.largest(step.operand.value)
    highest = max(weak_fills(site.steps), default=-math.inf)
    return reach + _UNDERFLOW < -highest


def _product(site: Site, known: Intervals) -> float:
    """A bound of |scale · ⟨q, k⟩|."""
    if any(factor.operand is None for factor in site.factors):
        return math.inf
    bound = abs(site.scale)
    for factor in site.factors:
        assert factor.operand is not None
        if factor.divides:
            return math.inf
        bound *= known.largest(factor.operand.value)
    for side in (site.query[0].operand, site.key[0].operand):
        bound *= known.largest(side.value)
    sizes = [atom.size for atom in resolve(site.roles.features)]
    if not all(isinstance(size, int) for size in sizes):
        return math.inf
    return bound * math.prod(int(size) for size in sizes)


def may_cancel(steps: Sequence[Bias | Mask]) -> bool:
    """Whether (s + A) + C may differ from s + (A + C) by more than rounding.

    It does where A is so large that it absorbs s, and C so low that it takes A away.
    """
    known = Intervals()
    reaches = [_reach(step, known) for step in steps if isinstance(step, Bias)]
    return any(
        high > _MODERATE and low < -_MODERATE
        for place, (_, high) in enumerate(reaches)
        for low, _ in (*reaches[:place], *reaches[place + 1 :])
    )


def rounded_otherwise(steps: Sequence[Bias | Mask]) -> float | None:
    """The least number of a bias that hides keys, where (s + A) · c isn't rounded as s · c + A · c.

    Beside A = -1e9 float32 keeps multiples of 64 alone of s, which are all that weighs the keys of
    a row in which every key is hidden. No power of two changes which, and an A that absorbs every
    score leaves nothing of them.
    """
    known = Intervals()
    lows = [
        known.of(step.operand.value)[0] * abs(step.factor)
        for step in steps
        if isinstance(step, Bias)
        and math.frexp(abs(step.factor))[0] != 0.5
        and may_hide(step.operand.value)
    ]
    return min((low for low in lows if -_MODERATE < low < 0), default=None)


def _reach(step: Bias, known: Intervals) -> Interval:
    value = step.operand.value
    if not may_hide(value):
        return -_MODERATE, _MODERATE
    low, high = known.of(value)
    ends = sorted((low * step.factor, high * step.factor))
    return ends[0], ends[1]
