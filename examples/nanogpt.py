"""A decoder in the manner of nanoGPT: causal self-attention, spelled out.

    attention(x) = softmax(mask(Q Kᵀ / √d)) V,    [Q K V] = x W + b

with one packed projection for Q, K and V, and a lower-triangular buffer, made once for the longest
context, as the mask. The token embedding is also the output projection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    vocabulary: int = 128
    context: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2


class CausalSelfAttention(nn.Module):
    """(B, T, C) to (B, T, C)."""

    tril: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.c_attn = nn.Linear(config.width, 3 * config.width)
        self.c_proj = nn.Linear(config.width, config.width)
        tril = torch.ones(config.context, config.context).tril()
        self.register_buffer("tril", tril.view(1, 1, config.context, config.context))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(key.size(-1)))
        scores = scores.masked_fill(self.tril[:, :, :time, :time] == 0, float("-inf"))
        context = functional.softmax(scores, dim=-1) @ value
        merged = context.transpose(1, 2).contiguous().view(batch, time, width)
        projected: Tensor = self.c_proj(merged)
        return projected


class Block(nn.Module):
    """Pre-norm attention and a four times wider MLP, each with a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class NanoGPT(nn.Module):
    """Token ids (B, T) to logits (B, T, vocabulary), for T up to the context."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        x: Tensor = self.wte(input_ids) + self.wpe(position)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def build(config: Config = Config()) -> tuple[NanoGPT, tuple[Tensor], tuple[dict[int, Dim]]]:
    torch.manual_seed(0)
    module = NanoGPT(config).eval()
    input_ids = torch.randint(config.vocabulary, (3, 12))
    # torch.export guards that the sliced mask is not the whole buffer: T stays below the context.
    shapes = {0: Dim("batch", max=1024), 1: Dim("seq", max=config.context - 1)}
    return module, (input_ids,), (shapes,)


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
