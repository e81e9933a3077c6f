"""Formulas of gathers, of scatters and of bags of rows, as in formulas.py."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attngraph.export.lowering.fallback.pointwise_formulas import FORMULAS, formula, known
from attngraph.ir.ops import op_name

__all__ = ["FORMULAS", "along"]

_ATEN = torch.ops.aten
_least: Any = torch.sym_min
_most: Any = torch.sym_max


def along(index: Tensor, source: Tensor, dim: int) -> Tensor:
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
    if not x.ndim:
        x, index, source = x.reshape(1), index.reshape(1), source.reshape(1)
        return x.scatter_reduce(0, index, source, reduce, include_self=include_self).squeeze(0)
    covered = source
    for axis, (has, needs) in enumerate(zip(source.shape, index.shape, strict=True)):
        if has is not needs and not statically_known_true(has == needs):
            covered = covered.narrow(axis, 0, needs)
    if x.dtype == torch.bool:
        x, covered = x.to(torch.int32), covered.to(torch.int32)
        found = x.scatter_reduce(dim, index, covered, reduce, include_self=include_self)
        return found != 0
    if include_self and reduce != "mean":
        if covered is source:
            return NotImplemented
        return x.scatter_reduce(dim, index, covered, reduce)
    # Counted in float32, which every provider scatters.
    ones = torch.ones_like(covered, dtype=torch.float32)
    count = torch.zeros_like(x, dtype=torch.float32).scatter_add(dim, index, ones)
    if not include_self:  # what a source goes to starts from what changes none
        x = torch.where(count > 0, torch.full((), _neutral(reduce, x.dtype), dtype=x.dtype), x)
    if reduce != "mean":
        return x.scatter_reduce(dim, index, covered, reduce)
    total = x.scatter_add(dim, index, covered)
    count = count + 1 if include_self else count.clamp(min=1)
    mode = None if x.dtype.is_floating_point else "floor"
    return torch.div(total, count.to(x.dtype), rounding_mode=mode)


def _neutral(reduce: str, dtype: torch.dtype) -> Any:
    """What a reduction with any other number gives that number."""
    if reduce in ("amin", "amax"):
        if dtype.is_floating_point:
            return math.inf if reduce == "amin" else -math.inf
        limits = torch.iinfo(dtype)
        return limits.max if reduce == "amin" else limits.min
    return 1 if reduce == "prod" else 0


@formula("aten.index_reduce")
def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    return x.scatter_reduce(
        dim, along(index, source, dim), source, reduce, include_self=include_self
    )


@formula("aten.scatter.reduce", "aten.scatter.value_reduce")
def _scatter_by(x: Tensor, dim: int, index: Tensor, source: Any, *, reduce: str) -> Tensor:
    if not isinstance(source, Tensor):
        source = torch.full(index.shape, source, dtype=x.dtype)
    return x.scatter_reduce(dim, index, source, {"add": "sum", "multiply": "prod"}[reduce])


def _of_a_number(op: Any, *, places: bool = False) -> None:
    """What an op gives for a single number, whose only axis is left out, as for a row of one.

    Its result has the shape of the `places`, or none.
    """

    def computed(x: Tensor, dim: int, index: Tensor, *rest: Any, **options: Any) -> Any:
        if x.ndim:
            return NotImplemented
        more = [each.reshape(-1) if isinstance(each, Tensor) else each for each in rest]
        made = op(x.reshape(1), 0, index.reshape(-1), *more, **options)
        return made.reshape(index.shape if places else ())

    formula(op_name(op))(computed)


_of_a_number(_ATEN.gather.default, places=True)
_of_a_number(_ATEN.index_select.default)
_of_a_number(_ATEN.scatter.src)
_of_a_number(_ATEN.scatter.value)
_of_a_number(_ATEN.scatter_add.default)


@formula("aten.index_add")
def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Any:
    """Of bools it says whether any is true."""
    if not x.ndim:
        return x.reshape(1).index_add(0, index.reshape(1), source.reshape(1), alpha=alpha)[0]
    if x.dtype != torch.bool:
        return NotImplemented
    added = source.to(torch.int32) * bool(alpha)
    return x.to(torch.int32).index_add(dim, index, added) != 0


@formula("aten.diagonal", "aten.diagonal_copy")
def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """By its places: what lies beside them may be infinite, which no factor of 0 hides."""
    x = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = x.shape[-2], x.shape[-1]
    length = _least(rows + min(offset, 0), columns - max(offset, 0))
    first = offset if offset >= 0 else -offset * columns
    places = torch.arange(_most(length, 0)) * (columns + 1) + first
    return x.flatten(-2).index_select(-1, places)


@formula("aten.nonzero_static")
def _nonzero_static(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """Each true element is put where the ones before it are counted; behind is one place more."""
    found = x.flatten() != 0
    at = torch.where(found, found.cumsum(0) - 1, size).clamp(max=size)
    places = torch.full((size + 1,), -1).scatter(0, at, torch.arange(x.numel()))[:size]
    strides = [math.prod(x.shape[axis + 1 :]) for axis in range(x.ndim)]
    if not strides:
        return torch.zeros((size, 0), dtype=torch.int64)
    axes = [
        (places.div(stride, rounding_mode="floor")) % length
        for stride, length in zip(strides, x.shape, strict=True)
    ]
    return torch.where((places < 0).unsqueeze(-1), fill_value, torch.stack(axes, -1))


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
    kept = torch.ones_like(indices, dtype=torch.bool)
    if padding_idx is not None:
        kept = indices != padding_idx % known(weight.shape[0])
        rows = torch.where(kept.unsqueeze(-1), rows, -math.inf if mode == 2 else 0.0)
    empty = weight.new_zeros([starts.shape[0], weight.shape[1]])
    count = empty[:, 0].index_add(0, bag, kept.to(weight.dtype))
    if mode == 2:
        most = (empty - math.inf).scatter_reduce(0, along(bag, rows, 0), rows, "amax")
        result = torch.where(count.unsqueeze(-1) > 0, most, 0.0)
    else:
        if per_sample_weights is not None:
            rows = rows * torch.where(kept, per_sample_weights, 0.0).unsqueeze(-1)
        result = empty.index_add(0, bag, rows)
        if mode == 1:
            result = result / count.clamp(min=1).unsqueeze(-1)
    return result


formula("aten.trace")(lambda x: x.diagonal().sum())


@formula("aten.take")
def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.flatten().index_select(0, index.flatten()).reshape(index.shape)


@formula("aten.diag")
def _diag(x: Tensor, diagonal: int = 0) -> Tensor:
    return torch.diag_embed(x, diagonal) if x.ndim == 1 else x.diagonal(diagonal).clone()
