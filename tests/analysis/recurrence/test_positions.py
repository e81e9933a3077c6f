"""Formulas of positions whose trials at small lengths say nothing of a window further out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attngraph.compiling.compiler import optimize

FAR = 150  # where the windows end
Weights = Callable[[Tensor, Tensor], Tensor]


class Mixes(nn.Module):
    """Linear attention whose scores are multiplied by what the positions say."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        i, j = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
        return (self.q(x) @ self.k(x).mT * self.weights(i, j) * (i >= j)) @ self.v(x)


def _counted(i: Tensor) -> Tensor:
    """1, 2, 3 … over FAR, as a running sum."""
    return (torch.ones_like(i) / FAR).cumsum(0)


READ: dict[str, Weights] = {
    "no decay": lambda i, j: torch.ones(()),
    "a decay": lambda i, j: torch.exp(-(i - j) / FAR),
    "a slow decay": lambda i, j: torch.exp(-(i - j) * 1e-5),
    "a decay that is cut at 0": lambda i, j: torch.exp(-((i - j) / FAR).clamp(min=0)),
    "a distance that is mirrored at 0": lambda i, j: torch.exp(-((i - j) / FAR).abs()),
    "a decay by a running sum": lambda i, j: torch.exp(-(_counted(i) - _counted(j))),
}
WINDOWS: dict[str, Weights] = {
    "compared with 0": lambda i, j: (i - j) / FAR - 1 <= 0,
    "cut at 0": lambda i, j: torch.exp(-((i - j) / FAR - 1).clamp(min=0)),
    "cut by a gate": lambda i, j: torch.exp(
        -torch.where(i >= j, (i - j) / FAR - 1, 0.0).clamp(min=0)
    ),
    "mirrored": lambda i, j: torch.exp(-((i - j) / FAR - 1).abs()),
    "in places of other lengths": lambda i, j: torch.exp(-(i / FAR - j).clamp(min=0)),
    "in a running sum": lambda i, j: _counted(i) - 1 <= 0,
    "in a running sum that is cut": lambda i, j: torch.exp(-(_counted(i) - 1).clamp(min=0)),
}


@pytest.mark.parametrize(
    ("weights", "is_read"),
    [(each, True) for each in READ.values()] + [(each, False) for each in WINDOWS.values()],
    ids=[*READ, *WINDOWS],
)
def test_a_window_beyond_the_trials_is_not_read_as_endless(weights: Weights, is_read: bool) -> None:
    torch.manual_seed(0)
    model = Mixes(weights).eval().requires_grad_(False)
    length = {1: torch.export.Dim("length", max=4 * FAR)}
    found = optimize(model, (torch.randn(1, 16, 8),), dynamic_shapes=(length,))
    statuses = {site.status for site in found.report.sites}
    assert ("fused" in statuses) == is_read
    x = torch.randn(1, 3 * FAR, 8)
    eager = model(x)
    torch.testing.assert_close(found(x), eager, rtol=0, atol=1e-5 * float(eager.abs().max()))
