"""The Transformer (Vaswani et al., 2017), with its norms after or before each part.

    attention(Q, K, V) = softmax(Q Kᵀ / √d) V
    post-norm  x ← LN(x + f(x))        pre-norm  x ← x + f(LN(x))

The parts are the algorithms of "Formal Algorithms for Transformers" (Phuong and Hutter, 2022): 4
attention, 5 multi-head attention, 6 layer norm, 7 unembedding, 8 the encoder-decoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.export import Dim

VOCABULARY, WIDTH, HEADS, HIDDEN, LIMIT = 120, 48, 4, 96, 512


class MultiHead(nn.Module):
    """Queries of x (B, S, C) over z (B, T, C) where `seen` (B | 1, 1, S | 1, T): (B, S, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, z: Tensor, seen: Tensor) -> Tensor:
        def heads(packed: Tensor) -> Tensor:
            return packed.view(packed.shape[0], packed.shape[1], HEADS, -1).transpose(1, 2)

        query, key, value = heads(self.query(x)), heads(self.key(z)), heads(self.value(z))
        scores = query @ key.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        mixed: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2))
        return mixed


class LayerNorm(nn.Module):
    """(x − mean) / √(variance + ε) · γ + β over the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)
        return centred / torch.sqrt(variance + 1e-5) * self.gain + self.shift


class Block(nn.Module):
    """Self-attention, attention to a memory if there is one, and two linears with a ReLU."""

    def __init__(self, *, memory: bool, pre_norm: bool) -> None:
        super().__init__()
        self.attend = MultiHead()
        self.cross = MultiHead() if memory else None
        self.feed = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
        self.norms = nn.ModuleList(LayerNorm() for _ in range(3 if memory else 2))
        self.pre_norm = pre_norm

    def forward(
        self,
        x: Tensor,
        seen: Tensor,
        memory: Tensor | None = None,
        memory_seen: Tensor | None = None,
    ) -> Tensor:
        parts: list[Callable[[Tensor], Tensor]] = [lambda x: self.attend(x, x, seen)]
        if (cross := self.cross) is not None:
            parts.append(lambda x: cross(x, memory, memory_seen))
        parts.append(self.feed)
        for part, norm in zip(parts, self.norms, strict=True):
            x = x + part(norm(x)) if self.pre_norm else norm(x + part(x))
        return x


class Embedding(nn.Module):
    """Ids (B, T) to (B, T, C), with sinusoids for the positions."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        rate = torch.exp(torch.arange(0, WIDTH, 2) * -math.log(1e4) / WIDTH)
        angle = torch.outer(torch.arange(LIMIT), rate)
        self.register_buffer("positions", torch.cat([angle.sin(), angle.cos()], dim=-1))

    def forward(self, ids: Tensor) -> Tensor:
        words: Tensor = self.words(ids) * math.sqrt(WIDTH)
        return words + self.positions[: ids.shape[1]]


class Transformer(nn.Module):
    """Source ids (B, S), their mask (B, S), target ids (B, T): logits (B, T, vocabulary)."""

    def __init__(self, *, pre_norm: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.source, self.target = Embedding(), Embedding()
        blocks = [
            nn.ModuleList(Block(memory=memory, pre_norm=pre_norm) for _ in range(layers))
            for memory in (False, True)
        ]
        self.encoder, self.decoder = blocks
        self.unembedding = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        present = mask[:, None, None]
        memory = self.source(source)
        for block in self.encoder:
            memory = block(memory, present)
        steps = target.shape[1]
        causal = torch.ones(steps, steps, dtype=torch.bool).tril()[None, None]
        x = self.target(target)
        for block in self.decoder:
            x = block(x, causal, memory, present)
        logits: Tensor = self.unembedding(x)
        return logits


Shapes = tuple[dict[int, Dim], dict[int, Dim], dict[int, Dim]]
Built = tuple[Transformer, tuple[Tensor, Tensor, Tensor], Shapes]


def build(*, pre_norm: bool = False) -> Built:
    torch.manual_seed(0)
    batch = Dim("batch", max=1024)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, 7:] = False
    source, target = (
        {0: batch, 1: Dim("source", max=LIMIT)},
        {0: batch, 1: Dim("target", max=LIMIT)},
    )
    args = (torch.randint(VOCABULARY, (3, 12)), mask, torch.randint(VOCABULARY, (3, 7)))
    return Transformer(pre_norm=pre_norm).eval(), args, (source, source, target)


def build_pre_norm() -> Built:
    return build(pre_norm=True)


if __name__ == "__main__":
    for pre_norm in (False, True):
        module, args, _ = build(pre_norm=pre_norm)
        print(tuple(module(*args).shape))
