"""How far scores and biases reach: whether fills are below them, and whether biases may cancel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attngraph.analysis.attention.logits import Bias, Mask
from attngraph.analysis.attention.site import Site
from attngraph.analysis.layout.axes import resolve
from attngraph.analysis.masks.reach import is_scorelike, may_hide
from attngraph.analysis.masks.row_policy import ABSORBING_FILL, WEAKEST_FILL
from attngraph.analysis.values.intervals import Interval, Intervals
from attngraph.analysis.values.scalars import is_cast, number, scale_of, shift_of
from attngraph.ir import Value
from attngraph.ir.ops import attribute
from attngraph.ir.traits import LAYOUT, SHIFT

_MODERATE = 1e12  # float32 has digits left for logits of some units next to it, or absorbs them
_DEPTH = 64
_PARTLY = 2.0**-8, 4.0
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


def summed_first(steps: Sequence[Bias | Mask]) -> float | None:
    """What a bias takes from masked scores, where (s + A) + C isn't rounded as s + (A + C).

    Beside A = -1e6 float32 keeps multiples of 1/16, of s + C or of s: see `rounded_otherwise`.
    """
    biases = [step for step in steps if isinstance(step, Bias)]
    if len(biases) < 2:
        return None
    units = [_unit(bias.operand.value) * abs(bias.factor) for bias in biases]
    return min((-unit for unit in units if -WEAKEST_FILL < unit < _MODERATE), default=None)


def _unit(value: Value, depth: int = _DEPTH) -> float:
    """A number that a value is a whole multiple of, as c · (1 - mask) is of c; 0 if there is none.

    Floats of which nothing is known, such as a caller's mask, are taken for zeros and ones: of what
    else has so large a factor in a bias, sums are rounded otherwise as well.
    """
    node = value.producer
    if node is None or depth == 0 or not value.dtype.is_floating_point:
        return 1.0
    if (scaling := scale_of(node)) is not None:
        return abs(scaling[1]) * _unit(scaling[0], depth - 1)
    reverses = node.op == "aten.rsub.Scalar"
    if not (is_cast(node) or node.op in LAYOUT | SHIFT or reverses):
        return 1.0
    unit = 0.0 if node.inputs[0] is None else _unit(node.inputs[0], depth - 1)
    shift: float | None = 0.0
    if reverses:
        shift, alpha = number(attribute(node, "other")), number(attribute(node, "alpha"))
        unit *= abs(alpha or 0.0)
    elif node.op in SHIFT:
        shift = shift_of(node)
    return 0.0 if unit == 0 or shift is None or math.remainder(shift, unit) else unit


def leaves_part(low: float) -> bool:
    """Whether scores that are added to such a number lose digits to it in float32, but not all."""
    first, last = _PARTLY
    return first < -low * torch.finfo(torch.float32).eps < last


def _reach(step: Bias, known: Intervals) -> Interval:
    value = step.operand.value
    if not may_hide(value):
        return -_MODERATE, _MODERATE
    low, high = known.of(value)
    ends = sorted((low * step.factor, high * step.factor))
    return ends[0], ends[1]
