"""Writes the ordered biases and masks of a site as one masking: a float bias and a bool mask."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from attngraph.analysis.attention.logits import Bias, Mask
from attngraph.analysis.attention.roles import Roles
from attngraph.analysis.attention.terms import broadcastable
from attngraph.analysis.layout.axes import Axes, Operand
from attngraph.analysis.masks.masking import Masking
from attngraph.analysis.masks.nans import may_be_nan
from attngraph.analysis.masks.reach import may_hide
from attngraph.analysis.masks.row_policy import ABSORBING_FILL, WEAKEST_FILL
from attngraph.analysis.masks.terms import magnitude
from attngraph.ir import Builder, Value
from attngraph.ir.dims import same
from attngraph.passes.rewriting.materialize import materialize


def written(
    build: Builder,
    scores: Axes,
    dtype: torch.dtype,
    steps: Sequence[Bias | Mask],
    rows: str,
    *,
    causal: bool,
) -> Masking:
    """The masking of an attention in a dtype whose logits take the steps, inner first.

    `rows` is what a row without keys gives, `scores` the axes to which bias and mask broadcast.
    """
    steps, rows = _averaged(steps, rows, dtype)
    writer = _Writer(build, scores, dtype)
    writer.apply(steps)
    return Masking(writer.bias, writer.mask, causal, rows)


def cleared(build: Builder, roles: Roles, query: Value, steps: Sequence[Bias | Mask]) -> Value:
    """The query (B, S, H·D) with 0 in rows in which a fill is written over every score.

    There a NaN of the query is gone. A fill that an operator adds to it would leave it; the other
    rows keep theirs.
    """
    masks = [step for step in steps if isinstance(step, Mask) and not step.times]
    if not any(math.isfinite(step.fill) for step in masks) or not may_be_nan([query]):
        return query
    writer = _Writer(build, roles.scores, query.dtype)
    kept = functools.reduce(writer._and, map(writer._kept, masks))
    seen = build("aten.any.dim", kept, dim=-1, keepdim=True)
    rank = len(seen.shape)
    last = zip(seen.shape, roles.scores[-rank:], strict=True)
    axes = [() if same(size, 1) else axis for size, axis in last]
    where = materialize(build, Operand(seen, tuple(axes)), roles.query, broadcast=False)
    zero = build.constant(torch.zeros((), dtype=query.dtype), "zero")
    return build("aten.where.self", where, query, zero)


@dataclass
class _Writer:
    """Emits the steps in order. `bias` broadcasts to (B, H, S, T), `mask` is True where allowed.

    A finite fill replaces what was added before it, also a -inf: the mask opens there again. It is
    written as one that absorbs every logit, so that a row of fills alone is a mean, as it was.
    """

    build: Builder
    scores: Axes
    dtype: torch.dtype
    bias: Value | None = None
    mask: Value | None = None

    def apply(self, steps: Sequence[Bias | Mask]) -> None:
        """Adds the steps, inner first."""
        fills = [step.fill for step in steps if isinstance(step, Mask)]
        is_weak = any(-math.inf < ABSORBING_FILL < fill for fill in fills)
        for group in _groups(steps):
            if isinstance(group, Bias):
                self._add(group)
                continue
            kept = self._kept(group[0])
            for step in group[1:]:
                kept = self.build("aten.logical_and", kept, self._kept(step))
            if math.isfinite(group[0].fill):
                fill = _deeper(group[0].fill) if is_weak else group[0].fill
                # A fill of float64 beyond the dtype stays a number: -inf would be another row.
                self._fill(kept, max(fill, torch.finfo(self.dtype).min))
            else:
                self.mask = kept if self.mask is None else self._and(self.mask, kept)

    def _and(self, left: Value, right: Value) -> Value:
        return self.build("aten.logical_and", left, right)

    def _placed(self, operand: Operand) -> Value:
        found = broadcastable(operand, self.scores)
        if found is None:
            raise ValueError(f"{operand.value!r} has axes that the scores lack.")
        return materialize(self.build, *found)

    def _add(self, step: Bias) -> None:
        term = self.build.cast(self._placed(step.operand), self.dtype)
        if step.factor != 1.0:
            term = self.build("aten.mul.Scalar", term, other=step.factor)
        self._sum(term)
        if step.floor is not None:
            self.bias = self.build("aten.clamp_min", self.bias, min=step.floor)

    def _sum(self, term: Value) -> None:
        both = self.bias is not None
        self.bias = self.build("aten.add.Tensor", self.bias, term) if both else term

    def _kept(self, step: Mask) -> Value:
        kept = self.build.cast(self._placed(step.operand), torch.bool)
        return kept if step.keep else self.build("aten.logical_not", kept)

    def _fill(self, kept: Value, fill: float) -> None:
        constant = self.build.constant(torch.tensor(fill, dtype=self.dtype), "fill")
        if self.bias is None or magnitude(self.bias) < -ABSORBING_FILL:
            zero = self.build.constant(torch.zeros((), dtype=self.dtype), "zero")
            self._sum(self.build("aten.where.self", kept, zero, constant))
        else:
            self.bias = self.build("aten.where.self", kept, self.bias, constant)
        if self.mask is not None:
            opened = self.build("aten.logical_not", kept)
            self.mask = self.build("aten.logical_or", self.mask, opened)


def _deeper(fill: float) -> float:
    """A fill that absorbs any logit, in the order of the fills: -1.1e20 to -5e28."""
    return 1.1 * ABSORBING_FILL * math.sqrt(math.sqrt(fill / WEAKEST_FILL))


def _groups(steps: Sequence[Bias | Mask]) -> Iterator[Bias | list[Mask]]:
    """Runs of masks with one fill act as one."""
    run: list[Mask] = []
    for step in steps:
        if run and (isinstance(step, Bias) or step.fill != run[0].fill):
            yield run
            run = []
        if isinstance(step, Bias):
            yield step
        else:
            run.append(step)
    if run:
        yield run


def _averaged(
    steps: Sequence[Bias | Mask], rows: str, dtype: torch.dtype
) -> tuple[Sequence[Bias | Mask], str]:
    """The steps, and what a row without keys gives, without fills that the dtype can't hold.

    float16 has no number that absorbs any logit. A fill that replaces them all makes such a row the
    mean of the values: then it may as well be -inf, and the row policy a mean.
    """
    masks = [step for step in steps if isinstance(step, Mask)]
    fills = {step.fill for step in masks}
    if torch.finfo(dtype).min <= ABSORBING_FILL or len(fills) != 1 or math.isinf(*fills):
        return steps, rows
    before = steps[: steps.index(masks[0])]
    biases = [step for step in steps if isinstance(step, Bias)]
    if len(biases) > len(before) or any(may_hide(step.operand.value) for step in biases):
        return steps, rows
    hidden = [replace(s, fill=-math.inf) if isinstance(s, Mask) else s for s in steps]
    return hidden, "mean"


def dtype_for(steps: Sequence[Bias | Mask], dtype: torch.dtype) -> torch.dtype:
    """The dtype, of those of operands and biases, that holds each bias that may hide keys."""
    for step in steps:
        value = step.operand.value
        if isinstance(step, Bias) and value.dtype.is_floating_point and may_hide(value):
            dtype = torch.promote_types(dtype, value.dtype)
    return dtype
