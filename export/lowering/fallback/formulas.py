"""Ops that torch doesn't divide further, in plain torch of ops that have a lowering.

Each takes and returns what its op does. It runs on fake tensors (decompose.py), so a size may be
symbolic; NotImplementedError where it would have to be known. NotImplemented means that this call
needs no formula.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attngraph.export.lowering.fallback import (
    double_formulas,
    indexing_formulas,
    layer_formulas,
    ordering_formulas,
    pooling_formulas,
    solving_formulas,
    special_formulas,
)
from attngraph.export.lowering.fallback.indexing_formulas import along
from attngraph.export.lowering.fallback.pointwise_formulas import FORMULAS, formula, known

__all__ = [
    "FORMULAS",
    "double_formulas",
    "indexing_formulas",
    "layer_formulas",
    "ordering_formulas",
    "pooling_formulas",
    "solving_formulas",
    "special_formulas",
]

_MOST_PLACES = 1 << 31  # of an axis whose length has no limit


@formula("aten.rrelu")
def _rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, g: Any = None
) -> Tensor:
    if training:
        raise NotImplementedError
    return F.leaky_relu(x, (lower + upper) / 2)


def _shifted(x: Tensor, dim: int, by: int, fill: float) -> Tensor:
    """x moved towards the end of an axis, with `fill` where nothing comes from."""
    size = x.shape[dim]
    if isinstance(size, int):
        first = torch.full_like(x.narrow(dim, 0, by), fill)
        return torch.cat([first, x.narrow(dim, 0, size - by)], dim)
    source = torch.arange(size) - by
    moved = x.index_select(dim, source.clamp(min=0))
    is_there = (source >= 0).reshape([-1 if axis == dim % x.ndim else 1 for axis in range(x.ndim)])
    return torch.where(is_there, moved, fill)


def _steps(x: Tensor, dim: int) -> list[int]:
    """The powers of two below a size, or below the most that it may be."""
    size = x.shape[dim] if x.ndim else 1
    if isinstance(size, torch.SymInt):
        most = size.node.shape_env.bound_sympy(size.node.expr).upper
        size = min(int(most), _MOST_PLACES) if most.is_Integer else _MOST_PLACES
    return [1 << step for step in range(max(size - 1, 0).bit_length())]


@formula("aten.linalg_vector_norm")
def _vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """The largest or the smallest absolute value; powers of halves in float32, which holds them."""
    kind = dtype or x.dtype
    if not math.isinf(ord):
        if kind.itemsize >= torch.float32.itemsize or ord in (0, 1, 2):
            return NotImplemented
        wide: Any = torch.linalg.vector_norm(x.float(), ord, dim, keepdim)
        return wide.to(kind)
    size = (x if dtype is None else x.to(dtype)).abs()
    axes = list(range(x.ndim)) if dim is None else [*dim]
    return torch.amax(size, axes, keepdim) if ord > 0 else torch.amin(size, axes, keepdim)


@formula("aten.cumprod")
def _cumprod(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """In ⌈log₂ n⌉ steps, each of which doubles how many elements a product holds.

    Elements that overflow among themselves are NaN behind a 0, where torch's are 0.
    """
    whole = not (x.dtype.is_floating_point or x.dtype.is_complex)
    x = x.to(dtype or (torch.int64 if whole else x.dtype))
    for step in _steps(x, dim):
        x = x * _shifted(x, dim, step, 1)
    return x


@formula("aten.prod", "aten.prod.dim_int")
def _product(
    x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Of integers the last of the running ones, which wrap around: `ReduceProd` is of doubles."""
    if (dtype or x.dtype).is_floating_point:
        return NotImplemented
    if not x.ndim:
        return x.to(dtype or torch.int64)
    if dim is None:
        x, dim = x.flatten(), 0
    one = torch.ones_like(x.sum(dim, keepdim=True), dtype=dtype or torch.int64)
    running = torch.cumprod(torch.cat([one, x.to(one.dtype)], dim), dim, dtype=dtype)
    last = running.narrow(dim, x.shape[dim], 1)
    return last if keepdim else last.squeeze(dim)


