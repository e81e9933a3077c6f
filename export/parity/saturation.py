"""How accurate a kernel's bounded functions are: to eps of their range, not of each value.

onnxruntime's sigmoid is a quotient of polynomials that is added to a half (MLAS), so where it is
1e-7 the kernel is as far off as where it is 1, by about one eps; torch's has all digits there. LSTM
and GRU hold such gates, and x · σ(x) is off by eps · |x|. An output of which most is saturated has
the scale of that noise, and none of eager's runs shows it.

Its tanh is off by up to two eps and a quarter of its range, its sine and cosine by one; torch's are
a few times as accurate.

So the float64 run is repeated with the result of each such function off by up to eps of its bound:
what that makes of an output is rounding that the kernels are entitled to (nudging.py). A kernel is
off alike wherever it is given the same number, and a recurrence that hardly moves gives it one in
each step: these errors add up, where random ones cancel. So in half of the runs a function is off
by the same share in all of its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attngraph.export.parity.nudging import Slack, Slacks


def _bounded(bound: Callable[[torch.Tensor], torch.Tensor], eps: float = 1.0) -> Any:
    def slack(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slack:
        return Slack(eps * bound(args[0]), repeats=True)

    return slack


def _gated(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slack:
    return Slack(args[0].chunk(2, *(args[1:] or (-1,)))[0].abs(), repeats=True)


BOUNDED: Slacks = {
    "sigmoid": _bounded(torch.ones_like),
    "tanh": _bounded(torch.ones_like, 2.25),
    "sin": _bounded(torch.ones_like),
    "cos": _bounded(torch.ones_like),
    "silu": _bounded(torch.abs),
    "glu": _gated,
    "elu": _bounded(torch.ones_like),
}
