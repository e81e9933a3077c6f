"""Formulas of pools, as in formulas.py: over windows of one size, and over a number of bins."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attngraph.export.lowering.fallback.pointwise_formulas import FORMULAS, each, formula, known

__all__ = ["FORMULAS"]

_least: Any = torch.sym_min
_most: Any = torch.sym_max


@formula("aten.max_unpool2d", "aten.max_unpool3d")
def _max_unpool(x: Tensor, places: Tensor, output_size: Sequence[Any], *_: Any) -> Tensor:
    axes = len(output_size)
    rest = x.shape[: x.ndim - axes]
    empty = x.new_zeros([*rest, math.prod(output_size)])
    filled = empty.scatter(-1, places.flatten(-axes), x.flatten(-axes))
    return filled.reshape([*rest, *output_size])


def _bins(size: int, count: int) -> list[tuple[int, int]]:
    """Where each part of an axis begins and ends; parts may overlap by one."""
    return [(at * size // count, -(-(at + 1) * size // count)) for at in range(count)]


@dataclass(frozen=True)
class Windows:
    """The arguments of a mean pool beside its input, as ATen orders them."""

    axes: int
    kernel: Sequence[int]
    stride: Sequence[int] = ()
    padding: Sequence[int] = (0,)
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor: int | None = None

    @property
    def by_axis(self) -> tuple[list[int], list[int], list[int]]:
        """Kernel, stride and padding, with a number for each axis."""
        stride = self.stride if len(self.stride) else self.kernel
        kernel, stride, padding = (each(n, self.axes) for n in (self.kernel, stride, self.padding))
        return kernel, stride, padding


def _average(axes: int, x: Tensor, *given: Any, **named: Any) -> Any:
    """Sums over a divisor that is no count; the last window begins in front of the padding."""
    windows = Windows(axes, *given, **named)
    if windows.divisor is None:
        return NotImplemented
    kernel, stride, padding = windows.by_axis
    pads: list[Any] = []
    for size, k, s, p in zip(x.shape[x.ndim - axes :], kernel, stride, padding, strict=True):
        behind: Any = p
        if windows.ceil_mode:
            last = _least((size + 2 * p - k + s - 1) // s, (size + p - 1) // s)
            behind = _most(last * s + k - (size + p), p)
        pads = [p, behind, *pads]
    pool: Any = F.avg_pool3d if axes == 3 else F.avg_pool2d
    return pool(F.pad(x, pads), kernel, stride) * (math.prod(kernel) / windows.divisor)


formula("aten.avg_pool2d")(functools.partial(_average, 2))
formula("aten.avg_pool3d")(functools.partial(_average, 3))


@formula("aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d")
def _adaptive_average_of_runs(x: Tensor, output_size: Sequence[int]) -> Any:
    """torch divides these only for the sizes of one run."""
    sizes = x.shape[x.ndim - len(output_size) :]
    is_known = all(isinstance(size, int) for size in [*sizes, *output_size])
    return NotImplemented if is_known else _adaptive_average(x, output_size)


@formula("aten._adaptive_avg_pool3d")
def _adaptive_average(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Along one axis after another, as the means over the bins of each."""
    for axis, count in enumerate(output_size, x.ndim - len(output_size)):
        size = x.shape[axis]
        if isinstance(size, torch.SymInt) or isinstance(count, torch.SymInt):
            x = _means(x.movedim(axis, -1), size, count).movedim(-1, axis)
            continue
        bins = _bins(size, known(count))
        means = [x.narrow(axis, a, b - a).mean(axis, keepdim=True) for a, b in bins]
        x = torch.cat(means, axis)
    return x


def _means(x: Tensor, size: Any, count: Any) -> Tensor:
    """Means over the bins of a last axis where a run tells its size or the number of bins."""
    if statically_known_true(count == size):
        return x
    if statically_known_true(count == 1):
        return x.mean(-1, keepdim=True)
    parts, _, lengths = _parts(x, size, count, 0.0)
    return parts.sum(-1) / lengths.to(x.dtype)


def _parts(x: Tensor, size: Any, count: Any, fill: float) -> tuple[Tensor, Tensor, Tensor]:
    """The bins of a last axis as rows of one more axis, where each begins, and its length.

    Rows end in `fill`: a bin has at most one place more than its share. What is outside of a bin
    is left out, not multiplied by 0, as it may be NaN.
    """
    at, step = torch.arange(count), torch.arange((size - 1) // count + 2)
    begins, ends = (at * size) // count, ((at + 1) * size + count - 1) // count
    places = (begins[:, None] + step).clamp(max=size - 1)
    rows = x[..., places]
    inside = step < (ends - begins)[:, None]
    return torch.where(inside, rows, torch.full((), fill, dtype=x.dtype)), begins, ends - begins


def _window(x: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    for axis, (a, b) in enumerate(spans, x.ndim - len(spans)):
        x = x.narrow(axis, a, b - a)
    return x


@formula("aten.adaptive_max_pool1d", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d")
def _adaptive_maximum(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The maximum of each window, and its place in the flattened image."""
    axes = len(output_size)
    if any(isinstance(size, torch.SymInt) for size in x.shape[x.ndim - axes :]):
        return _maxima(x, output_size)
    rest = x.shape[: x.ndim - axes]
    sizes = [known(size) for size in x.shape[x.ndim - axes :]]
    places = torch.arange(math.prod(sizes)).reshape(sizes)
    all_bins = [_bins(size, known(n)) for size, n in zip(sizes, output_size, strict=True)]
    values, found = [], []
    for spans in itertools.product(*all_bins):
        value, at = _window(x, spans).flatten(-axes).max(-1)
        values.append(value)
        found.append(_window(places, spans).flatten()[at])
    shape = [*rest, *output_size]
    return torch.stack(values, -1).reshape(shape), torch.stack(found, -1).reshape(shape)


def _maxima(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Along one axis after another, the last first; of equal maxima the first place, as torch."""
    places = None
    for axis in reversed(range(x.ndim - len(output_size), x.ndim)):
        size, count = x.shape[axis], known(output_size[axis - x.ndim])
        parts, begins, _ = _parts(x.movedim(axis, -1), size, count, -math.inf)
        largest, at = parts.max(-1)
        x, at = largest.movedim(-1, axis), (at + begins).movedim(-1, axis)
        if places is None:
            places, stride = at, size
        else:
            places, stride = at * stride + places.gather(axis, at), stride * size
    assert places is not None
    return x, places
