"""Formulas of order statistics and of places in order, as in formulas.py."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from attngraph.export.lowering.fallback.pointwise_formulas import FORMULAS, formula

__all__ = ["FORMULAS"]


def _kept(value: Tensor, place: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def _itself(x: Tensor) -> tuple[Tensor, Tensor]:
    """A single number and its place."""
    return x.clone(), torch.zeros((), dtype=torch.int64)


@formula("aten.kthvalue")
def _kth(x: Tensor, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Of all in order, behind which NaNs are."""
    if not x.ndim:
        return _itself(x)
    values, places = torch.sort(x, dim)
    return _kept(values.narrow(dim, k - 1, 1), places.narrow(dim, k - 1, 1), dim, keepdim)


@formula("aten.median.dim")
def _median_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower median; NaN where one is among the elements."""
    if not x.ndim:
        return _itself(x)
    values, places = torch.sort(x, dim)
    middle = torch.full((1,), (x.shape[dim] - 1) // 2)
    value, place = values.index_select(dim, middle), places.index_select(dim, middle)
    value, place = _kept(value, place, dim, keepdim)
    if x.dtype.is_floating_point:
        value = torch.where(torch.isnan(x).any(dim, keepdim), math.nan, value)
    return value, place


@formula("aten.nanmedian.dim")
def _nanmedian_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Behind the numbers are the NaNs, as infinities; a row of nothing else stays NaN."""
    if not x.ndim:
        return _itself(x)
    if not x.dtype.is_floating_point:
        value, place = _median_along(x, dim, keepdim)
        return value, place
    missing = torch.isnan(x)
    values, places = torch.sort(torch.where(missing, math.inf, x), dim)
    count = (~missing).sum(dim, keepdim=True)
    middle = ((count - 1) // 2).clamp(min=0)
    value, place = values.gather(dim, middle), places.gather(dim, middle)
    return _kept(torch.where(count == 0, math.nan, value), place, dim, keepdim)


formula("aten.median")(lambda x: _median_along(x.flatten(), 0)[0])
formula("aten.nanmedian")(lambda x: _nanmedian_along(x.flatten(), 0)[0])


@formula("aten.quantile")
def _quantile(
    x: Tensor,
    q: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Tensor:
    """For several q at once; torch looks whether they are in 0…1, which a run can't be asked."""
    axes = x.ndim
    x = x.flatten() if dim is None else x.movedim(dim, -1)
    ordered = torch.sort(x, -1)[0]
    rank = q.reshape(-1) * (x.shape[-1] - 1)
    if interpolation == "nearest":
        rank = torch.round(rank)
    low, high = ordered[..., rank.floor().long()], ordered[..., rank.ceil().long()]
    if interpolation in ("lower", "higher"):
        result = low if interpolation == "lower" else high
    else:
        part = rank - rank.floor() if interpolation != "midpoint" else torch.full_like(rank, 0.5)
        result = torch.lerp(low, high, part.expand(low.shape))
    missing = torch.isnan(x).any(-1, keepdim=True)
    result = torch.where(missing, math.nan, result).movedim(-1, 0)
    if keepdim:
        whole = [result.shape[0], *[1] * axes]
        result = result.reshape(whole) if dim is None else result.unsqueeze(dim % axes + 1)
    return result if q.ndim else result.squeeze(0)


@formula("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def _searchsorted(
    ordered: Tensor,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """How many elements are smaller, or not larger: every value is compared with all of them.

    NaN is larger than any.
    """
    if sorter is not None:
        ordered = ordered.gather(-1, sorter)
    values = x if isinstance(x, Tensor) else torch.full((), x, dtype=ordered.dtype)
    shape = values.shape
    if ordered.ndim > 1:
        ordered = ordered.unsqueeze(-2)
    values = values.unsqueeze(-1)
    after = ordered > values if right or side == "right" else ordered >= values
    return (~after).sum(-1).to(torch.int32 if out_int32 else torch.int64).reshape(shape)


@formula("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def _bucketize(x: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Any:
    """torch halves the boundaries again and again, which takes a known number of them.

    Its index of a single number would have to be known as well.
    """
    is_row = isinstance(x, Tensor) and x.ndim > 0
    if not is_row or not boundaries.numel() or not isinstance(boundaries.shape[0], int):
        return _searchsorted(boundaries, x, out_int32=out_int32, right=right)
    halved = get_decompositions([torch.ops.aten.bucketize.Tensor])
    return halved[torch.ops.aten.bucketize.Tensor](x, boundaries, out_int32=out_int32, right=right)


@formula("aten.mode")
def _mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The least of those that occur most often, and the last place of it."""
    if not x.ndim:
        return _itself(x)
    kind, row = x.dtype, x.movedim(dim, -1)
    row = row if kind.is_floating_point else row.to(torch.int64)
    count = (row.unsqueeze(-1) == row.unsqueeze(-2)).sum(-1)
    most = count == count.amax(-1, keepdim=True)
    behind = math.inf if kind.is_floating_point else torch.iinfo(torch.int64).max
    value = torch.where(most, row, behind).amin(-1, keepdim=True)
    places = torch.where(row == value, torch.arange(row.shape[-1]), -1).amax(-1, keepdim=True)
    value, places = value.to(kind).movedim(-1, dim), places.movedim(-1, dim)
    return _kept(value, places, dim, keepdim)
