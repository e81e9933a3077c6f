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

from tests.fuzz.rounded import rounded

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
        shown = (lambda each: each) if valid is None else (lambda each: [t[valid] for t in each])
        eager, exact, found = shown(eager), shown(exact), shown(found)
        for place, (one, y, e) in enumerate(zip(found, exact, eager, strict=True)):
            told = judged(one, y, [e], self.rounding)
            if told[0]:
                nudged = [shown(self.nudged(tensors, seed))[place] for seed in range(RUNS)]
                told = judged(one, y, [e, *nudged], self.rounding)
            if told[0]:
                others = [shown(self.rounded(tensors, seed))[place] for seed in range(2 * RUNS)]
                told = judged(one, y, [e, *nudged], self.rounding, apart(e, others))
            yield told

    def rounded(self, tensors: Args, seed: int) -> list[Tensor]:
        """Outputs of a run that is rounded otherwise at every op; see tests/fuzz/rounded.py."""
        halves = self.rounding == ROUNDINGS["fp16"]
        with rounded(seed, self.rounding.eps / EPS if halves else 1.0):
            return self(*tensors)

    def nudged(self, tensors: Args, seed: int) -> list[Tensor]:
        """Outputs of weights and inputs that are off by one rounding; in 8 bits, the inputs of all
        linears are.
        """
        random = torch.Generator().manual_seed(seed)
        eps, eight = self.rounding.eps, self.rounding == ROUNDINGS["int8"]

        def nudge(tensor: Tensor, is_weight: bool = False) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            if is_weight and eight:
                return _moved(tensor, random)
            sign = torch.randint(0, 2, tensor.shape, generator=random) * 2 - 1
            whole = (tensor == tensor.round()) | ~tensor.isfinite()
            return torch.where(whole, tensor, tensor * (1 + sign * eps / 2))

        weights = {n: nudge(value, value.ndim > 1) for n, value in self.module.named_parameters()}
        moved = tuple(map(nudge, tensors))
        with _Rounded(random) if eight else nullcontext():
            return flat(torch.func.functional_call(self.module, weights, moved))


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


def apart(eager: Tensor, runs: Sequence[Tensor]) -> Tensor:
    """How far any of the runs is from eager's, at each element."""
    off = [(run.double() - eager.double()).abs().nan_to_num(0.0) for run in runs]
    return torch.stack(off).amax(0)


def over(
    found: Tensor,
    exact: Tensor,
    runs: Sequence[Tensor],
    rounding: Rounding = Rounding(),
    spread: Tensor | float = 0.0,
) -> str:
    """How a result is further from float64 than rounding takes eager's runs; see `judged`."""
    return judged(found, exact, runs, rounding, spread)[0]


def judged(
    found: Tensor,
    exact: Tensor,
    runs: Sequence[Tensor],
    rounding: Rounding = Rounding(),
    spread: Tensor | float = 0.0,
) -> tuple[str, Tensor]:
    """How a result is further from float64, or where that is another function from eager, than
    rounding takes eager's runs; and which elements are not. NaN stands where one of them has it.
    Of those that rounding takes elsewhere by `spread`, each by its own, no more is asked.
    """
    eager = runs[0].double()
    scale = float(exact[exact.isfinite()].abs().max()) if bool(exact.isfinite().any()) else 0.0
    off = [(run.double() - exact).abs() for run in runs]
    sound = off[0] <= _SOUND * EPS * scale
    close = [o[o <= _SOUND * rounding.eps * scale] for o in off]
    measured = max((float(each.max()) for each in close if each.numel()), default=0.0)
    limit = _FACTOR * max(measured, rounding.floor * rounding.eps * scale)
    target = torch.where(sound, exact, eager)
    moved = torch.as_tensor(spread, dtype=torch.float64)
    allowed = limit + _FACTOR * torch.where(sound, moved, moved.maximum(apart(eager, runs)))
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
