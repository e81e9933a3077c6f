"""How accurate a kernel's sums over rows are: terms may be added one after another.

torch adds pairwise. onnxruntime's norms with a residual add the squares of a row to one float, so
each partial sum p is rounded by up to half an eps of itself: a variance of eps² · p² / 12, and of
the whole a deviation of eps · √(Σ p² / 12), which is eps · √n / 6 for n equal terms. It is one for
the row, so a row of hundreds of elements is one sample of it, and eager's own run shows none.

A product over n places is such a sum too. A BLAS that sums in several parts has the rounding of the
shorter ones, so on one CPU eager's own run shows that of a kernel and on another it doesn't: a mean
over a thousand keys, of values of either sign, is small beside its partial sums.

So the float64 run is repeated with each such sum off by up to that deviation (nudging.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attngraph.export.parity.nudging import Slack, Slacks

_STRIDE = 16  # places of a product between two partial sums
_TINY = torch.finfo(torch.float64).tiny


def _deviation(terms: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """The deviation in eps of sums over these axes, or all if there are none; the axes are gone."""
    own = [axis % terms.dim() for axis in axes] or [*range(terms.dim())]
    kept = [axis for axis in range(terms.dim()) if axis not in own]
    rows = terms.permute(*kept, *own).reshape(*(terms.shape[axis] for axis in kept), -1)
    return rows.cumsum(-1).square().sum(-1).div(12).sqrt()


def _axes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    return [given] if isinstance(given, int) else list(given or ())


def _sum(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slack | None:
    x = args[0]
    if not x.is_floating_point() or not x.numel():  # whole numbers, or what a mask counts
        return None
    result = func(*args, **kwargs)
    off = _deviation(x, _axes(args, kwargs)).reshape(result.shape)
    if func._opname == "mean":
        off = off * result.numel() / x.numel()
    return Slack(off)


def _variance(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slack | None:
    x, axes = args[0], _axes(args, kwargs)
    if not x.numel():
        return None
    found = func(*args, **kwargs)
    result = found[0] if isinstance(found, tuple) else found
    squares = (x - x.mean(axes or None, keepdim=True)).square()
    total = squares.sum(axes or None).reshape(result.shape)
    share = _deviation(squares, axes).reshape(result.shape) / total.clamp_min(_TINY)
    return Slack(result * share)


def _norm(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slack | None:
    """The slack of a norm over the last axes: a root is off by half as much as its sum."""
    x, axes = args[0], [*range(-len(args[1]), 0)]
    rows = func(*args, **kwargs)[0]
    if func is torch.ops.aten.native_layer_norm.default:
        x = x - x.mean(axes, keepdim=True)
        rows = rows if args[3] is None else rows - args[3]
    squares = x.square()
    total = squares.sum(axes, keepdim=True)
    share = _deviation(squares, axes).reshape(total.shape) / total.clamp_min(_TINY)
    return Slack(rows.abs() * share / 2, together=len(axes))


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The deviation of (…, m, k) @ (…, k, n), in eps. Partial sums are taken every few places, and
    count for those between.
    """
    partial: Any = 0.0
    squares: Any = 0.0
    for start in range(0, left.shape[-1], _STRIDE):
        end = min(start + _STRIDE, left.shape[-1])
        partial = partial + left[..., start:end] @ right[..., start:end, :]
        squares = squares + partial.square() * (end - start)
    return torch.as_tensor(squares).div(12).sqrt()


def _product(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slack | None:
    left, right = args[-2:]
    is_summed = left.is_floating_point() and left.numel() and right.numel()
    return Slack(_products(left, right)) if is_summed else None


def _attention(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slack | None:
    """The slack of the weights' product with the values, in torch's one operator on CPUs."""
    query, key, value, *rest = args
    if not query.numel() or not key.numel():
        return None
    scale, mask = kwargs.get("scale"), kwargs.get("attn_mask")
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if len(rest) > 1 and rest[1]:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
    scores = scores if mask is None else scores + mask
    return Slack(_products(scores.softmax(-1).nan_to_num(), value))


SUMS: Slacks = {
    "mean": _sum,
    "sum": _sum,
    "var": _variance,
    "var_mean": _variance,
    "native_layer_norm": _norm,
    "_fused_rms_norm": _norm,
    "mm": _product,
    "bmm": _product,
    "addmm": _product,
    "baddbmm": _product,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
}
