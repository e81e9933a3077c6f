"""Code that pads to whole windows `if n % 4:` takes every size, whatever the sample's is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import attngraph
from attngraph.errors import CaptureError

LENGTHS = (1, 3, 4, 5, 8, 9, 12, 30)
AXES = ({0: Dim("batch", min=1, max=16), 1: Dim("length", min=1, max=64)},)


def _if_any(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 4 - x.shape[1] % 4)) if x.shape[1] % 4 != 0 else x


def _of_a_number(x: Tensor) -> Tensor:
    rest = x.shape[1] % 4
    if rest > 0:
        missing = 4 - rest
        x = F.pad(x, (0, 0, missing, 0))
    return x


def _joined(x: Tensor) -> Tensor:
    if x.shape[1] % 4:
        x = torch.cat([x, x.new_zeros(x.shape[0], 4 - (x.shape[1] % 4), x.shape[2])], 1)
    return x


def _or_nothing(x: Tensor) -> Tensor:
    length = x.shape[1]
    return F.pad(x, (0, 0, 0, 0 if length % 4 == 0 else 4 - length % 4))


def _of_a_quotient(x: Tensor) -> Tensor:
    windows = x.shape[1] / 4
    return x if windows.is_integer() else F.pad(x, (0, 0, 0, math.ceil(windows) * 4 - x.shape[1]))


class InWindows(nn.Module):
    """(B, N, 8) to the same, through attention to windows of 4 and the one before each."""

    def __init__(self, padded: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.padded = padded
        self.projections = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        padded = self.padded(x)
        count = padded.shape[1] // 4
        windows = padded.reshape(x.shape[0], count, padded.shape[1] // count, 8)
        query, key, value = self.projections(windows).chunk(3, -1)
        before = F.pad(key, (0, 0, 0, 0, 1, 0))[:, :count]
        keys = torch.cat([before, key], 2)
        values = torch.cat([F.pad(value, (0, 0, 0, 0, 1, 0))[:, :count], value], 2)
        weights = torch.einsum("bwid,bwjd->bwij", query, keys).softmax(-1)
        context = torch.einsum("bwij,bwjd->bwid", weights, values)
        return context.flatten(1, 2)[:, -x.shape[1] :]


@pytest.mark.parametrize("sample", [8, 9])
@pytest.mark.parametrize("padded", [_if_any, _of_a_number, _joined, _or_nothing, _of_a_quotient])
def test_windows_take_every_length(padded: Callable[[Tensor], Tensor], sample: int) -> None:
    torch.manual_seed(0)
    module = InWindows(padded).eval()
    optimized = attngraph.optimize(module, (torch.randn(2, sample, 8),), dynamic_shapes=AXES)
    for length in LENGTHS:
        x = torch.randn(3, length, 8)
        torch.testing.assert_close(optimized(x), module(x))


def _around(windows: Tensor, value: float = -1.0) -> Tensor:
    """Each window (B, W, 4, …) behind the one before it."""
    padded = F.pad(windows, (*(0, 0) * (windows.dim() - 2), 1, 0), value=value)
    count = windows.shape[1]
    return torch.cat([padded[:, at : at + count] for at in range(2)], 2)


class Local(nn.Module):
    """(B, 2, N, 8) and a mask of keys (B, N), as lucidrains' local-attention has it."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, heads, length, width = x.shape
        rows = _of_a_quotient(x.reshape(batch * heads, length, width))
        count = rows.shape[1] // 4
        windows = rows.reshape(batch * heads, count, rows.shape[1] // count, width)
        keys = _around(windows)
        scores = torch.einsum("bwid,bwjd->bwij", windows, keys)
        mask = _of_a_quotient(mask[..., None])[..., 0]
        mask = _around(mask.reshape(batch, count, mask.shape[1] // count).float(), 0.0) > 0
        mask = mask[:, None, :, None].expand(-1, heads, -1, -1, -1).flatten(0, 1)
        weights = scores.masked_fill(~mask, -1e9).softmax(-1)
        context = torch.einsum("bwij,bwjd->bwid", weights, keys)
        return context.flatten(1, 2)[:, :length].reshape(batch, heads, length, width)


def test_a_sample_of_whole_windows_whose_trace_fails_is_taken_longer() -> None:
    """torch can't view b·n // (n // 4) rows of x, and as many of the mask, as windows of 4."""
    (rows,) = AXES
    sample = torch.randn(2, 2, 8, 8), torch.rand(2, 8) > 0.3
    axes = {0: rows[0], 2: rows[1]}, rows
    optimized = attngraph.optimize(Local(), sample, dynamic_shapes=axes)
    for length in LENGTHS:
        inputs = torch.randn(3, 2, length, 8), torch.rand(3, length) > 0.3
        torch.testing.assert_close(optimized(*inputs), Local()(*inputs))


class Padded(nn.Module):
    """Always by 1 to 4 rows, as without a branch no rest is 4 rows."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 4 - x.shape[1] % 4)).cumsum(1)


@pytest.mark.parametrize("sample", [8, 9])
def test_without_a_branch_whole_windows_get_another(sample: int) -> None:
    optimized = attngraph.optimize(Padded(), (torch.randn(2, sample, 8),), dynamic_shapes=AXES)
    for length in LENGTHS:
        x = torch.randn(3, length, 8)
        torch.testing.assert_close(optimized(x), Padded()(x))


class OrLess(nn.Module):
    """The side without a rest does something else: no trace is both."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (4 - x.shape[1] % 4) if x.shape[1] % 4 else x


def test_sides_that_differ_are_told_with_what_is_true_of_them() -> None:
    """1 is a size that has a rest, and isn't what can't be had."""
    said = r"Dim 'length' can't take every size: the model demands length % 4 ≠ 0"
    with pytest.raises(CaptureError, match=said):
        attngraph.optimize(OrLess(), (torch.randn(2, 9, 8),), dynamic_shapes=AXES)
