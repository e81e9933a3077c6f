"""Formulas of ops that work element by element, as in formulas.py.

Some of these have a function in torchlib, which is wrong for integers, at infinities or in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Formula: TypeAlias = Callable[..., Any]

FORMULAS: dict[str, Formula] = {}


def formula(*ops: str) -> Callable[[Formula], Formula]:
    """Decorator: the function computes these ops."""

    def register(function: Formula) -> Formula:
        FORMULAS.update(dict.fromkeys(ops, function))
        return function

    return register


def known(size: Any) -> int:
    """A size that is the same in every run."""
    if not isinstance(size, int):
        raise NotImplementedError
    return size


def each(given: Sequence[int], axes: int) -> list[int]:
    """One number for each axis, where one may stand for all."""
    return [*given] * (axes if len(given) == 1 else 1)


@formula("aten.hypot")
def _hypot(a: Tensor, b: Tensor) -> Tensor:
    """By the larger of the two, whose square may be infinite."""
    a, b = a.abs(), b.abs()
    large, small = torch.maximum(a, b), torch.minimum(a, b)
    ratio = small / torch.where((large == 0) | torch.isinf(large), torch.ones_like(large), large)
    length = torch.where(torch.isinf(large), large, large * torch.sqrt(1 + ratio * ratio))
    return torch.where(torch.isinf(a) | torch.isinf(b), math.inf, length)


@formula("aten.copysign.Tensor", "aten.copysign.Scalar")
def _copysign(a: Tensor, b: Any) -> Tensor:
    b = torch.full_like(a, b) if not isinstance(b, Tensor) else b
    a = _real(a)
    return torch.where(_is_negative(b), -a.abs(), a.abs())


@formula("aten.expm1")
def _expm1(x: Tensor) -> Tensor:
    """Of small numbers, where e^x − 1 would be 0."""
    x = _real(x)
    return torch.tanh(x / 2) * (torch.exp(x) + 1)


@formula("aten.log1p")
def _log1p(x: Tensor) -> Tensor:
    """Of small numbers, where log(1 + x) would be 0: what 1 + x was rounded by is scaled back."""
    x = _real(x)
    above = 1 + x
    kept = above - 1
    scaled = torch.log(above) * torch.where(kept == x, 1.0, x / kept)
    return torch.where(above == 1, x, scaled)


@formula("aten.isfinite")
def _is_finite(x: Tensor) -> Any:
    is_exact = not (x.dtype.is_floating_point or x.dtype.is_complex)
    return torch.ones_like(x, dtype=torch.bool) if is_exact else NotImplemented


def _real(x: Tensor) -> Tensor:
    """Integers as the floats that torch computes on."""
    return x if x.dtype.is_floating_point else x.to(torch.get_default_dtype())


@formula("aten.sinc", "aten.special_sinc")
def _sinc(x: Tensor) -> Tensor:
    x = _real(x) * math.pi
    return torch.where(x == 0, 1.0, torch.sin(x) / x)


@formula("aten.gelu")
def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """By tanh, where onnxruntime's own parts have constants of float32."""
    if approximate != "tanh":
        raise NotImplementedError
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


