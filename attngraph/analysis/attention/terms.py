"""Biases and masks of the scores: where they broadcast, and what refills the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from attngraph.analysis.attention.logits import Bias, Mask
from attngraph.analysis.attention.refusals import Refusal
from attngraph.analysis.attention.roles import computed, stages
from attngraph.analysis.layout.axes import Atom, Axes, Operand, resolve
from attngraph.analysis.layout.cost import cost
from attngraph.analysis.masks.reach import may_hide
from attngraph.analysis.values.scalars import is_binary
from attngraph.analysis.walks import FAR, behind
from attngraph.ir import Value
from attngraph.ir.ops import attribute, evaluate
from attngraph.ir.traits import CAST, COMPLEMENT, POINTWISE, TRUTH


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
    steps: Sequence[Bias | Mask], refills: Sequence[Mask], keys: tuple[Atom, ...]
) -> tuple[Bias | Mask, ...] | Refusal:
    """The steps, once the weights were set to zero where a mask had masked the scores already, or
    in the rows of which it had masked all `keys`.

    That leaves no trace of the fill but in rows where everything is masked, which become zero: as a
    -inf mask that is guarded. A reason where the zeros fall elsewhere, or where a bias may hide a
    row as well: the keys that the mask leaves are NaN there, or share the row with those it fills.
    """
    masks = [step for step in steps if isinstance(step, Mask)]
    if len(masks) != 1:
        return Refusal.WEIGHTS_REFILLED
    kept = predicate_of(masks[0].operand, masks[0].keep)
    numbers = binary_of(masks[0].operand, masks[0].keep)
    for refill in refills:
        found = predicate_of(refill.operand, refill.keep)
        is_same = _same(binary_of(refill.operand, refill.keep), numbers)
        if not (is_same or _leaves_no_key(found, kept, keys)):
            return Refusal.WEIGHTS_REFILLED
    if any(isinstance(step, Bias) and may_hide(step.operand.value) for step in steps):
        return Refusal.WEIGHTS_REFILLED_BIASED
    return tuple(
        replace(step, fill=-math.inf, was=step.fill) if isinstance(step, Mask) else step
        for step in steps
    )


def predicate_of(operand: Operand, keep: bool) -> tuple[Operand, bool]:
    """A predicate above its layouts and complements, and what it is where a key is visible."""
    while True:
        operand = computed(operand)
        node = operand.value.producer
        source = None if node is None or node.op not in COMPLEMENT else node.inputs[0]
        if node is None or source is None or node.output.dtype != torch.bool:  # ~1 is -2
            return operand, keep
        operand, keep = Operand(source, operand.axes), not keep


def binary_of(operand: Operand, keep: bool) -> tuple[Operand, bool]:
    """As `predicate_of`, past casts and comparisons of zeros and ones too: `m == 0` is not m."""
    while True:
        operand, keep = predicate_of(operand, keep)
        node = operand.value.producer
        if node is None or node.op not in POINTWISE | CAST or len(node.inputs) != 1:
            return operand, keep
        source = node.source
        if not is_binary(source):
            return operand, keep
        numbers = [torch.tensor(number, dtype=source.dtype) for number in (0, 1)]
        at_zero, at_one = (float(evaluate(node, [number], {})[0]) for number in numbers)
        if {at_zero, at_one} != {0.0, 1.0}:
            return operand, keep
        operand, keep = Operand(source, operand.axes), keep == bool(at_one)


def decided_by(operand: Operand) -> list[Value]:
    """The bools that decide a mask, above the numbers that are made of them: else its own.

    Nothing decides a table or a part of one, whose numbers are known: a leaf might have any.
    """
    own, (binary, _) = predicate_of(operand, True)[0].value, binary_of(operand, True)
    found = behind([binary.value], lambda node: node.outputs[0].dtype != torch.bool)
    if bools := [value for value in found if value.dtype == torch.bool]:
        return bools
    made = [*behind([own], lambda _: True)]
    is_table = len(made) < FAR and all(value.producer or value.is_constant for value in made)
    return [] if is_table else [own]


def _same(one: tuple[Operand, bool], other: tuple[Operand, bool]) -> bool:
    (first, keep), (second, kept) = one, other
    if first.dims != second.dims:
        return False
    if first.value is second.value:
        return keep == kept
    data, others = first.value.data, second.value.data
    if data is None or others is None or data.is_meta or others.is_meta:
        return False
    return torch.equal(data.bool() == keep, others.bool() == kept)


def _leaves_no_key(
    found: tuple[Operand, bool], mask: tuple[Operand, bool], keys: tuple[Atom, ...]
) -> bool:
    """Whether a predicate holds in the rows where a mask leaves a key: where any of its keys, or
    not all that it hides, is visible.
    """
    (rows, keep), node = found, found[0].value.producer
    if node is None or node.op not in TRUTH or node.inputs[0] is None:
        return False
    if node.op.startswith("aten.any") != keep:
        return False
    source, dims = node.inputs[0], attribute(node, "dim")
    dims = dims if isinstance(dims, list | tuple) else [dims]
    if len(dims) != 1 or dims[0] is None:
        return False
    (dim,) = (each % len(source.shape) for each in dims)
    reduced = Atom(source.shape[dim])
    after = dim + 1 if attribute(node, "keepdim") else dim
    axes = (*rows.axes[:dim], (reduced,), *rows.axes[after:])
    (of_keys, visible), (hides, kept) = predicate_of(Operand(source, axes), keep), mask
    if of_keys.value is not hides.value or visible != kept:
        return False
    wanted = set(resolve(keys))
    return all(
        set(theirs) == wanted if reduced in mine else mine == theirs
        for mine, theirs in zip(of_keys.dims, hides.dims, strict=True)
    ) and any(reduced in mine for mine in of_keys.dims)
