"""Heads written one by one, as attention is taught: each a module with projections of its own.

headₕ = softmax(Qₕ Kₕᵀ / √d + mask) Vₕ,    Qₕ = x Aₕ,  Kₕ = x Bₕ,  Vₕ = x Cₕ

concatenated:  out = [head₁ … head_H] O
summed:        out = Σₕ headₕ Oₕ              (the same, with O cut into rows)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim


class Head(nn.Module):
    """(B, S, C) and its mask (B, S), true where there is a token, to (B, S, D); causal."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, depth)
        self.key = nn.Linear(width, depth)
        self.value = nn.Linear(width, depth)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        position = torch.arange(x.shape[1], device=x.device)
        visible = (position[None, :] <= position[:, None]) & mask[:, None, :]
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        context: Tensor = scores.softmax(dim=-1) @ value
        return context


class ConcatenatedHeads(nn.Module):
    """(B, S, C) and its mask to (B, S, C): one projection of all contexts side by side."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(width, width // heads) for _ in range(heads))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.out(torch.cat([head(x, mask) for head in self.heads], dim=-1))
        return out


class SummedHeads(nn.Module):
    """(B, S, C) and its mask to (B, S, C): the sum of a projection per head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(width, width // heads) for _ in range(heads))
        self.outs = nn.ModuleList(nn.Linear(width // heads, width) for _ in range(heads))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for head, out in zip(self.heads, self.outs, strict=True):
            total = total + out(head(x, mask))
        return total


class Encoder(nn.Module):
    """Post-norm layers of attention over (B, S, C); `summed` chooses how heads come together."""

    def __init__(
        self, width: int = 96, heads: int = 12, layers: int = 2, summed: bool = False
    ) -> None:
        super().__init__()
        kind = SummedHeads if summed else ConcatenatedHeads
        self.attentions = nn.ModuleList(kind(width, heads) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for attention, norm in zip(self.attentions, self.norms, strict=True):
            x = norm(x + attention(x, mask))
        return x


Shapes = tuple[dict[int, Dim], dict[int, Dim]]


def build(summed: bool = False) -> tuple[Encoder, tuple[Tensor, Tensor], Shapes]:
    torch.manual_seed(0)
    module = Encoder(summed=summed).eval()
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, :3] = False
    mask[1, 8] = False
    axes = {0: Dim("batch", max=1024), 1: Dim("seq", max=4096)}
    return module, (torch.randn(3, 12, 96), mask), (axes, axes)


def build_summed() -> tuple[Encoder, tuple[Tensor, Tensor], Shapes]:
    return build(summed=True)


if __name__ == "__main__":
    for module, args, _ in (build(), build_summed()):
        print(tuple(module(*args).shape))
