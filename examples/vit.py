"""A vision transformer (Dosovitskiy et al., 2020, arXiv:2010.11929).

z = [class; E patch₁; …; E patch_N] + P,    z ← z + attention(LN(z)),    z ← z + MLP(LN(z))
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import scaled_dot_product_attention

WIDTH, HEADS, PATCH, SIDE = 48, 4, 4, 16


class Block(nn.Module):
    """(B, N, C) to (B, N, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_out = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, count, _ = x.shape
        packed = self.qkv(self.norm(x)).reshape(batch, count, 3, HEADS, WIDTH // HEADS)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        context = scaled_dot_product_attention(query, key, value)
        x = x + self.out(context.transpose(1, 2).reshape(batch, count, WIDTH))
        fed: Tensor = x + self.feed(self.norm_out(x))
        return fed


class VisionTransformer(nn.Module):
    """Images (B, 3, 16, 16) to logits (B, classes)."""

    def __init__(self, classes: int = 10, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH) / 4)
        self.positions = nn.Parameter(torch.randn(1, 1 + (SIDE // PATCH) ** 2, WIDTH) / 4)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(images.shape[0], -1, -1), patches], dim=1)
        x = self.norm(self.blocks(x + self.positions))
        logits: Tensor = self.head(x[:, 0])
        return logits


def build() -> tuple[VisionTransformer, tuple[Tensor], tuple[dict[int, Dim]]]:
    torch.manual_seed(0)
    shapes = ({0: Dim("batch", max=1024)},)
    return VisionTransformer().eval(), (torch.randn(3, 3, SIDE, SIDE),), shapes


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
