"""One output of the eager module: its rounding errors, and where its float64 value is sound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from attngraph.export.formats import Precision
from attngraph.export.parity.cancellation import cancelled
from attngraph.export.parity.nudging import is_proportional

DTYPE: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
FEW = 32
"""Elements below which one run's errors are no measure of rounding."""
_SOUND = 2.0**13
"""What rounding explains, in epsilons."""
_WANDER: dict[Precision, float] = {"fp32": 16.0, "fp16": 4.0, "bf16": 4.0}
Norm = Literal["max", "rms"]
NORMS: tuple[Norm, ...] = ("max", "rms")
Group = Literal["ordinary", "outliers", "zeros"]
GROUPS: tuple[Group, ...] = ("ordinary", "outliers", "zeros")


@dataclass(frozen=True)
class Sample:
    """One output's reference. All tensors but `eager` are float64 or masks, of its shape.

    `target` is the float64 value where `sound`, and eager's elsewhere. `errors` are the rounding
    errors of eager's runs where `measured`. `large` marks the outliers, `zero` what is zero but for
    rounding. `either` marks rows in which float32 is sound and eager, in a half dtype, is not.
    """

    eager: torch.Tensor
    exact: torch.Tensor | None
    target: torch.Tensor
    sound: torch.Tensor
    errors: tuple[torch.Tensor, ...]
    measured: torch.Tensor
    large: torch.Tensor
    zero: torch.Tensor
    either: torch.Tensor

    @classmethod
    def of(
        cls,
        eager: torch.Tensor,
        exact: torch.Tensor | None,
        precision: Precision,
        runs: Sequence[torch.Tensor] = (),
        single: torch.Tensor | None = None,
        nudged: Sequence[Sequence[torch.Tensor]] = (),
    ) -> Sample:
        eager = eager.detach().cpu()
        wide = eager.double()
        if exact is None or not eager.is_floating_point():
            none = torch.zeros_like(wide, dtype=torch.bool)
            usual = ~extreme(wide, eager.dtype) if eager.is_floating_point() else none
            return cls(eager, None, wide, none, (), none, _large(wide, usual), none, none)
        exact = exact.cpu().double()
        defined = ~extreme(exact, eager.dtype)
        measured = defined & ~extreme(wide, eager.dtype)
        off = [torch.where(measured, wide - exact, 0.0)]
        for run in runs:
            if run.shape == eager.shape:
                found = run.detach().cpu().double()
                usual = measured & ~extreme(found, eager.dtype)
                off.append(torch.where(usual, found - exact, 0.0))
        zero, most = cancelled(exact, off, measured, eps(precision))
        large = _large(exact, defined & ~zero)
        apart = large | zero
        scale = norm_of(exact[measured & ~apart], "rms")
        limit = min(0.25, _SOUND * eps(precision)) * scale
        explained = [_explained(error, apart, limit) for error in off]
        sound = explained[0] & defined
        measured &= sound
        either = torch.zeros_like(sound)
        if single is not None and single.shape == eager.shape:
            error = (single.detach().cpu().double() - exact).nan_to_num(torch.inf)
            error = torch.where(defined, error, 0.0)
            either = _explained(error, apart, _SOUND * eps("fp32") * scale) & defined & ~sound
            sound = sound | either
        errors = [torch.where(measured, off[0], 0.0)]
        for error, whole in zip(off[1:], explained[1:], strict=True):
            branched = zero & (error.abs() > most)
            errors.append(torch.where(measured & whole & ~branched, error, 0.0))
        for whole, part in nudged:
            if whole.shape != eager.shape:
                continue
            noise, less = whole.double() - exact, part.double() - exact
            told = measured & is_proportional(noise, less) & ~extreme(whole, eager.dtype)
            errors.append(torch.where(told, noise, 0.0))
        target = torch.where(sound, exact, wide)
        return cls(eager, exact, target, sound, tuple(errors), measured, large, zero, either)

    def off(self, candidate: torch.Tensor) -> torch.Tensor:
        """How far each element is from its target; from eager's in whole rows of `either` that are
        nearer to that.
        """
        found = torch.where(extreme(candidate, self.eager.dtype), 0.0, candidate - self.target)
        if not bool(self.either.any()):
            return found
        other = (candidate - self.eager.double()).nan_to_num(torch.inf)
        of_rows = [
            each.square().sum(-1, keepdim=True) if each.dim() else each.square()
            for each in (found, other)
        ]
        return torch.where(self.either & (of_rows[1] < of_rows[0]), other, found)

    def own(self, among: torch.Tensor, norm: Norm) -> float:
        """The largest norm, among these elements, of the errors of eager's runs."""
        return max((norm_of(error[among], norm) for error in self.errors), default=0.0)

    def group(self, kind: Group) -> torch.Tensor:
        """The elements of that kind, without NaN, infinities and finfo.min."""
        apart = {"outliers": self.large, "zeros": self.zero}
        chosen = apart.get(kind, ~(self.large | self.zero))
        return chosen & ~extreme(self.target, self.eager.dtype)


def noise_of(samples: Sequence[Sample], norm: Norm, precision: Precision) -> float:
    """Relative rounding noise of the run's larger outputs: the floor for its small ones."""
    found = []
    for sample in samples:
        if not sample.eager.is_floating_point():
            continue
        ordinary = sample.measured & sample.group("ordinary")
        scale = norm_of(sample.target[ordinary], norm)
        if int(ordinary.sum()) >= FEW and scale > 0:
            found.append(sample.own(ordinary, norm) / scale)
    return max(found, default=_WANDER[precision] * eps(precision))


def norm_of(values: torch.Tensor, norm: Norm) -> float:
    """The largest magnitude or the root mean square; 0 of nothing."""
    if values.numel() == 0:
        return 0.0
    return float(values.abs().max() if norm == "max" else values.square().mean().sqrt())


def _explained(error: torch.Tensor, apart: torch.Tensor, limit: float) -> torch.Tensor:
    """Whether rounding explains a run's error, for each row; what is held apart doesn't count."""
    bulk = torch.where(apart, 0.0, error)
    rows = bulk.square().mean(-1, keepdim=True).sqrt() if bulk.dim() else bulk.abs()
    return rows <= limit


def _large(values: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    size = values.abs()
    nonzero = size[among & (size > 0)]
    if nonzero.numel() == 0:
        return torch.zeros_like(among)
    return among & (size > 256 * nonzero.median())


def extreme(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """NaN, infinite, or finfo.min and its like: within 1 % of the end of `dtype`'s range."""
    return ~(values.abs() < 0.99 * torch.finfo(dtype).max)


def misplaced(candidate: torch.Tensor, sample: Sample) -> torch.Tensor:
    """Where an extreme value occurs that neither reference has, or is missing where both have it.

    Where eager overflows and float64 doesn't, the candidate may do either.
    """
    dtype = sample.eager.dtype
    eager = sample.eager.double()
    agree = _same_extreme(candidate, eager, dtype)
    wanted = extreme(eager, dtype)
    if sample.exact is not None:
        agree |= _same_extreme(candidate, sample.exact, dtype)
        wanted &= extreme(sample.exact, dtype)
    return torch.where(extreme(candidate, dtype), ~agree, wanted)


def _same_extreme(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    near = (left - right).abs() <= 4 * torch.finfo(dtype).eps * right.abs()
    return (left == right) | (left.isnan() & right.isnan()) | (near & right.isfinite())


def eps(precision: Precision) -> float:
    """One unit in the last place, at 1."""
    return float(torch.finfo(DTYPE[precision]).eps)
