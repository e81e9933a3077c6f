"""The module that the tests of the error budget and of its reference run."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F


class Attention(torch.nn.Module):
    """Two residual attention layers with a padding mask, peaked; `fill` is what hides a key.

    `order` permutes every contraction: the same function with other rounding. `epsilon` is the
    norms'.
    """

    def __init__(self, fill: float = -math.inf) -> None:
        super().__init__()
        self.fill = fill
        self.epsilon = 1e-5
        self.order: torch.Tensor | None = None
        self.weights = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.randn(32, 32) / 4) for _ in range(8)]
        )

    def product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if self.order is None or left.shape[-1] != 32:
            return left @ right
        return left[..., self.order] @ right[..., self.order, :]

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for query, key, value, out in zip(*[iter(self.weights)] * 4, strict=True):
            q, k, v = (self.product(x, w) for w in (query, key, value))
            scores = self.product(q, k.transpose(-1, -2)) / 32**0.5
            scores = scores.masked_fill(~mask[:, None], 0) + torch.where(mask, 0, self.fill).to(
                x.dtype
            ).unsqueeze(1)
            x = F.layer_norm(
                x + self.product(torch.softmax(scores, -1) @ v, out), (32,), eps=self.epsilon
            )
        return x


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (4, 10, 32) and a mask (4, 10) with left padding and a hole."""
    mask = torch.ones(4, 10, dtype=torch.bool)
    mask[0, :4] = False
    mask[1, 6] = False
    return torch.randn(4, 10, 32), mask


def run(module: torch.nn.Module, *args: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output = module(*args)
    assert isinstance(output, torch.Tensor)
    return output
