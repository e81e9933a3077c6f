"""Biases and masks of the scores: where they broadcast, and what refills the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from attngraph.analysis.attention.logits import Bias, Mask
from attngraph.analysis.attention.refusals import Refusal
from attngraph.analysis.attention.roles import computed, stages
from attngraph.analysis.layout.axes import Axes, Operand, resolve
from attngraph.analysis.layout.cost import cost
from attngraph.analysis.masks.reach import may_hide


def broadcastable(operand: Operand, scores: Axes) -> tuple[Operand, Axes] | None:
    """The cheapest stage of a bias or mask, and its axes: size 1 where it has none.

    None where it has axes that the scores lack.
    """
    best: tuple[int, int] | None = None
    chosen: tuple[Operand, Axes] | None = None
    for index, stage in enumerate(stages(operand)):
        if stage.factor != 1.0:
            break
        have = set(stage.operand.atoms)
        target = tuple(dim if have & set(resolve(dim)) else () for dim in scores)
        needed = cost(stage.operand, target)
        if needed is not None and (best is None or (needed, index) < best):
            best, chosen = (needed, index), (stage.operand, target)
    return chosen


def refilled(
    steps: Sequence[Bias | Mask], refills: Sequence[Mask]
) -> tuple[Bias | Mask, ...] | Refusal:
    """The steps, once the weights were set to zero where a mask had masked the scores already.

    That leaves no trace of the fill but in rows where everything is masked, which become zero: as a
    -inf mask that is guarded. A reason where the zeros fall elsewhere, or where a bias may hide a
    row as well: the keys that the mask leaves are NaN there, or share the row with those it fills.
    """
    masks = [step for step in steps if isinstance(step, Mask)]
    if len(masks) != 1 or any(not _same(masks[0], refill) for refill in refills):
        return Refusal.WEIGHTS_REFILLED
    if any(isinstance(step, Bias) and may_hide(step.operand.value) for step in steps):
        return Refusal.WEIGHTS_REFILLED_BIASED
    return tuple(replace(s, fill=-math.inf) if isinstance(s, Mask) else s for s in steps)


def _same(mask: Mask, other: Mask) -> bool:
    first, second = computed(mask.operand), computed(other.operand)
    return first.value is second.value and first.dims == second.dims and mask.keep == other.keep
