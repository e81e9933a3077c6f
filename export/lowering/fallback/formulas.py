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
from torch._decomp import get_decompositions
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attngraph.export.lowering.fallback.pointwise_formulas import formula, known
from attngraph.export.lowering.fallback.pooling_formulas import FORMULAS

__all__ = ["FORMULAS"]

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
    """In ⌈log₂ n⌉ steps, each of which doubles how many elements a product holds."""
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
    if (dtype or x.dtype).is_floating_point or not x.ndim:
        return NotImplemented
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
    place = _along(torch.arange(x.shape[dim]), x, dim)
    for step in _steps(x, dim):
        before, earlier = _shifted(x, dim, step, first), _shifted(place, dim, step, 0)
        later = (x >= before) if largest else (x <= before)
        if dtype.is_floating_point:
            later = later | torch.isnan(x)
        x, place = torch.where(later, x, before), torch.where(later, place, earlier)
    return x.to(dtype), place


@formula("aten.cummax")
def _cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _running(x, dim, True)


@formula("aten.cummin")
def _cummin(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _running(x, dim, False)


def _kept(value: Tensor, place: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def _first(results: tuple[Tensor, Tensor]) -> Tensor:
    return results[0]


@formula("aten.kthvalue")
def _kth(x: Tensor, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, places = torch.topk(x, k, dim, largest=False)
    return _kept(values.narrow(dim, k - 1, 1), places.narrow(dim, k - 1, 1), dim, keepdim)


@formula("aten.median.dim")
def _median_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower median; NaN where one is among the elements."""
    values, places = torch.sort(x, dim)
    middle = torch.full((1,), (x.shape[dim] - 1) // 2)
    value, place = values.index_select(dim, middle), places.index_select(dim, middle)
    value, place = _kept(value, place, dim, keepdim)
    if x.dtype.is_floating_point:
        value = torch.where(torch.isnan(x).any(dim, keepdim), math.nan, value)
    return value, place


@formula("aten.median")
def _median(x: Tensor) -> Tensor:
    return _first(_median_along(x.flatten(), 0))


@formula("aten.nanmedian.dim")
def _nanmedian_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Behind the numbers are the NaNs, as infinities; a row of nothing else stays NaN."""
    if not x.dtype.is_floating_point:
        value, place = _median_along(x, dim, keepdim)
        return value, place
    missing = torch.isnan(x)
    values, places = torch.sort(torch.where(missing, math.inf, x), dim)
    count = (~missing).sum(dim, keepdim=True)
    middle = ((count - 1) // 2).clamp(min=0)
    value, place = values.gather(dim, middle), places.gather(dim, middle)
    return _kept(torch.where(count == 0, math.nan, value), place, dim, keepdim)


@formula("aten.nanmedian")
def _nanmedian(x: Tensor) -> Tensor:
    return _first(_nanmedian_along(x.flatten(), 0))


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


@formula("aten.diag")
def _diag(x: Tensor, diagonal: int = 0) -> Tensor:
    return torch.diag_embed(x, diagonal) if x.ndim == 1 else x.diagonal(diagonal).clone()


@formula("aten.vander")
def _vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:
    powers = torch.arange(known(x.shape[-1]) if N is None else N)
    return torch.pow(x.unsqueeze(-1), powers if increasing else powers.flip(0))


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


@formula("aten.bucketize.Tensor")
def _bucketize(
    x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Any:
    """torch halves the boundaries again and again, which takes a known number of them."""
    if not isinstance(boundaries.shape[0], int):
        return _searchsorted(boundaries, x, out_int32=out_int32, right=right)
    halved = get_decompositions([torch.ops.aten.bucketize.Tensor])
    return halved[torch.ops.aten.bucketize.Tensor](x, boundaries, out_int32=out_int32, right=right)


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


def _along(index: Tensor, source: Tensor, dim: int) -> Tensor:
    """The index of slices (n,) as one of elements, of the source's shape."""
    shape = [-1 if axis == dim % source.ndim else 1 for axis in range(source.ndim)]
    return index.reshape(shape).expand(source.shape)


@formula("aten.scatter_reduce.two")
def _scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """The mean is sums over counts. An element without a source keeps its value.

    torch reads the corner of the source that the index covers.
    """
    covered = source
    for axis, (has, needs) in enumerate(zip(source.shape, index.shape, strict=True)):
        if has is not needs and not statically_known_true(has == needs):
            covered = covered.narrow(axis, 0, needs)
    if reduce != "mean":
        if covered is source:
            return NotImplemented
        return x.scatter_reduce(dim, index, covered, reduce, include_self=include_self)
    source = covered
    count = torch.zeros_like(x).scatter_add(dim, index, torch.ones_like(source))
    own = torch.ones_like(x) if include_self else (count == 0).to(x.dtype)
    total = (x * own).scatter_add(dim, index, source)
    mode = None if x.dtype.is_floating_point else "floor"
    return torch.div(total, count + own, rounding_mode=mode)


@formula("aten.index_reduce")
def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    return x.scatter_reduce(
        dim, _along(index, source, dim), source, reduce, include_self=include_self
    )


@formula("aten.scatter.reduce", "aten.scatter.value_reduce")
def _scatter_by(x: Tensor, dim: int, index: Tensor, source: Any, *, reduce: str) -> Tensor:
    if not isinstance(source, Tensor):
        source = torch.full(index.shape, source, dtype=x.dtype)
    return x.scatter_reduce(dim, index, source, {"add": "sum", "multiply": "prod"}[reduce])


@formula("aten.put")
def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat, index = x.flatten(), index.flatten()
    index = torch.where(index < 0, index + x.numel(), index)
    put = flat.scatter_add if accumulate else flat.scatter
    return put(0, index, source.flatten()).reshape(x.shape)


@formula("aten.diagonal_scatter")
def _diagonal_scatter(
    x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    places = torch.arange(x.numel()).reshape(x.shape).diagonal(offset, dim1, dim2)
    return x.flatten().scatter(0, places.flatten(), source.flatten()).reshape(x.shape)


@formula("aten.embedding_bag", "aten.embedding_bag.padding_idx")
def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Sums, means or maxima of rows by bag. The other results are for the backward pass."""
    starts = offsets[:-1] if include_last_offset else offsets
    marks = torch.zeros(indices.shape[0] + 1, dtype=torch.int64)
    bag = marks.index_add(0, starts, torch.ones_like(starts, dtype=torch.int64))
    bag = bag.cumsum(0)[:-1] - 1
    rows = weight[indices]
    kept = torch.ones_like(indices, dtype=weight.dtype)
    if padding_idx is not None:
        kept = (indices != padding_idx % known(weight.shape[0])).to(weight.dtype)
    empty = weight.new_zeros([starts.shape[0], weight.shape[1]])
    count = empty[:, 0].index_add(0, bag, kept)
    if mode == 2:
        rows = torch.where(kept.unsqueeze(-1) > 0, rows, -math.inf)
        most = (empty - math.inf).scatter_reduce(0, _along(bag, rows, 0), rows, "amax")
        result = torch.where(count.unsqueeze(-1) > 0, most, 0.0)
    else:
        scales = kept if per_sample_weights is None else kept * per_sample_weights
        result = empty.index_add(0, bag, rows * scales.unsqueeze(-1))
        if mode == 1:
            result = result / count.clamp(min=1).unsqueeze(-1)
    return result


@formula("aten.conv_tbc")
def _conv_tbc(x: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Tensor:
    result = F.conv1d(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad)
    return result.permute(2, 0, 1)


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
