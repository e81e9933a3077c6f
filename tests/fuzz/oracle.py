"""What a module gives in float64, and how far rounding takes float32 and narrower kinds from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

Args = tuple[Tensor, ...]
Forward = Callable[..., Sequence[Tensor]]
_T = TypeVar("_T")
EPS = torch.finfo(torch.float32).eps
_FACTOR, RUNS = 4.0, 8
_SOUND = (
    2.0**13
)  # what rounding explains, in epsilons; a finite fill is another function in float64

_PRODUCT_OVERFLOWS = 2.0**63  # the square of larger numbers is none of float32


@dataclass(frozen=True)
class Rounding:
    """The relative distance of two neighbours, and how many of them are no news."""

    eps: float = EPS
    floor: float = 16.0


ROUNDINGS: Mapping[str, Rounding] = {
    "fp16": Rounding(2.0**-10),
    "int8": Rounding(2.0**-7),
}
"""Those of what is computed in few bits; for what is only stored so, see tests/fuzz/stored.py."""


class _Rounded(TorchFunctionMode):
    """Inputs of linears are off as where each row of them is rounded to 8 bits."""

    def __init__(self, random: torch.Generator) -> None:
        super().__init__()
        self.random = random

    def __torch_function__(
        self, function: Any, types: Any, given: Any = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        if function is nn.functional.linear:
            given = _moved(given[0], self.random), *given[1:]
        return function(*given, **(named or {}))


def _moved(tensor: Tensor, random: torch.Generator) -> Tensor:
    """Each element up or down by half a step of its row in 8 bits."""
    sign = torch.randint(0, 2, tensor.shape, generator=random) * 2 - 1
    return tensor + sign * tensor.abs().amax(-1, keepdim=True) * ROUNDINGS["int8"].eps / 2


class Oracle:
    """Eager's outputs, and how far from float64 rounding takes them.

    `other` is that of what a report says that the model counts as: its numbers are right as well.
    """

    def __init__(
        self,
        module: nn.Module,
        doubled: nn.Module,
        rounding: Rounding,
        other: Oracle | None = None,
    ) -> None:
        self.module, self.doubled, self.rounding = module, doubled, rounding
        self.other = other

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        return flat(self.module(*tensors))

    def differs(self, run: Forward, tensors: Args, label: str, valid: Tensor | None = None) -> str:
        """What is wrong with a run's outputs on these inputs, in `valid` rows, or nothing."""
        found = list(run(*tensors))
        eager = self(*tensors)
        if [t.shape for t in found] != [t.shape for t in eager]:
            return f"{label}: shapes {[tuple(t.shape) for t in found]}"
        told = list(self._told(found, tensors, valid))
        if self.other is not None and any(text for text, _ in told):
            others = self.other._told(found, tensors, valid)
            told = [
                ("" if bool((one | two).all()) else text, one)
                for (text, one), (_, two) in zip(told, others, strict=True)
            ]
        return "; ".join(f"{label}: output {i} {said}" for i, (said, _) in enumerate(told) if said)

    def _told(
        self, found: Sequence[Tensor], tensors: Args, valid: Tensor | None
    ) -> Iterator[tuple[str, Tensor]]:
        """What is wrong with each output, or nothing, and which elements are right."""
        eager = self(*tensors)
        wide = tuple(t.double() if t.is_floating_point() else t for t in tensors)
        exact = in_float64(lambda: flat(self.doubled(*wide)))
        if valid is not None:
            eager, exact, found = ([t[valid] for t in each] for each in (eager, exact, found))
        noise = [[e] for e in eager]
        if any(self._judged(f, *both)[0] for f, *both in zip(found, exact, noise, strict=True)):
            others = [self.nudged(tensors, seed) for seed in range(RUNS)]
            if valid is not None:
                others = [[t[valid] for t in each] for each in others]
            noise = [[e, *more] for e, *more in zip(eager, *others, strict=True)]
        for place, (f, y, runs) in enumerate(zip(found, exact, noise, strict=True)):
            told = self._judged(f, y, runs)
            if told[0] and valid is None:
                told = judged(f, y, runs, self.rounding, self._cancelled(wide, place))
            yield told

    def _cancelled(self, wide: Args, place: int) -> float:
        """The scale of what cancels in an output that is 0 but for float64's rounding, else 0.

        A running mean of equal rows, taken from each, is such a one. Weights off by one rounding of
        float64 give another number altogether there.
        """
        runs = [
            flat(in_float64(lambda seed=seed: self.nudged(wide, seed, self.doubled)))[place]
            for seed in range(2)
        ]
        known = [each.abs().nan_to_num(0.0, 0.0) for each in (runs[0] - runs[1], runs[0])]
        apart, size = (float(each.max()) if each.numel() else 0.0 for each in known)
        return size / torch.finfo(torch.float64).eps if apart > size / 16 else 0.0

    def _judged(self, found: Tensor, exact: Tensor, runs: Sequence[Tensor]) -> tuple[str, Tensor]:
        return judged(found, exact, runs, self.rounding)

    def nudged(self, tensors: Args, seed: int, module: nn.Module | None = None) -> list[Tensor]:
        """Outputs of weights and inputs that are off by one rounding; in 8 bits, the inputs of all
        linears are.
        """
        random = torch.Generator().manual_seed(seed)
        eps = self.rounding.eps if module is None else 8 * torch.finfo(torch.float64).eps
        eight = module is None and self.rounding == ROUNDINGS["int8"]
        module = module or self.module

        def nudge(tensor: Tensor, is_weight: bool = False) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            if is_weight and eight:
                return _moved(tensor, random)
            sign = torch.randint(0, 2, tensor.shape, generator=random) * 2 - 1
            whole = (tensor == tensor.round()) | ~tensor.isfinite()
            return torch.where(whole, tensor, tensor * (1 + sign * eps / 2))

        weights = {n: nudge(value, value.ndim > 1) for n, value in module.named_parameters()}
        moved = tuple(map(nudge, tensors))
        with _Rounded(random) if eight else nullcontext():
            return flat(torch.func.functional_call(module, weights, moved))


