"""The values at which kernels go wrong, of each dtype."""

from __future__ import annotations

import math

import torch

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NUMBERS = (*FLOATS, *INTEGERS)
ALL = (*NUMBERS, torch.bool)

_WHOLE = (0, 1, -1, 2, -2, 3, -3, 7, -8, 100)
_BITS = (7, 8, 15, 16, 24, 31, 32, 53, 63)
_REAL = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 3.0, -3.0, 0.1, -7.3, 88.0, -104.0)


def edges(dtype: torch.dtype) -> torch.Tensor:
    """(n,): small numbers, and what lies around each limit of the dtype and of narrower ones."""
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        powers = [sign * (1 << bit) + by for bit in _BITS for sign in (1, -1) for by in (-1, 0, 1)]
        wanted = dict.fromkeys([*_WHOLE, *powers, limits.max, limits.min])
        kept = [value for value in wanted if limits.min <= value <= limits.max]
        return torch.tensor(kept, dtype=dtype)
    limits = torch.finfo(dtype)
    least = limits.smallest_normal
    extremes = [least, limits.eps, 1 + limits.eps, limits.max, limits.max**0.5]
    both = [sign * value for value in [*extremes, 1 / limits.eps] for sign in (1, -1)]
    return torch.tensor([*_REAL, *both, math.inf, -math.inf, math.nan], dtype=dtype)


def moderate(dtype: torch.dtype) -> torch.Tensor:
    """The edges without floats so large or small that the order of a sum decides what is left."""
    values = edges(dtype)
    if not dtype.is_floating_point:
        return values
    size = values.abs()
    return values[(size == 0) | ((size >= 0.1) & (size < 200)) | ~values.isfinite()]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """The edges without NaN."""
    values = edges(dtype)
    return values[values == values]


def rows(values: torch.Tensor, width: int = 5) -> torch.Tensor:
    """(n, width): each value next to its neighbours, tied with itself, and beside small numbers."""
    place = torch.arange(len(values))
    around = [values[(place + by) % len(values)] for by in range(width)]
    tied = [values, values.flip(0)] + [values] * (width - 2)
    small = values[place % 2]
    beside = [small, values] + [small] * (width - 2)
    return torch.cat([torch.stack(part, 1) for part in (around, tied, beside)])


def ordinary(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Normal floats, small integers, or bools of which half are true."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    high = 2 if dtype == torch.bool else 5
    return torch.randint(0, high, shape, generator=generator).to(dtype)


def without_denormals(tensor: torch.Tensor) -> torch.Tensor:
    """Denormal floats as zeros of their sign, which is how sessions count them."""
    if tensor.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return tensor  # float16 is computed in float32, where its denormals are none
    tiny = tensor.abs() < torch.finfo(tensor.dtype).smallest_normal
    return torch.where(tiny, torch.copysign(torch.zeros_like(tensor), tensor), tensor)
