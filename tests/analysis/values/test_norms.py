"""Rows that are divided by their norms, in all spellings, have a norm of at most one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attngraph.analysis.values.intervals import Intervals
from attngraph.frontend.capture import capture

EPS = torch.finfo(torch.float32).eps


class Made(nn.Module):
    def __init__(self, of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.of(x, y)


UNIT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "normalize": lambda x, y: F.normalize(x, dim=-1),
    "rsqrt of a sum": lambda x, y: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6),
    "rsqrt first": lambda x, y: x.square().sum(dim=2, keepdim=True).add(1e-6).rsqrt() * x,
    "sqrt": lambda x, y: x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt(),
    "clamped sqrt": lambda x, y: x / x.pow(2).sum(-1, keepdim=True).sqrt().clamp(min=1e-6),
    "norm and a number": lambda x, y: x / (x.norm(dim=-1, keepdim=True) + 1e-8),
    "unsqueezed": lambda x, y: x / (x.norm(dim=-1)[..., None] + 1e-8),
    "reciprocal": lambda x, y: x * x.norm(dim=-1, keepdim=True).clamp_min(1e-6).reciprocal(),
    "turned": lambda x, y: -F.normalize(x, dim=-1).permute(1, 0, 2).contiguous(),
    "gated": lambda x, y: F.normalize(x, dim=-1) * y.sigmoid(),
    "hidden": lambda x, y: torch.where(y > 0, torch.full((), 0.0), F.normalize(x, dim=-1)),
    "padded": lambda x, y: F.pad(F.normalize(x, dim=-1), (0, 0, 1, 2))[:, 1:],
    "joined": lambda x, y: torch.cat((F.normalize(x, dim=-1), torch.full((3, 1, 8), 0.1)), 1),
    "a head": lambda x, y: F.normalize(x.unflatten(1, (2, 2)).flatten(0, 1), dim=-1),
}


@pytest.mark.parametrize("of", UNIT.values(), ids=list(UNIT))
def test_a_norm_is_at_most_one(of: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    (made,) = capture(Made(of), (x, y)).graph.outputs
    assert Intervals().length(made) == 1.0
    for scale in (1e-30, 1e-9, 1.0, 1e9):
        assert float(of(x * scale, y).norm(dim=-1).max()) <= 1 + 8 * EPS


def test_heads_have_norms_of_their_own() -> None:
    def of(x: Tensor, y: Tensor) -> Tensor:
        return F.normalize(x.unflatten(-1, (2, 4)), dim=-1).flatten(-2) * 0.5

    (made,) = capture(Made(of), (torch.randn(3, 4, 8),) * 2).graph.outputs
    assert Intervals().length(made, 4) == 0.5
    assert Intervals().length(made) == pytest.approx(0.5 * math.sqrt(8))  # of its elements
    assert Intervals().length(made, 2) == pytest.approx(0.5 * math.sqrt(2))


def test_a_root_of_a_mean_leaves_the_root_of_a_count() -> None:
    def of(x: Tensor, y: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    (made,) = capture(Made(of), (torch.randn(3, 4, 8),) * 2).graph.outputs
    assert Intervals().length(made) == pytest.approx(math.sqrt(8))
    assert Intervals().largest(made) == pytest.approx(math.sqrt(8))


OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "another axis": lambda x, y: F.normalize(x, dim=1),
    "another's norm": lambda x, y: x / y.norm(dim=-1, keepdim=True).clamp_min(1e-6),
    "its own norm and no more": lambda x, y: x / x.norm(dim=-1, keepdim=True),
    "a sum of magnitudes": lambda x, y: x / (x.abs().sum(-1, keepdim=True) - 1e-6),
    "less than its norm": lambda x, y: x / (x.norm(dim=-1, keepdim=True) - 1e-6).clamp_min(1e-6),
    "clamped from above": lambda x, y: x / x.norm(dim=-1, keepdim=True).clamp(1e-6, 2.0),
    "the largest": lambda x, y: x / x.norm(float("inf"), dim=-1, keepdim=True).clamp_min(1e-6),
    "the norm of another row": lambda x, y: (
        x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6).roll(1, 0)
    ),
    "padded by ones": lambda x, y: F.pad(F.normalize(x, dim=-1), (0, 0, 1, 2), value=1.0),
    "joined with others": lambda x, y: torch.cat((F.normalize(x, dim=-1), y), 1),
    "cubes": lambda x, y: x / (x.pow(3).sum(-1, keepdim=True) + 1e-6).sqrt(),
    "a table without a source": lambda x, y: x / torch.arange(1.0, 9.0),
    "its sum": lambda x, y: x * torch.full((8,), 2.0).sum(-1, keepdim=True).rsqrt(),
    "half precision loses squares": lambda x, y: F.normalize(x.half(), dim=-1).float(),
}


def test_squares_that_vanish_are_left_out_of_account_if_asked() -> None:
    (made,) = capture(
        Made(OTHERS["its own norm and no more"]), (torch.randn(3, 4, 8),) * 2
    ).graph.outputs
    assert Intervals(vanishing=False).length(made) == 1.0


@pytest.mark.parametrize("of", OTHERS.values(), ids=list(OTHERS))
def test_near_misses_have_no_such_bound(of: Callable[[Tensor, Tensor], Tensor]) -> None:
    (made,) = capture(Made(of), (torch.randn(3, 4, 8),) * 2).graph.outputs
    assert Intervals().length(made) > 1
