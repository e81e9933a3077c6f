"""How accurate a kernel's sums over rows are: terms may be added one after another.

torch adds pairwise. onnxruntime's norms with a residual add the squares of a row to one float, so
with n terms of one sign the k-th partial sum, k/n of the whole, is rounded by up to half an eps of
itself: a variance of eps² · (k/n)² / 12, and for all n a deviation of eps · √n / 6. It is one for
the row, so a row of hundreds of elements is one sample of it, and eager's own run shows none.

So the float64 run is repeated with each such sum off by up to that deviation (nudging.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attngraph.export.parity.nudging import Slack, Slacks


def _deviation(terms: int) -> float:
    """Of a sum of so many terms of one sign, in eps of it."""
    return math.sqrt(terms) / 6


def _sum(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slack | None:
    if not args[0].is_floating_point():  # whole numbers, or what a mask counts
        return None
    size = func(args[0].abs(), *args[1:], **kwargs)
    return Slack(size * _deviation(args[0].numel() // max(size.numel(), 1)))


def _variance(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slack:
    found = func(*args, **kwargs)
    size = found[0] if isinstance(found, tuple) else found
    return Slack(size * _deviation(args[0].numel() // max(size.numel(), 1)))


def _norm(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slack:
    """Of a norm over the last axes, the root of a row's sum of squares: off by half as much."""
    shape, rows = args[1], func(*args, **kwargs)[0]
    if func is torch.ops.aten.native_layer_norm.default and args[3] is not None:
        rows = rows - args[3]
    return Slack(rows.abs() * (_deviation(math.prod(shape)) / 2), together=len(shape))


SUMS: Slacks = {
    "mean": _sum,
    "sum": _sum,
    "var": _variance,
    "var_mean": _variance,
    "native_layer_norm": _norm,
    "_fused_rms_norm": _norm,
}
