"""Formulas in float64, as in formulas.py, of ops that onnxruntime has for float32 alone."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from attngraph.export.lowering.fallback.pointwise_formulas import FORMULAS, Formula, each, known
from attngraph.export.lowering.fallback.pooling_formulas import Windows

__all__ = ["FORMULAS"]

_DEGREE = 28  # of the series of erfc: its last coefficients are below 1e-17
_MIDDLE = sympy.Rational(15, 4)
_NEAR, _TERMS = 0.5, 13  # |x| up to which erf is a sum of powers, and of how many
_MOST_OFFSETS = 256  # places of a kernel, each of which is a product of its own


def double(*ops: str) -> Callable[[Formula], Formula]:
    """Decorator: the function computes these ops of a float64 tensor; others stay what they are."""

    def register(function: Formula) -> Formula:
        for op in ops:
            FORMULAS[op] = functools.partial(_of_doubles, function, FORMULAS.get(op))
        return function

    return register


def _of_doubles(function: Formula, other: Formula | None, x: Any, *args: Any, **named: Any) -> Any:
    if isinstance(x, Tensor) and x.dtype == torch.float64:
        return function(x, *args, **named)
    result: Any = NotImplemented if other is None else other(x, *args, **named)
    return result


@double("aten.softplus")
def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Any:
    scaled = x * beta
    return torch.where(scaled > threshold, x, torch.log1p(torch.exp(scaled)) / beta)


@double("aten.elu")
def _elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


@double("aten.selu")
def _selu(x: Tensor) -> Any:
    """The constants under which mean 0 and variance 1 are a fixed point (Klambauer et al. 2017)."""
    return _elu(x, 1.6732632423543772, 1.0507009873554805)


@double("aten.prelu", "aten._prelu_kernel")
def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    if weight.ndim == 1 and x.ndim > 1:
        weight = weight.reshape([1, -1, *[1] * (x.ndim - 2)])
    return torch.where(x > 0, x, x * weight)


@double("aten.hardsigmoid")
def _hardsigmoid(x: Tensor) -> Any:
    return torch.clamp(x + 3, 0, 6) / 6


double("aten.leaky_relu")(lambda x, negative_slope=0.01: torch.where(x > 0, x, x * negative_slope))
double("aten.hardswish")(lambda x: x * _hardsigmoid(x))
double("aten.mish")(lambda x: x * torch.tanh(_softplus(x)))
double("aten.tan")(lambda x: torch.sin(x) / torch.cos(x))
double("aten.cosh")(lambda x: (torch.exp(x) + torch.exp(-x)) / 2)
double("aten.atanh")(lambda x: torch.log1p(2 * x / (1 - x)) / 2)


@functools.cache
def erfc_series() -> list[float]:
    """Coefficients of (1 + 2x) e^{x²} erfc(x), x ≥ 0, in t = (x − 3.75) / (x + 3.75), by Chebyshev
    interpolation in 30 digits (Shepherd and Laframboise 1981).
    """
    count = _DEGREE + 1
    angles = [(2 * place + 1) * sympy.pi / (2 * count) for place in range(count)]
    values = []
    for angle in angles:
        t = sympy.cos(angle).evalf(40)
        x = _MIDDLE * (1 + t) / (1 - t)
        values.append(((1 + 2 * x) * sympy.exp(x * x) * sympy.erfc(x)).evalf(40))
    sums = [
        sum(
            value * sympy.cos(n * angle).evalf(40)
            for value, angle in zip(values, angles, strict=True)
        )
        for n in range(count)
    ]
    return [float(each * (2 if n else 1) / count) for n, each in enumerate(sums)]


_ERF = [
    2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(_TERMS)
]


@double("aten.erfc")
def _erfc(x: Tensor) -> Tensor:
    """The series by Clenshaw's recurrence; beyond 100 there is nothing left."""
    far = torch.clamp(x.abs(), max=100.0)
    middle = float(_MIDDLE)
    t = (far - middle) / (far + middle)
    first, *others = erfc_series()
    one, two = torch.zeros_like(t), torch.zeros_like(t)
    for coefficient in reversed(others):
        one, two = 2 * t * one - two + coefficient, one
    tail = torch.exp(-far * far) * (t * one - two + first) / (1 + 2 * far)
    return torch.where(x < 0, 2 - tail, tail)


@double("aten.erf")
def _erf(x: Tensor) -> Tensor:
    """Near 0, where 1 − erfc(x) has lost its digits, the sum of powers."""
    square, near = x * x, torch.full_like(x, _ERF[-1])
    for coefficient in reversed(_ERF[:-1]):
        near = near * square + coefficient
    return torch.where(x.abs() < _NEAR, near * x, 1 - _erfc(x))


@double("aten.gelu")
def _gelu(x: Tensor, approximate: str = "none") -> Any:
    """Of erfc: 1 + erf(x) has no digits left of large negative numbers."""
    if approximate == "tanh":
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return x * 0.5 * _erfc(x * -math.sqrt(0.5))


