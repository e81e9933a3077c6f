"""A decoder in the manner of Llama: RMSNorm, rotary positions, grouped queries and SwiGLU.

    attention(x) = softmax(mask(ρ(Q) ρ(K)ᵀ / √d)) V,    ρ(z)ₜ = z cos(tθ) + rotate_half(z) sin(tθ)

Each key-value head serves a group of query heads (grouped query attention, arXiv:2305.13245; rotary
positions, arXiv:2104.09864; SwiGLU, arXiv:2002.05202).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    vocabulary: int = 120
    width: int = 64
    hidden: int = 160
    heads: int = 4
    key_value_heads: int = 2
    layers: int = 2
    theta: float = 10_000.0

    @property
    def depth(self) -> int:
        return self.width // self.heads


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · w over the last axis."""

    def __init__(self, width: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.weight


class Rotary(nn.Module):
    """The cos and sin, each (T, d), of positions 0 … T - 1."""

    frequency: Tensor

    def __init__(self, depth: int, theta: float) -> None:
        super().__init__()
        frequency = theta ** -(torch.arange(0, depth, 2) / depth)
        self.register_buffer("frequency", frequency, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        position = torch.arange(x.shape[1], device=x.device)
        angle = torch.outer(position, self.frequency)
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (xᵢ, xᵢ₊d/2) of (B, N, T, d) by its position's angle."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class GroupedQueryAttention(nn.Module):
    """(B, T, C) to (B, T, C), causal."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.depth, self.group = config.depth, config.heads // config.key_value_heads
        self.q_proj = nn.Linear(config.width, config.heads * config.depth, bias=False)
        self.k_proj = nn.Linear(config.width, config.key_value_heads * config.depth, bias=False)
        self.v_proj = nn.Linear(config.width, config.key_value_heads * config.depth, bias=False)
        self.o_proj = nn.Linear(config.heads * config.depth, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, _ = x.shape
        query, key, value = (
            projection(x).view(batch, time, -1, self.depth).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        key = key.repeat_interleave(self.group, dim=1)
        value = value.repeat_interleave(self.group, dim=1)
        future = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
        scores = query @ key.transpose(-2, -1) / self.depth**0.5
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        context = (weights @ value).transpose(1, 2).reshape(batch, time, -1)
        projected: Tensor = self.o_proj(context)
        return projected


class SwiGLU(nn.Module):
    """(silu(x G) · x U) D."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, each with a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = GroupedQueryAttention(config)
        self.mlp_norm = RMSNorm(config.width)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Decoder(nn.Module):
    """Token ids (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.rotary = Rotary(config.depth, config.theta)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.out = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(input_ids)
        cos, sin = self.rotary(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.out(self.norm(x))
        return logits


def build(config: Config = Config()) -> tuple[Decoder, tuple[Tensor], tuple[dict[int, Dim]]]:
    torch.manual_seed(0)
    module = Decoder(config).eval()
    input_ids = torch.randint(config.vocabulary, (3, 12))
    return module, (input_ids,), ({0: Dim("batch", max=1024), 1: Dim("seq", max=4096)},)


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