def in_float64(run: Callable[[], _T]) -> _T:
    """What it gives where tensors are made in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        return run()
    finally:
        torch.set_default_dtype(torch.float32)


def flat(outputs: Any) -> list[Tensor]:
    """The tensors of what a module returns."""
    return [leaf for leaf in _pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def doubled(text: str, module: nn.Module) -> nn.Module:
    """The module of a source in float64, with the float32 module's parameters and buffers."""
    source: Any = ModuleType("doubled")
    exec(
        re.sub(r"\.float\(\)", ".double()", text.replace("torch.float32", "torch.float64")),
        source.__dict__,
    )
    torch.set_default_dtype(torch.float64)
    try:
        found: nn.Module = getattr(source, type(module).__name__)().double().eval()
    finally:
        torch.set_default_dtype(torch.float32)
    found.load_state_dict(module.state_dict())
    return found.requires_grad_(False)


def over(
    found: Tensor,
    exact: Tensor,
    runs: Sequence[Tensor],
    rounding: Rounding = Rounding(),
) -> str:
    """How a result is further from float64 than rounding takes eager's runs; see `judged`."""
    return judged(found, exact, runs, rounding)[0]


def judged(
    found: Tensor,
    exact: Tensor,
    runs: Sequence[Tensor],
    rounding: Rounding = Rounding(),
    cancelled: float = 0.0,
) -> tuple[str, Tensor]:
    """How a result is further from float64, or where that is another function from eager, than
    rounding takes eager's runs; and which elements are not. NaN stands where one of them has it.
    Terms of the size `cancelled` leave their rounding behind.
    """
    eager = runs[0].double()
    scale = float(exact[exact.isfinite()].abs().max()) if bool(exact.isfinite().any()) else 0.0
    scale = max(scale, cancelled)
    off = [(run.double() - exact).abs() for run in runs]
    sound = off[0] <= _SOUND * EPS * scale
    close = [o[o <= _SOUND * rounding.eps * scale] for o in off]
    measured = max((float(each.max()) for each in close if each.numel()), default=0.0)
    limit = _FACTOR * max(measured, rounding.floor * rounding.eps * scale)
    target = torch.where(sound, exact, eager)
    spread = torch.stack([(run.double() - eager).abs().nan_to_num(0.0) for run in runs]).amax(0)
    allowed = torch.where(sound, limit, limit + _FACTOR * spread)
    wide = found.double()
    right = ((wide - target).abs() <= allowed) | (wide == target)
    right |= wide.isnan() & (eager.isnan() | exact.isnan())
    # eager overflowed on its way to what float64 has: a run that didn't is no worse
    right |= ~eager.isfinite() & ((wide - exact).abs() <= limit)
    if scale > _PRODUCT_OVERFLOWS:  # which intermediate does is a matter of the order of factors
        right |= ~wide.isfinite()
    if bool(right.all()):
        return "", right
    worst = (wide - target).abs().nan_to_num(torch.inf).where(~right, 0.0)
    said = (
        f"{int((~right).sum())} of {right.numel()} elements are off by up to "
        f"{float(worst.max()):.2g}, where {limit:.2g} is rounding"
    )
    return said, right
