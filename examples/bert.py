"""An encoder that sees both ways (Devlin et al., 2018): algorithm 9 of Phuong and Hutter (2022).

x ← LN(x + attention(x)),  x ← LN(x + W₂ GELU(W₁ x)),  p = softmax(W_u LN(GELU(W_f x)))
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

VOCABULARY, WIDTH, HEADS, HIDDEN, LIMIT = 120, 48, 4, 96, 512


class Block(nn.Module):
    """(B, T, C) to (B, T, C); `mask` (B, T) is true where there is a token."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm, self.norm_out = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, key_padding_mask=~mask, need_weights=False)
        x = self.norm(x + mixed)
        fed: Tensor = self.norm_out(x + self.down(nn.functional.gelu(self.up(x))))
        return fed


class Encoder(nn.Module):
    """Ids (B, T), kinds of sentence (B, T) and mask (B, T): logits of each word (B, T, V)."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2, WIDTH)
        self.positions, self.norm = nn.Embedding(LIMIT, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.final, self.final_norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.unembedding = nn.Linear(WIDTH, VOCABULARY)
        self.unembedding.weight = self.words.weight

    def forward(self, ids: Tensor, kinds: Tensor, mask: Tensor) -> Tensor:
        position = torch.arange(ids.shape[1])
        x = self.norm(self.words(ids) + self.positions(position) + self.kinds(kinds))
        for block in self.blocks:
            x = block(x, mask)
        x = self.final_norm(nn.functional.gelu(self.final(x)))
        logits: Tensor = self.unembedding(x)
        return logits


Shapes = tuple[dict[int, Dim], dict[int, Dim], dict[int, Dim]]


def build() -> tuple[Encoder, tuple[Tensor, Tensor, Tensor], Shapes]:
    torch.manual_seed(0)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, :5] = False
    args = (torch.randint(VOCABULARY, (3, 12)), torch.randint(2, (3, 12)), mask)
    shape = {0: Dim("batch", max=1024), 1: Dim("seq", max=LIMIT)}
    return Encoder().eval(), args, (shape, shape, shape)


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