@double("aten.atan")
def _atan(x: Tensor) -> Any:
    """By a step of Newton's from float32's: with y near atan(x), atan(x) − y is the angle between
    (cos y, sin y) and (1, x), whose tangent is so small that its cube is below a rounding.
    """
    inner = torch.where(x.abs() > 1, 1 / x, x)  # of at most 1
    y = torch.atan(inner.float()).double()
    sine, cosine = torch.sin(y), torch.cos(y)
    y = y + (inner * cosine - sine) / (cosine + inner * sine)
    return torch.where(x.abs() > 1, torch.copysign(torch.full_like(x, math.pi / 2), x) - y, y)


double("aten.asin")(lambda x: _atan(x / torch.sqrt((1 - x) * (1 + x))))
double("aten.acos")(lambda x: 2 * _atan(torch.sqrt((1 - x) / (1 + x))))


@double("aten.sinh")
def _sinh(x: Tensor) -> Any:
    grown = torch.expm1(x.abs())
    found = torch.where(grown.isinf(), grown, (grown + grown / (grown + 1)) / 2)
    return torch.copysign(found, x)


@double("aten.asinh")
def _asinh(x: Tensor) -> Tensor:
    far = x.abs()
    found = torch.log1p(far + far * far / (1 + torch.sqrt(1 + far * far)))
    return torch.copysign(torch.where(far > 1e100, torch.log(far) + math.log(2), found), x)


@double("aten.acosh")
def _acosh(x: Tensor) -> Tensor:
    below = x - 1
    found = torch.log1p(below + torch.sqrt(below) * torch.sqrt(x + 1))  # NaN below 1
    return torch.where(x > 1e100, torch.log(x) + math.log(2), found)


@double("aten.group_norm")
def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    grouped = x.reshape(x.shape[0], groups, -1)
    centred = grouped - grouped.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    found: Tensor = (centred / torch.sqrt(variance + eps)).reshape(x.shape)
    shape = [1, -1, *[1] * (x.ndim - 2)]
    found = found if weight is None else found * weight.reshape(shape)
    return found if bias is None else found + bias.reshape(shape)


@double("aten.instance_norm")
def _instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Any:
    if not use_input_stats:
        return NotImplemented
    return _group_norm(x, known(x.shape[1]), weight, bias, eps)


def _places(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Iterator[Tensor]:
    """What of x (…, *sizes) each place of a kernel lies on, in their order."""
    lengths = [
        (size - step * (width - 1) - 1) // along + 1
        for size, width, along, step in zip(
            x.shape[-len(kernel) :], kernel, stride, dilation, strict=True
        )
    ]
    for place in itertools.product(*map(range, kernel)):
        found = x
        for axis, (at, length, along, step) in enumerate(
            zip(place, lengths, stride, dilation, strict=True), x.ndim - len(kernel)
        ):
            start = at * step
            ends = slice(start, start + (length - 1) * along + 1, along)
            found = found[(*[slice(None)] * axis, ends)]
        yield found


def _convolution(
    axes: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] | str = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Any:
    """A product for each place of the kernel."""
    out, inner, *kernel = map(known, weight.shape)
    if math.prod(kernel) > _MOST_OFFSETS:
        return NotImplemented
    stride, dilation = each(stride, axes), each(dilation, axes)
    if isinstance(padding, str):
        reach = [
            d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)
        ]
        ends = [(size // 2, size - size // 2) for size in reach]
    else:
        ends = [(size, size) for size in each(padding, axes)]
    unbatched = x.ndim == axes + 1
    x = F.pad(x.unsqueeze(0) if unbatched else x, [end for pair in reversed(ends) for end in pair])
    found = None
    sizes: Sequence[int] = ()
    for at, part in enumerate(_places(x, kernel, stride, dilation)):
        grouped = part.clone().reshape(part.shape[0], groups, inner, -1)
        product = weight.flatten(2)[..., at].reshape(groups, out // groups, inner) @ grouped
        found = product if found is None else found + product
        sizes = part.shape[2:]
    assert found is not None
    result = found.reshape(found.shape[0], out, *sizes)
    result = result if bias is None else result + bias.reshape(-1, *[1] * axes)
    return result.squeeze(0) if unbatched else result


def _mean(axes: int, x: Tensor, *given: Any, **named: Any) -> Any:
    windows = Windows(axes, *given, **named)
    kernel, stride, padding = windows.by_axis
    is_plain = not windows.ceil_mode and (windows.count_include_pad or not any(padding))
    if not is_plain or math.prod(kernel) > _MOST_OFFSETS:
        return NotImplemented
    x = F.pad(x, [end for size in reversed(padding) for end in (size, size)])
    parts = _places(x, kernel, stride, [1] * axes)
    return functools.reduce(torch.add, parts) / (windows.divisor or math.prod(kernel))


for _axes in (1, 2, 3):
    double(f"aten.conv{_axes}d")(functools.partial(_convolution, _axes))
    double(f"aten.conv{_axes}d.padding")(functools.partial(_convolution, _axes))
    double(f"aten.avg_pool{_axes}d")(functools.partial(_mean, _axes))
