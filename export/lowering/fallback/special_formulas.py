"""Formulas of special functions, as in formulas.py: computed in float64, whatever is asked for.

So what is left of a difference is as exact as float32 has to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attngraph.export.lowering.fallback.pointwise_formulas import FORMULAS, formula

__all__ = ["FORMULAS"]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float64)


def _narrow(result: Tensor, x: Tensor) -> Tensor:
    """The result in the dtype that torch gives for x."""
    return result.to(x.dtype if x.dtype.is_floating_point else torch.get_default_dtype())


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """By Horner's rule; the constant comes first."""
    result = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result


def _sine_and_cosine(x: Tensor) -> tuple[Tensor, Tensor]:
    """sin πx and cos πx up to one sign that both have, exact at whole numbers."""
    part = (x - torch.round(x)) * math.pi
    return torch.sin(part), torch.cos(part)


_LANCZOS = (
    0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313,
    -176.61502916214059, 12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6,
    1.5056327351493116e-7,
)  # fmt: skip
"""The coefficients of Lanczos' series for g = 7."""


@formula("aten.lgamma")
def _lgamma(x: Tensor) -> Tensor:
    """log |Γ(x)|, left of ½ by Γ(x) Γ(1 − x) = π / sin πx."""
    z = _wide(x)
    is_left = z < 0.5
    right = torch.where(is_left, 1 - z, z) - 1
    series = torch.full_like(right, _LANCZOS[0])
    for place, coefficient in enumerate(_LANCZOS[1:], 1):
        series = series + coefficient / (right + place)
    shifted = right + 7.5
    found = (right + 0.5) * torch.log(shifted) - shifted + torch.log(series)
    found = found + math.log(2 * math.pi) / 2
    sine, _ = _sine_and_cosine(z)
    reflected = math.log(math.pi) - torch.log(sine.abs()) - found
    found = torch.where(is_left, reflected, found)
    found = torch.where((z == 1) | (z == 2), 0.0, found)
    is_pole = torch.isinf(z) | ((z <= 0) & (z == torch.floor(z)))
    return _narrow(torch.where(is_pole, math.inf, found), x)


_BERNOULLI = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
_STEPS = 8  # from where on the asymptotic series is exact


@formula("aten.digamma", "aten.special_digamma")
def _digamma(x: Tensor) -> Tensor:
    """ψ(x) from ψ(x + 8), left of 0 by ψ(1 − x) − ψ(x) = π / tan πx."""
    z = _wide(x)
    is_left = z < 0
    right = torch.where(is_left, 1 - z, z)
    before = torch.zeros_like(right)
    for step in range(_STEPS):
        before = before + 1 / (right + step)
    far = right + _STEPS
    square = 1 / (far * far)
    found = torch.log(far) - 0.5 / far - square * _polynomial(square, _BERNOULLI) - before
    sine, cosine = _sine_and_cosine(z)
    found = torch.where(is_left, found - math.pi * cosine / sine, found)
    is_pole = is_left & (z == torch.floor(z))
    found = torch.where(is_pole, math.nan, found)
    found = torch.where(z == math.inf, math.inf, found)
    return _narrow(torch.where(z == 0, -1 / z, found), x)


# Wichura's AS 241: the quantile of a normal distribution, about its middle, near and far.
_MIDDLE = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
     1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
     3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
     5.2264952788528545610e3),
)  # fmt: skip
_NEAR = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0,
     3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1,
     2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
     1.05075007164441684324e-9),
)  # fmt: skip
_FAR = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0,
     2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
     2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
     2.04426310338993978564e-15),
)  # fmt: skip


@formula("aten.erfinv", "aten.special_erfinv")
def _erfinv(x: Tensor) -> Tensor:
    y = _wide(x)
    half = y / 2
    rest = 0.180625 - half * half
    middle = half * _polynomial(rest, _MIDDLE[0]) / _polynomial(rest, _MIDDLE[1])
    root = torch.sqrt(-torch.log((1 - y.abs()) / 2))
    near, far = root - 1.6, root - 5
    tail = torch.where(
        root <= 5,
        _polynomial(near, _NEAR[0]) / _polynomial(near, _NEAR[1]),
        _polynomial(far, _FAR[0]) / _polynomial(far, _FAR[1]),
    )
    tail = torch.where(y.abs() == 1, math.inf, tail)
    tail = torch.where(y < 0, -tail, tail)
    return _narrow(torch.where(half.abs() <= 0.425, middle, tail) / math.sqrt(2), x)
