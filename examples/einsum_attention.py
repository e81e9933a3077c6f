"""The smallest self-attention that is still the whole thing: four einsums and a padding mask.

    out = Σₕ softmax(Qₕ Kₕᵀ / √d + mask) Vₕ Oₕ,    Qₕ = x Aₕ,  Kₕ = x Bₕ,  Vₕ = x Cₕ

The weights have the heads as an axis of their own, so nothing is ever reshaped.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim


class EinsumAttention(nn.Module):
    """(B, S, M) and its mask (B, S), true where there is a token, to (B, S, M)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        depth = width // heads
        self.scale = depth**-0.5
        self.query = nn.Parameter(torch.randn(heads, width, depth) * 1.5 / width**0.5)
        self.key = nn.Parameter(torch.randn(heads, width, depth) * 1.5 / width**0.5)
        self.value = nn.Parameter(torch.randn(heads, width, depth) / width**0.5)
        self.out = nn.Parameter(torch.randn(heads, depth, width) / width**0.5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query = torch.einsum("bqm,hmd->bhqd", x, self.query)
        key = torch.einsum("bkm,hmd->bhkd", x, self.key)
        value = torch.einsum("bkm,hmd->bhkd", x, self.value)
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * self.scale
        scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
        context = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(dim=-1), value)
        return torch.einsum("bhqd,hdm->bqm", context, self.out)


class Encoder(nn.Module):
    """Post-norm layers of attention and MLP over (B, S, M)."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(EinsumAttention(width, heads) for _ in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        norms = iter(self.norms)
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = next(norms)(x + attention(x, mask))
            x = next(norms)(x + mlp(x))
        return x


Shapes = tuple[dict[int, Dim], dict[int, Dim]]


def build() -> tuple[Encoder, tuple[Tensor, Tensor], Shapes]:
    torch.manual_seed(0)
    module = Encoder().eval()
    x = torch.randn(3, 12, 64)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, :3] = False
    mask[1, 8] = False
    axes = {0: Dim("batch", max=1024), 1: Dim("seq", max=4096)}
    return module, (x, mask), (axes, axes)


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
