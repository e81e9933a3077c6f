"""A weight's codes and steps, and what they lose: quantize.py says how a step is chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from attngraph.dialect.quantized import BLOCK, LEVELS, dequantized, in_bytes

_DIVISORS = {8: (127.0,), 4: (7.0, -8.0, -8.5)}
"""What the largest element is divided by for the step; the first has room on both sides of zero."""
_CHUNK = 1 << 18
"""Elements that are quantised at once: what is computed of them stays in a CPU's cache, and in
memory that the process has (more of them at once take twice to four times as long)."""


def error_bound(bits: int, width: int = BLOCK) -> float:
    """The relative error from which on a weight is not quantised: 2 q, for steps of `width`."""
    levels = (1 << bits - 1) - 1
    largest = 2.3 if width <= BLOCK else math.sqrt(2 * math.log(width))
    return 2 * largest / (math.sqrt(12) * levels)


def packed_rows(data: torch.Tensor, *, narrow: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A matrix (N, K) as the codes and scales of `attn.int8_linear`, and its relative error.

    With `narrow` no sum of two neighbours leaves 16 bits.
    """
    codes = torch.empty(data.shape, dtype=torch.int8)
    scales = torch.empty(len(data), dtype=data.dtype)
    lost = norm = 0.0
    for part in chunks(*data.shape):
        exact = data[part].cpu().float()
        steps = exact.abs().amax(-1) / LEVELS
        if narrow:
            # Each code may be rounded up by a half, so two of them by one.
            steps = torch.maximum(steps, neighbours(exact) / LEVELS)
        scales[part] = steps
        wide = scales[part].float().unsqueeze(-1)
        found = torch.where(wide > 0, exact / wide, 0.0).round_().clamp_(-LEVELS, LEVELS)
        codes[part] = found.nan_to_num_(0.0).to(torch.int8)
        lost += float((codes[part].float() * wide - exact).double().square().sum())
        norm += float(exact.double().square().sum())
    return codes, scales, _relative(lost, norm)


def neighbours(rows: torch.Tensor) -> torch.Tensor:
    """The largest sum (N,) of two neighbours of one sign in each row."""
    sums = [each[:, :-1] + each[:, 1:] for each in (rows.relu(), (-rows).relu())]
    return torch.maximum(*sums).amax(-1)


def packed(data: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A matrix (N, K) as the codes and scales of `attn.quantized_linear`, and its relative error.

    The error is infinite where the matrix holds what is not finite.
    """
    rows, width = data.shape
    blocks = -(-width // BLOCK)
    codes = torch.empty(rows, blocks, BLOCK * bits // 8, dtype=torch.uint8)
    scales = torch.empty(rows, blocks, dtype=data.dtype)
    lost = norm = 0.0
    for part in chunks(rows, blocks * BLOCK):
        exact = data[part].cpu().float()
        whole = torch.nn.functional.pad(exact, (0, blocks * BLOCK - width))
        near, wide = _rounded(whole.view(-1, blocks, BLOCK), data.dtype, bits)
        scales[part] = wide.squeeze(-1)
        codes[part] = in_bytes(near.to(torch.uint8), bits)
        off = dequantized(codes[part], wide.squeeze(-1), bits)[:, :width] - exact
        lost += float(off.double().square().sum())
        norm += float(exact.double().square().sum())
    return codes, scales, _relative(lost, norm)


def _relative(lost: float, norm: float) -> float:
    """An error relative to a norm, both squared; infinite where either isn't finite."""
    if not math.isfinite(norm) or not math.isfinite(lost):
        return math.inf
    return math.sqrt(lost / norm) if norm else 0.0


def _rounded(split: torch.Tensor, dtype: torch.dtype, bits: int) -> tuple[torch.Tensor, ...]:
    """Codes (N, blocks, BLOCK), and each block's step (N, blocks, 1): of `_DIVISORS`, the one with
    the least squared error. Steps are numbers of `dtype`.
    """
    middle, last = 1 << (bits - 1), (1 << bits) - 1
    top = _largest(split)

    def by(divisor: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        steps = ((top.abs() if divisor > 0 else top) / divisor).to(dtype).float()
        near = split / torch.where(steps != 0, steps, math.inf)
        near.round_().add_(middle).clamp_(0, last).nan_to_num_(middle)
        missed = (near - middle).mul_(steps).sub_(split).square_().sum(-1, keepdim=True)
        return near, steps, missed

    first, *others = _DIVISORS[bits]
    near, steps, least = by(first)
    for divisor in others:
        tried = by(divisor)
        better = tried[-1] < least
        pairs = zip(tried, (near, steps, least), strict=True)
        near, steps, least = (torch.where(better, *pair) for pair in pairs)
    return near, steps


def _largest(split: torch.Tensor) -> torch.Tensor:
    """The element of the largest magnitude of each block (…, 1), with its sign."""
    if not split.numel():
        return split[..., :1]
    return split.gather(-1, split.abs().argmax(-1, keepdim=True))


def chunks(count: int, width: int, most: int = _CHUNK) -> Iterator[slice]:
    """Slices of the rows of a matrix, each of at most so many elements, or one row."""
    step = max(1, most // width)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
