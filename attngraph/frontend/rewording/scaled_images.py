"""`interpolate` by factors that are computed from sizes: torch would make constants of these.

Vision towers stretch a table of positions by `(height / patch + 0.1) / side`. Each axis is computed
as torch documents it: of each new place the nearest old ones, weighed by how far away they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

_PARAMETERS = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")
_CUBIC = -0.75
_Taps = list[tuple[int, torch.Tensor]]
"""How far old places lie behind the one on the left, and their weights (n,)."""


def scaled(
    func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> torch.Tensor | None:
    """The result of a call; None where it has no such factors, or torch no formula."""
    if func is not F.interpolate:
        return None
    given = dict(zip(_PARAMETERS, args, strict=False)) | dict(named)
    image, factors = given["input"], given.get("scale_factor")
    axes = range(2, image.dim())
    if not isinstance(factors, (list, tuple)):
        factors = [factors] * len(axes)
    if not any(isinstance(factor, torch.SymFloat) for factor in factors):
        return None
    mode, corners = given.get("mode", "nearest"), bool(given.get("align_corners"))
    sizes = [
        math.floor(image.shape[axis] * factor) for axis, factor in zip(axes, factors, strict=True)
    ]
    if given.get("recompute_scale_factor") or corners:
        found: torch.Tensor = F.interpolate(
            image,
            size=sizes,
            mode=mode,
            align_corners=given.get("align_corners"),
            antialias=given.get("antialias", False),
        )
        return found
    if mode not in _TAPS or given.get("antialias") or not image.is_floating_point():
        return None
    return stretched(image, sizes, factors, mode)


def stretched(
    image: torch.Tensor, sizes: Sequence[Any], factors: Sequence[Any], mode: str
) -> torch.Tensor:
    """An image (B, C, …) with these sizes, by these factors, as torch's kernels compute it."""
    for axis, (size, factor) in enumerate(zip(sizes, factors, strict=True), start=2):
        old = image.shape[axis]
        step = torch.full((), 1.0 / factor, dtype=image.dtype, device=image.device)
        place = torch.arange(size, device=image.device).to(image.dtype)
        source = (place + 0.5) * step - 0.5
        if mode != "bicubic":  # as long as before is a copy, whatever the factor
            source = torch.where(place * 0 + size == old, place, source.clamp(min=0))
        left = source.floor()
        shape = [-1 if each == axis else 1 for each in range(image.dim())]
        parts = [
            image.index_select(axis, (left.long() + at).clamp(0, old - 1)) * weight.view(shape)
            for at, weight in _TAPS[mode](source - left)
        ]
        image = torch.stack(parts).sum(0)
    return image


def _linear(share: torch.Tensor) -> _Taps:
    return [(0, 1 - share), (1, share)]


def _cubic(share: torch.Tensor) -> _Taps:
    """Keys' convolution, as torch has it with a = −0.75."""

    def near(x: torch.Tensor) -> torch.Tensor:
        return ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1

    def far(x: torch.Tensor) -> torch.Tensor:
        return ((_CUBIC * x - 5 * _CUBIC) * x + 8 * _CUBIC) * x - 4 * _CUBIC

    return [(-1, far(share + 1)), (0, near(share)), (1, near(1 - share)), (2, far(2 - share))]


_TAPS: dict[str, Callable[[torch.Tensor], _Taps]] = {
    "linear": _linear,
    "bilinear": _linear,
    "trilinear": _linear,
    "bicubic": _cubic,
}
