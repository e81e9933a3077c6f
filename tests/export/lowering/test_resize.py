"""Resizing to sizes that only a run tells gives torch's elements, and reads the very same ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import attngraph

pytestmark = pytest.mark.wide

# A place of up to 41 is rounded by 2e-6, and neighbours differ by 6.
_CLOSE = {"rtol": 1e-5, "atol": 2e-5}
_SIZES = ((5, 6, 4), (11, 3, 8), (14, 13, 5), (1, 1, 1))
_WANTED = ((7, 9, 3), (2, 2, 2), (20, 5, 11), (41, 17, 8), (1, 1, 1))
_SMOOTH = [
    *[("linear", 1, aligned) for aligned in (False, True)],
    *[("bilinear", 2, aligned) for aligned in (False, True)],
    *[("bicubic", 2, aligned) for aligned in (False, True)],
    *[("trilinear", 3, aligned) for aligned in (False, True)],
]


class Resized(nn.Module):
    """(B, C, …) in the shape of another tensor, or by a factor."""

    def __init__(
        self, mode: str, aligned: bool | None, factor: float | None = None, smooth: bool = False
    ) -> None:
        super().__init__()
        self.how: dict[str, Any] = {"mode": mode, "align_corners": aligned, "antialias": smooth}
        self.factor = factor

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        if self.factor is not None:
            return functional.interpolate(x, scale_factor=self.factor, **self.how)
        return functional.interpolate(x, size=tuple(like.shape), **self.how)


def _compiled(module: nn.Module, rank: int) -> attngraph.Optimized:
    dims = [{at + first: Dim.AUTO for at in range(rank)} for first in (2, 0)]
    like = torch.randn(3, 8, 7)[(0,) * (3 - rank)]
    sample = torch.randn(1, 2, *_SIZES[0][:rank]), like
    fixed = getattr(module, "factor", None) is not None
    shapes = (dims[0], None if fixed else dims[1])
    return attngraph.optimize(module, sample, dynamic_shapes=shapes)


@pytest.mark.parametrize(("mode", "rank", "aligned"), _SMOOTH)
def test_interpolation_to_any_size(mode: str, rank: int, aligned: bool) -> None:
    module = Resized(mode, aligned)
    optimized = _compiled(module, rank)
    for size in _SIZES:
        for wanted in _WANTED:
            x, like = torch.randn(1, 2, *size[:rank]), torch.empty(wanted[:rank])
            torch.testing.assert_close(optimized(x, like), module(x, like), **_CLOSE)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased_interpolation_to_any_size(mode: str) -> None:
    module = Resized(mode, False, smooth=True)
    optimized = _compiled(module, 2)
    for size in (*_SIZES, (40, 33)):
        for wanted in _WANTED:
            x, like = torch.randn(1, 2, *size[:2]), torch.empty(wanted[:2])
            torch.testing.assert_close(optimized(x, like), module(x, like), **_CLOSE)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("rank", [2, 3])
def test_nearest_in_more_dimensions(mode: str, rank: int) -> None:
    module = Resized(mode, None)
    optimized = _compiled(module, rank)
    for size in _SIZES:
        for wanted in _WANTED:
            x, like = torch.randn(1, 2, *size[:rank]), torch.empty(wanted[:rank])
            torch.testing.assert_close(optimized(x, like), module(x, like), rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_is_the_same_element_at_each_size(mode: str) -> None:
    """Resize reads another where the quotient is whole but for rounding: the 2nd of 2 of 14."""
    module = Resized(mode, None)
    optimized = _compiled(module, 1)
    for size in range(1, 32):
        x = torch.arange(float(size)).expand(1, 2, size)
        for wanted in range(1, 96):
            found = optimized(x, torch.empty(wanted))
            assert torch.equal(found, module(x, torch.empty(wanted))), (size, wanted)


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.7, 0.75])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_by_a_factor(mode: str, factor: float) -> None:
    module = Resized(mode, None, factor)
    optimized = _compiled(module, 1)
    for size in range(4, 48):
        x = torch.arange(float(size)).expand(1, 2, size)
        assert torch.equal(optimized(x, torch.empty(7)), module(x, torch.empty(7))), size


def test_nearest_of_sizes_that_are_known() -> None:
    for size, wanted in ((14, 2), (82, 41), (4, 94)):
        module, x = Resized("nearest-exact", None), torch.arange(float(size)).expand(1, 2, size)
        optimized = attngraph.optimize(module, (x, torch.empty(wanted)))
        assert torch.equal(optimized(x, torch.empty(wanted)), module(x, torch.empty(wanted)))
