"""A block of RWKV-7 as its paper has it (Peng et al. 2025): time mixing, then channel mixing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, SIZE = 3, 8
WIDTH = HEADS * SIZE
_SLOWEST = 0.606531  # e^{−1/2}, as its code has it


class LoRA(nn.Module):
    """f(x A) B + λ."""

    def __init__(self, rank: int, between: str) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH)
        self.between = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "none": nn.Identity()}[
            between
        ]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.between(self.down(x)))
        return y


class TimeMixing(nn.Module):
    """Takes x (B, T, C), what stands before it (B, C), and S (B, H, dv, dk)."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.Parameter(torch.rand(6, WIDTH))
        self.r, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.decay, self.rate = LoRA(8, "tanh"), LoRA(8, "none")
        self.gate = LoRA(16, "sigmoid")
        self.unit, self.kept = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.bonus = nn.Parameter(torch.randn(HEADS, SIZE))
        self.norm = nn.GroupNorm(HEADS, WIDTH, eps=64e-5)

    def forward(self, x: Tensor, last: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        before = torch.cat([last[:, None], x[:, :-1]], 1) - x
        xr, xw, xk, xv, xa, xg = (x + before * mix for mix in self.mixes)
        r, k, v = self.r(xr), self.k(xk), self.v(xv)
        w = torch.exp(-_SLOWEST * torch.sigmoid(self.decay(xw)))
        rate, gate = torch.sigmoid(self.rate(xa)), self.gate(xg)
        kk = F.normalize((k * self.unit).view(batch, length, HEADS, SIZE), dim=-1)
        k = k * (1 + (rate - 1) * self.kept)
        r, w, k, v, rate = (y.view(batch, length, HEADS, SIZE) for y in (r, w, k, v, rate))
        a, b, given = -kk, kk * rate, []
        for t in range(length):
            ab = (state @ a[:, t].unsqueeze(-1)) @ b[:, t].unsqueeze(-2)
            vk = v[:, t].unsqueeze(-1) @ k[:, t].unsqueeze(-2)
            state = state * w[:, t].unsqueeze(-2) + ab + vk
            given.append((state @ r[:, t].unsqueeze(-1)).flatten(1))
        y = torch.stack(given, 1)
        y = self.norm(y.flatten(0, 1)).view_as(x)
        own = (r * k * self.bonus).sum(-1, keepdim=True) * v
        return self.o((y + own.flatten(2)) * gate), x[:, -1], state


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.time, self.mix = TimeMixing(), nn.Parameter(torch.rand(WIDTH))
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(
        self, x: Tensor, last: Tensor, mixed: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x (B, T, C), the tokens before it (B, C) as either half normed them, and S."""
        y, last, state = self.time(self.first(x), last, state)
        x = x + y
        y = self.second(x)
        before = torch.cat([mixed[:, None], y[:, :-1]], 1)
        mixed = y[:, -1]
        y = torch.relu(self.up(y + (before - y) * self.mix)) ** 2
        return x + self.down(y), last, mixed, state
