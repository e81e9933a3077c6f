"""Three ways of processing a sequence side by side: convolution, recurrence, attention.

convolution  yₜ = Σₖ Wₖ xₜ₊ₖ            a few neighbours, all positions at once
recurrence   hₜ = GRU(xₜ, hₜ₋₁)         the whole past, one position after the other
attention    yₜ = Σⱼ αₜⱼ V xⱼ           everything, all positions at once
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

WIDTH, HEADS = 48, 4


class ThreeWays(nn.Module):
    """x (B, T, C) and its mask (B, T) to the three results, each (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.recurrence = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x * mask[..., None]
        convolved = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        recurrent, _ = self.recurrence(x)
        attended, _ = self.attention(x, x, x, key_padding_mask=~mask, need_weights=False)
        return convolved, recurrent, attended


def build() -> tuple[ThreeWays, tuple[Tensor, Tensor], tuple[dict[int, Dim], dict[int, Dim]]]:
    torch.manual_seed(0)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, 7:] = False
    shape = {0: Dim("batch", max=1024), 1: Dim("seq", max=4096)}
    return ThreeWays().eval(), (torch.randn(3, 12, WIDTH), mask), (shape, shape)


if __name__ == "__main__":
    module, args, _ = build()
    print([tuple(result.shape) for result in module(*args)])
