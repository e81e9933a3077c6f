"""The attention that docs/tutorial.md compiles: eager, causal, with a padding mask.

    attention(x) = softmax(mask(Q Kᵀ / √d)) V

Q, K and V are three projections, the scale is on the scores, and masked scores get a finite fill,
as in the models of `transformers`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim


class EagerAttention(nn.Module):
    """(B, S, C) and its mask (B, S), true where there is a token, to (B, S, C)."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        depth = width // self.heads
        query = self.query(x).view(batch, length, self.heads, depth).transpose(1, 2)
        key = self.key(x).view(batch, length, self.heads, depth).transpose(1, 2)
        value = self.value(x).view(batch, length, self.heads, depth).transpose(1, 2)
        scores = query @ key.transpose(-2, -1) / depth**0.5
        position = torch.arange(length, device=x.device)
        visible = (position[None, :] <= position[:, None]) & mask[:, None, None, :]
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        context: Tensor = scores.softmax(dim=-1) @ value
        return context.transpose(1, 2).reshape(batch, length, width)


Shapes = tuple[dict[int, Dim], dict[int, Dim]]


def build() -> tuple[EagerAttention, tuple[Tensor, Tensor], Shapes]:
    torch.manual_seed(0)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, :3] = False
    axes = {0: Dim("batch", max=1024), 1: Dim("seq", max=4096)}
    return EagerAttention().eval(), (torch.randn(3, 12, 32), mask), (axes, axes)


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
