"""Seven ways to tell attention where things are.

    linear        x + a t + b                                     (one number per position)
    sinusoidal    x + [sin(t ω₀), cos(t ω₀), …]                   (Vaswani et al., 2017)
    learned       x + P[t]                                        (Gehring et al., 2017)
    rotary        ⟨R(i) q, R(j) k⟩                                (Su et al., arXiv:2104.09864)
    ALiBi         ⟨q, k⟩ − mₕ |i − j|                             (Press et al., arXiv:2108.12409)
    T5            ⟨q, k⟩ + B[bucket(j − i), h]                    (Raffel et al., arXiv:1910.10683)
    relative      ⟨q + u, k⟩ + ⟨q + v, R(i − j)⟩                  (Dai et al., arXiv:1901.02860)

The first three change the input of attention, the others its scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.export import Dim

WIDTH, HEADS, LIMIT = 48, 4, 512
DEPTH = WIDTH // HEADS


class Attention(nn.Module):
    """Multi-head self-attention over x (B, T, C); `scores` is what the last four change."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Logits (B, H, T, T) of queries and keys (B, H, T, D)."""
        return query @ key.mT / math.sqrt(DEPTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        query, key, value = (
            part.view(batch, steps, HEADS, DEPTH).transpose(1, 2)
            for part in self.qkv(x).split(WIDTH, dim=-1)
        )
        context = self.scores(query, key).softmax(-1) @ value
        mixed: Tensor = self.out(context.transpose(1, 2).reshape(batch, steps, WIDTH))
        return mixed


class Linear(Attention):
    """Adds a t + b, with a and b learned."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.offset = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1], dtype=x.dtype)
        return super().forward(x + position[:, None] * self.slope + self.offset)


class Sinusoidal(Attention):
    """Adds a fixed table, sliced to the length."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        angle = torch.outer(
            torch.arange(LIMIT), torch.exp(torch.arange(0, WIDTH, 2) * -math.log(1e4) / WIDTH)
        )
        table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table[: x.shape[1]])


class Learned(Attention):
    """Adds a learned table, looked up by position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LIMIT, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table(torch.arange(x.shape[1])))


class Rotary(Attention):
    """Turns each pair of features of queries and keys by an angle that grows with t."""

    frequency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", 1e4 ** -(torch.arange(0, DEPTH, 2) / DEPTH))

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(query.shape[2]), self.frequency)
        angle = torch.cat([angle, angle], dim=-1)
        cos, sin = angle.cos(), angle.sin()
        turned = []
        for x in (query, key):
            low, high = x.chunk(2, dim=-1)
            turned.append(x * cos + torch.cat([-high, low], dim=-1) * sin)
        return super().scores(turned[0], turned[1])


class Alibi(Attention):
    """A penalty that grows with the distance, at its own rate in each head."""

    slopes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -(torch.arange(1, HEADS + 1) * 8 / HEADS))

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        position = torch.arange(query.shape[2])
        distance = (position[:, None] - position[None, :]).abs()
        return super().scores(query, key) - self.slopes[:, None, None] * distance


class Buckets(Attention):
    """A learned number per head and bucket; far distances share buckets, logarithmically."""

    def __init__(self, buckets: int = 16, reach: int = 64) -> None:
        super().__init__()
        self.bias = nn.Embedding(buckets, HEADS)
        self.buckets, self.reach = buckets, reach

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        position = torch.arange(query.shape[2])
        offset = position[None, :] - position[:, None]
        half = self.buckets // 2
        near, distance = half // 2, offset.abs()
        ratio = torch.log(distance.clamp(min=1) / near) / math.log(self.reach / near)
        far = (near + ratio * (half - near)).long().clamp(max=half - 1)
        bucket = torch.where(distance < near, distance, far) + half * (offset > 0)
        bias: Tensor = self.bias(bucket).permute(2, 0, 1)
        return super().scores(query, key) + bias


class Relative(Attention):
    """Transformer-XL: positions by their distance, through a matrix and two biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Linear(WIDTH, WIDTH, bias=False)
        self.content_bias = nn.Parameter(torch.randn(HEADS, 1, DEPTH) / 4)
        self.position_bias = nn.Parameter(torch.randn(HEADS, 1, DEPTH) / 4)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        steps = query.shape[2]
        position = torch.arange(steps)
        distance = position[:, None] - position[None, :]
        rate = torch.exp(torch.arange(0, WIDTH, 2) * -math.log(1e4) / WIDTH)
        angle = distance[..., None] * rate
        table = torch.cat([angle.sin(), angle.cos()], dim=-1)
        table = self.position(table).view(steps, steps, HEADS, DEPTH)
        content = (query + self.content_bias) @ key.mT
        place = torch.einsum("bhid,ijhd->bhij", query + self.position_bias, table)
        return (content + place) / math.sqrt(DEPTH)


WAYS: dict[str, Callable[[], Attention]] = {
    "linear": Linear,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "alibi": Alibi,
    "t5": Buckets,
    "relative": Relative,
}

Built = tuple[Attention, tuple[Tensor], tuple[dict[int, Dim]]]


def build_way(name: str) -> Built:
    """A module by its name in `WAYS`."""
    torch.manual_seed(0)
    shapes = ({0: Dim("batch", max=1024), 1: Dim("seq", max=LIMIT)},)
    return WAYS[name]().eval(), (torch.randn(3, 12, WIDTH),), shapes


def build() -> Built:
    return build_way("rotary")


if __name__ == "__main__":
    for name in WAYS:
        module, args, _ = build_way(name)
        print(name, tuple(module(*args).shape))
