"""A decoder (Radford et al., 2018): algorithm 10 of Phuong and Hutter (2022), decoding with 14.

    x ← x + attention(LN(x)), causal;  x ← x + W₂ GELU(W₁ LN(x));  p = softmax(W_u LN(x))

`generate` keeps the keys and values of what it has read, so each step reads one token only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import scaled_dot_product_attention

VOCABULARY, WIDTH, HEADS, HIDDEN, LIMIT = 120, 48, 4, 96, 512

Cache = list[tuple[Tensor, Tensor]]


class Block(nn.Module):
    """(B, T, C) to (B, T, C), and its keys and values (B, H, past + T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_out = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, steps, _ = x.shape
        query, key, value = (
            part.view(batch, steps, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        causal = past is None or steps > 1
        context = scaled_dot_product_attention(query, key, value, is_causal=causal)
        x = x + self.out(context.transpose(1, 2).reshape(batch, steps, WIDTH))
        x = x + self.down(nn.functional.gelu(self.up(self.norm_out(x)), approximate="tanh"))
        return x, (key, value)


class Decoder(nn.Module):
    """Ids (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LIMIT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.unembedding = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def read(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Logits of ids (B, T) that follow what the cache holds, and the longer cache."""
        start = 0 if cache is None else cache[0][0].shape[2]
        x = self.words(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        longer: Cache = []
        for at, block in enumerate(self.blocks):
            x, both = block(x, None if cache is None else cache[at])
            longer.append(both)
        return self.unembedding(self.norm(x)), longer

    def forward(self, ids: Tensor) -> Tensor:
        return self.read(ids)[0]

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        steps: int,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """ids (B, T + steps): the likeliest token each time, or one drawn at a temperature."""
        logits, cache = self.read(ids)
        for _ in range(steps):
            last = logits[:, -1]
            if temperature:
                chances = (last / temperature).softmax(dim=-1)
                token = torch.multinomial(chances, 1, generator=generator)
            else:
                token = last.argmax(dim=-1, keepdim=True)
            ids = torch.cat([ids, token], dim=1)
            logits, cache = self.read(token, cache)
        return ids


def build() -> tuple[Decoder, tuple[Tensor], tuple[dict[int, Dim]]]:
    torch.manual_seed(0)
    shapes = ({0: Dim("batch", max=1024), 1: Dim("seq", max=LIMIT)},)
    return Decoder().eval(), (torch.randint(VOCABULARY, (3, 12)),), shapes


if __name__ == "__main__":
    module, (ids,), _ = build()
    print(module.generate(ids[:, :4], 8).tolist())
    seeded = torch.Generator().manual_seed(0)
    print(module.generate(ids[:, :4], 8, temperature=1.0, generator=seeded).tolist())
