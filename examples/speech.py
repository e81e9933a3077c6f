"""A speech encoder as Whisper's (Radford et al., 2022, arXiv:2212.04356).

    frames = GELU(conv₂(GELU(conv₁(mel))))   at half the rate,   then pre-norm self-attention blocks

The mask of the mel frames is thinned as the second convolution thins the frames.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.export import Dim

MELS, WIDTH, HEADS = 20, 48, 4


class SpeechEncoder(nn.Module):
    """Log-mel frames (B, M, 2 T) and which are there (B, 2 T): states (B, T, C)."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.first = nn.Conv1d(MELS, WIDTH, 3, padding=1)
        self.second = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 2 * WIDTH, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, mel: Tensor, mask: Tensor) -> Tensor:
        gelu = nn.functional.gelu
        x = gelu(self.second(gelu(self.first(mel * mask[:, None])))).transpose(1, 2)
        rate = torch.exp(torch.arange(0, WIDTH, 2) * -math.log(1e4) / (WIDTH - 2))
        angle = torch.arange(x.shape[1])[:, None] * rate
        x = x + torch.cat([angle.sin(), angle.cos()], dim=-1)
        absent = ~mask[:, ::2]
        for block in self.blocks:
            x = block(x, src_key_padding_mask=absent)
        states: Tensor = self.norm(x)
        return states


def build() -> tuple[SpeechEncoder, tuple[Tensor, Tensor], tuple[dict[int, Dim], dict[int, Dim]]]:
    torch.manual_seed(0)
    batch, half = Dim("batch", max=1024), Dim("half", min=2, max=1500)
    mask = torch.ones(3, 24, dtype=torch.bool)
    mask[1, 14:] = False
    args = (torch.randn(3, MELS, 24), mask)
    return SpeechEncoder().eval(), args, ({0: batch, 2: 2 * half}, {0: batch, 1: 2 * half})


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
