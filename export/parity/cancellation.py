"""Cancellation: outputs that are zero up to rounding, whose value is noise in every dtype.

A difference of equal things is 0, and rounding makes of it some eps of the terms that cancelled. In
float64 that is 2²⁹ times less than in float32, so such elements say nothing of an output's scale:
their value is the noise of one run, their error that of the other. That is how they are recognised.
Their errors are to their float64 values as the dtype's eps, or that of float32, in which halves are
summed, is to float64's, within a factor of 2⁵; a value that eager has one digit of, or in which it
took another branch, is not. The medians are compared of what eager is off by 2¹⁰ times or more, and
what is over 256 times one isn't counted as noise.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

_UNRELATED = 2.0**10
_WINDOW = 2.0**5
_OUTLIER = 256.0
FEW = 32
"""Errors of elements, over all runs, below which their median can't be trusted."""


def cancelled(
    exact: torch.Tensor, errors: Sequence[torch.Tensor], among: torch.Tensor, eps: float
) -> tuple[torch.Tensor, float]:
    """Where the float64 value is zero but for rounding, if most of the output's elements are so,
    and the largest error that counts as rounding there.

    Else nowhere: the other elements then set the output's scale. `errors` are those of eager's
    runs, `among` the elements in which they are defined, `eps` is that of the dtype.
    """
    none = torch.zeros_like(among), 0.0
    size = exact.abs()
    error = functools.reduce(torch.maximum, [each.abs() for each in errors])
    seed = among & (exact != 0) & (error > _UNRELATED * size)
    if int(seed.sum()) * len(errors) < FEW:
        return none
    typical, noise = float(size[seed].median()), float(error[seed].median())
    double, single = torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps
    if not single / double / _WINDOW <= noise / typical <= eps / double * _WINDOW:
        return none
    most = _OUTLIER * noise
    told = (exact != 0) & (error < size / 2)
    zero = among & ~told & (size <= _OUTLIER * typical) & (errors[0].abs() <= most)
    nonzero = among & (exact != 0)
    return (zero, most) if 2 * int((zero & nonzero).sum()) > int(nonzero.sum()) else none