@formula("aten.diff")
def _differences(
    x: Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: Tensor | None = None,
    append: Tensor | None = None,
) -> Tensor:
    ends = [end for end in (prepend, x, append) if end is not None]
    x = torch.cat(ends, dim) if len(ends) > 1 else x
    places = torch.arange(x.shape[dim])
    before = (places - 1).clamp(min=0)
    for _ in range(n):  # cut last: of what is one shorter it would be asked whether it is one
        earlier = x.index_select(dim, before)
        x = x != earlier if x.dtype == torch.bool else x - earlier
    return x.index_select(dim, places[n:])


@formula("aten.logcumsumexp")
def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """By doubling as above: what one maximum is taken off underflows before it."""
    for step in _steps(x, dim):
        x = torch.logaddexp(x, _shifted(x, dim, step, -math.inf))
    return x


def _running(x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The extremum so far and its last place, by doubling as above. NaN counts as extreme."""
    if not x.ndim:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    dtype, first = x.dtype, -math.inf if largest else math.inf
    if not dtype.is_floating_point:
        limits = torch.iinfo(torch.int64)
        x, first = x.to(torch.int64), limits.min if largest else limits.max
    place = along(torch.arange(x.shape[dim]), x, dim)
    for step in _steps(x, dim):
        before, earlier = _shifted(x, dim, step, first), _shifted(place, dim, step, 0)
        later = (x >= before) if largest else (x <= before)
        if dtype.is_floating_point:
            later = later | torch.isnan(x)
        x, place = torch.where(later, x, before), torch.where(later, place, earlier)
    return x.to(dtype), place


formula("aten.cummax")(functools.partial(_running, largest=True))
formula("aten.cummin")(functools.partial(_running, largest=False))


@formula(
    "aten.linspace.Tensor_Tensor", "aten.linspace.Tensor_Scalar", "aten.linspace.Scalar_Tensor"
)
def _linspace(
    start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    """From either end to the middle."""
    dtype = dtype or torch.get_default_dtype()
    wide = dtype if dtype.is_floating_point else torch.float64
    first, last = (
        each.to(wide) if isinstance(each, Tensor) else torch.full((), each, dtype=wide)
        for each in (start, end)
    )
    places = torch.arange(steps)
    step = (last - first) / max(steps - 1, 1)
    from_start = first + places.to(wide) * step
    from_end = last - (steps - 1 - places).to(wide) * step
    return torch.where(places < (steps + 1) // 2, from_start, from_end).to(dtype)


@formula("aten.vander")
def _vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:
    powers = torch.arange(known(x.shape[-1]) if N is None else N)
    return torch.pow(x.unsqueeze(-1), powers if increasing else powers.flip(0))


@formula("aten._cdist_forward", "aten.cdist")
def _cdist(a: Tensor, b: Tensor, p: float = 2, compute_mode: int | None = None) -> Tensor:
    """torch divides a cdist by how many rows there are, which a dynamic length doesn't say."""
    norm: Tensor = torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, -1)
    return norm


@formula("aten._pdist_forward")
def _pdist(x: Tensor, p: float = 2) -> Tensor:
    i, j = torch.triu_indices(known(x.shape[0]), known(x.shape[0]), 1)
    norm: Tensor = torch.linalg.vector_norm(x[i] - x[j], p, -1)
    return norm


@formula("aten.cross_entropy_loss")
def _cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """ONNX's own takes classes, and none of them smoothed."""
    if label_smoothing == 0 and not target.is_floating_point():
        return NotImplemented
    whole = torch.ops.aten.cross_entropy_loss.default
    return whole.decompose(x, target, weight, reduction, ignore_index, label_smoothing)


@formula("aten.pad_sequence")
def _pad_sequence(
    sequences: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:
    """Each filled up to the longest, whichever that is in a run."""
    longest = functools.reduce(torch.sym_max, [each.shape[0] for each in sequences])
    padded = []
    for each in sequences:
        rest = longest - each.shape[0]
        ends = [0, rest] if padding_side == "right" else [rest, 0]
        padded.append(F.pad(each, [*[0, 0] * (each.ndim - 1), *ends], value=padding_value))
    axis = 0 if batch_first else 1
    return torch.cat([each.unsqueeze(axis) for each in padded], axis)
