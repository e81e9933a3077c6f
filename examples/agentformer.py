"""Agent-aware attention (Yuan et al., 2021, arXiv:2103.14023).

    scores = M ⊙ (Q_self K_selfᵀ) + (1 − M) ⊙ (Q_other K_otherᵀ),    Mᵢⱼ = [agent(i) = agent(j)]

A token looks at its own agent's tokens with one pair of queries and keys, at other agents' tokens
with another; the softmax runs over both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.export import Dim

WIDTH, HEADS = 48, 4
DEPTH = WIDTH // HEADS


class AgentAwareAttention(nn.Module):
    """x (B, T, C), agents (T,) that each token belongs to, and a mask (B, T): (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, agents: Tensor, mask: Tensor) -> Tensor:
        batch, steps, _ = x.shape

        def heads(packed: Tensor) -> Tensor:
            return packed.view(batch, steps, HEADS, DEPTH).transpose(1, 2)

        query, key, value = map(heads, self.qkv(x).chunk(3, dim=-1))
        own_query, own_key = map(heads, self.own(x).chunk(2, dim=-1))
        same = (agents[:, None] == agents[None, :]).to(x.dtype)
        scores = query @ key.mT * (1 - same) + own_query @ own_key.mT * same
        scores = (scores / math.sqrt(DEPTH)).masked_fill(~mask[:, None, None], float("-inf"))
        context = scores.softmax(dim=-1) @ value
        mixed: Tensor = self.out(context.transpose(1, 2).reshape(batch, steps, WIDTH))
        return mixed


Shapes = tuple[dict[int, Dim], dict[int, Dim], dict[int, Dim]]


def build() -> tuple[AgentAwareAttention, tuple[Tensor, Tensor, Tensor], Shapes]:
    torch.manual_seed(0)
    batch, seq = Dim("batch", max=1024), Dim("seq", max=4096)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, 7:] = False
    args = (torch.randn(3, 12, WIDTH), torch.arange(12) % 4, mask)
    return AgentAwareAttention().eval(), args, ({0: batch, 1: seq}, {0: seq}, {0: batch, 1: seq})


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
