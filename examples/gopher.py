"""A decoder as Gopher is one (Rae et al., 2021): RMS norm, relative positions, no biases.

    attention = softmax(mask((⟨q + u, k⟩ + ⟨q + v, W_r r(i − j)⟩) / √d)) V

The positions are those of Transformer-XL (Dai et al., 2019): the scores of all distances are one
product, which is then shifted so that row i meets distance i − j ("relative shift").
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.export import Dim

VOCABULARY, WIDTH, HEADS, HIDDEN = 120, 48, 4, 128
DEPTH = WIDTH // HEADS


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · γ."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * self.gain


def distances(steps: int) -> Tensor:
    """Sinusoids (T, C) of the distances T − 1 … 0."""
    rate = torch.exp(torch.arange(0, WIDTH, 2) * -math.log(1e4) / WIDTH)
    angle = torch.arange(steps - 1, -1, -1)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def shift(scores: Tensor) -> Tensor:
    """(B, H, T, T) by distance T − 1 … 0 to (B, H, T, T) by key, for the keys j ≤ i."""
    batch, heads, rows, columns = scores.shape
    padded = torch.cat([scores.new_zeros(batch, heads, rows, 1), scores], dim=-1)
    shifted = padded.view(batch, heads, columns + 1, rows)[:, :, 1:]
    return shifted.reshape(batch, heads, rows, columns)


class Block(nn.Module):
    """(B, T, C) to (B, T, C), causal."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_out = RMSNorm(), RMSNorm()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.relative = nn.Linear(WIDTH, WIDTH, bias=False)
        self.u, self.v = (nn.Parameter(torch.randn(HEADS, 1, DEPTH) / 4) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = (
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.Linear(HIDDEN, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, _ = x.shape

        def heads(packed: Tensor) -> Tensor:
            return packed.view(*packed.shape[:-1], HEADS, DEPTH).transpose(-2, -3)

        query, key, value = map(heads, self.qkv(self.norm(x)).chunk(3, dim=-1))
        places = heads(self.relative(distances(steps)))
        content = (query + self.u) @ key.mT
        position = shift((query + self.v) @ places.mT)
        scores = (content + position) / math.sqrt(DEPTH)
        later = torch.ones(steps, steps, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(batch, steps, WIDTH))
        fed: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_out(x))))
        return fed


class Decoder(nn.Module):
    """Ids (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.unembedding = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.unembedding(self.norm(self.blocks(self.words(ids))))
        return logits


def build() -> tuple[Decoder, tuple[Tensor], tuple[dict[int, Dim]]]:
    torch.manual_seed(0)
    shapes = ({0: Dim("batch", max=1024), 1: Dim("seq", max=4096)},)
    return Decoder().eval(), (torch.randint(VOCABULARY, (3, 12)),), shapes


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