@formula("aten.hamming_window")
def _hamming_window(window_length: int, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """ONNX's `HammingWindow` has 25/46 for 0.54."""
    places = torch.arange(window_length, dtype=dtype or torch.get_default_dtype())
    return 0.54 - 0.46 * torch.cos(places * (2 * math.pi / window_length))


def _is_negative(x: Tensor) -> Tensor:
    """−0 too, whose reciprocal is −∞; the sign of a NaN is not seen."""
    if not x.dtype.is_floating_point:
        return x < 0
    return (x < 0) | ((x == 0) & (torch.reciprocal(x) < 0))


@formula("aten.atan2")
def _atan2(y: Tensor, x: Tensor) -> Tensor:
    """By quadrant; at the origin and between infinities, as if both were 1, or x were far less."""
    y, x = _real(y), _real(x)
    both = torch.isinf(y) & torch.isinf(x)
    away, along = y.abs(), x.abs()
    ratio = torch.where(both | (away == along), 1.0, away / along)
    acute = torch.where((away == 0) & (along == 0), 0.0, torch.atan(ratio))
    angle = torch.where(_is_negative(x), math.pi - acute, acute)
    signed = torch.where(_is_negative(y), -angle, angle)
    return torch.where(torch.isnan(x) | torch.isnan(y), math.nan, signed)


def _log_of_sum(a: Tensor, b: Tensor, base: float) -> Tensor:
    """From the larger; equal infinities have no difference."""
    a, b = _real(a), _real(b)
    large = torch.maximum(a, b)
    less = torch.where(a == b, 0.0, -(a - b).abs())
    return large + torch.log1p(torch.exp(less * math.log(base))) / math.log(base)


@formula("aten.logit", "aten.special_logit")
def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = _real(x)
    x = x if eps is None else x.clamp(eps, 1 - eps)
    return torch.log(x / (1 - x))


@formula("aten.angle")
def _angle(x: Tensor) -> Any:
    """Of a real number: π below 0."""
    if x.dtype.is_complex:
        return NotImplemented
    x = _real(x)
    return torch.where(torch.isnan(x), x, torch.where(x < 0, math.pi, 0.0))


@formula("aten.xlogy.Tensor")
def _xlogy(a: Tensor, b: Tensor) -> Tensor:
    a, b = _real(a), _real(b)
    return torch.where(torch.isnan(b), math.nan, torch.where(a == 0, 0.0, a * torch.log(b)))


@formula("aten.isclose")
def _isclose(
    a: Tensor, b: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> Tensor:
    close = a == b
    if equal_nan and a.dtype.is_floating_point:
        close = close | (torch.isnan(a) & torch.isnan(b))
    a, b = _real(a), _real(b)
    apart = (a - b).abs()
    return close | (torch.isfinite(apart) & (apart <= atol + (rtol * b).abs()))


@formula("aten.fmod.Tensor", "aten.fmod.Scalar")
def _fmod(a: Tensor, b: Any) -> Any:
    """Of integers by a quotient: onnxruntime's `Mod` with the dividend's sign is in double."""
    if a.dtype.is_floating_point or (isinstance(b, Tensor) and b.dtype.is_floating_point):
        return NotImplemented
    if isinstance(b, float):
        return NotImplemented
    return a - torch.div(a, b, rounding_mode="trunc") * b


@formula("aten.isin.Tensor_Tensor", "aten.isin.Tensor_Scalar")
def _is_among(
    x: Tensor, elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Tensor:
    """Each is compared with all of them."""
    elements = elements.flatten() if isinstance(elements, Tensor) else elements
    found: Tensor = (x.unsqueeze(-1) == elements).any(-1)
    return ~found if invert else found


def _is_infinite(x: Tensor, end: float) -> Tensor:
    return x == end if x.dtype.is_floating_point else torch.zeros_like(x, dtype=torch.bool)


def _of_integers(name: str) -> Formula:
    op = getattr(torch.ops.aten, name)
    return lambda x: NotImplemented if x.dtype.is_floating_point else op(_real(x))


def _shifts(name: str, shift: Callable[..., Any]) -> dict[str, Formula]:
    """Its ops; of 16 bits in 32, as onnxruntime's `BitShift` has none of so few."""

    def shifted(x: Tensor, by: Any, *, divides: bool = False) -> Any:
        if x.dtype is torch.int16:
            return shift(x.int(), by.int() if isinstance(by, Tensor) else by).to(x.dtype)
        return shift(x, by) if divides else NotImplemented

    ops = (f"aten.__{name}__.Scalar", *(f"aten.{shift.__name__}.{of}" for of in _OF_SHIFTS))
    return {
        f"aten.__{name}__.Tensor": functools.partial(shifted, divides=True),
        **dict.fromkeys(ops, shifted),
    }


_OF_SHIFTS = ("Tensor", "Tensor_Scalar")
_INVERSES = ("acos", "acosh", "asin", "asinh", "atan", "atanh")
FORMULAS |= {
    **{f"aten.{name}": _of_integers(name) for name in (*_INVERSES, "cosh", "erfc", "sinh")},
    "aten.trunc": lambda x: NotImplemented if x.dtype.is_floating_point else x.clone(),
    "aten.fmax": lambda a, b: torch.where(torch.isnan(b) | (a >= b), a, b),
    "aten.fmin": lambda a, b: torch.where(torch.isnan(b) | (a <= b), a, b),
    "aten.log_sigmoid": lambda x: -F.softplus(-x),
    "aten.celu": lambda x, alpha=1.0: torch.where(x > 0, x, alpha * torch.expm1(x / alpha)),
    "aten.log2": lambda x: torch.log(_real(x)) / math.log(2),
    "aten.log10": lambda x: torch.log(_real(x)) / math.log(10),
    "aten.exp2": lambda x: torch.pow(2.0, _real(x)),
    "aten.special_exp2": lambda x: torch.pow(2.0, _real(x)),
    "aten.ldexp.Tensor": lambda x, exponent: _real(x) * torch.pow(2.0, _real(exponent)),
    "aten.logaddexp": lambda a, b: _log_of_sum(a, b, math.e),
    "aten.logaddexp2": lambda a, b: _log_of_sum(a, b, 2.0),
    "aten.deg2rad": lambda x: _real(x) * (math.pi / 180),
    "aten.rad2deg": lambda x: _real(x) * (180 / math.pi),
    "aten.heaviside": lambda x, at_zero: torch.where(x == 0, at_zero, (x > 0).to(x.dtype)),
    "aten.isposinf": lambda x: _is_infinite(x, math.inf),
    "aten.isneginf": lambda x: _is_infinite(x, -math.inf),
    "aten.signbit": lambda x: torch.zeros_like(x) if x.dtype == torch.bool else _is_negative(x),
    **_shifts("rshift", torch.bitwise_right_shift),
    **_shifts("lshift", torch.bitwise_left_shift),
}
