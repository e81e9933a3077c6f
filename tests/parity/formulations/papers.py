"""Whole attention layers as their authors' code has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.formulations.kit import SELF, formulation

M, H, D = 18, 3, 6


def _heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], H, -1).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class _Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(M, M), nn.Linear(M, M)
        self.value, self.out = nn.Linear(M, M), nn.Linear(M, M)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _heads(self.query(x)), _heads(self.key(x)), _heads(self.value(x))


def _turned(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


@formulation(SELF, dynamic="b s")
class DeepseekV3(nn.Module):
    """MLA: interleaved rotary features sorted into halves, K and Q filled by slice assignment."""

    NOPE, ROPE, WIDTH, RANK = 8, 4, 6, 10

    def __init__(self) -> None:
        super().__init__()
        self.query_low, self.query_norm = nn.Linear(M, 12), nn.RMSNorm(12)
        self.query_high = nn.Linear(12, H * (self.NOPE + self.ROPE), bias=False)
        self.low, self.norm = nn.Linear(M, self.RANK + self.ROPE), nn.RMSNorm(self.RANK)
        self.high = nn.Linear(self.RANK, H * (self.NOPE + self.WIDTH), bias=False)
        self.out = nn.Linear(H * self.WIDTH, M)

    def rotate(self, x: Tensor) -> Tensor:
        batch, heads, length, width = x.shape
        frequencies = 100.0 ** -(torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(length).float(), frequencies)
        angles = torch.cat((angles, angles), -1)
        x = x.view(batch, heads, length, width // 2, 2).transpose(4, 3)
        x = x.reshape(batch, heads, length, width)
        return x * angles.cos() + _turned(x) * angles.sin()

    def filled(self, plain: Tensor, rotary: Tensor) -> Tensor:
        whole = plain.new_empty(*plain.shape[:3], self.NOPE + self.ROPE)
        whole[..., : self.NOPE] = plain
        whole[..., self.NOPE :] = rotary
        return whole

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        query = _heads(self.query_high(self.query_norm(self.query_low(x))))
        query, query_rotary = query.split([self.NOPE, self.ROPE], -1)
        latent, rotary = self.low(x).split([self.RANK, self.ROPE], -1)
        key, value = _heads(self.high(self.norm(latent))).split([self.NOPE, self.WIDTH], -1)
        query = self.filled(query, self.rotate(query_rotary))
        key = self.filled(key, self.rotate(rotary[:, None]))
        scores = query @ key.transpose(2, 3) * (self.NOPE + self.ROPE) ** -0.5
        scores = scores + torch.full((length, length), float("-inf")).triu(1)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return self.out((weights @ value).transpose(1, 2).reshape(*x.shape[:2], -1))


@formulation(SELF, dynamic="b s")
class Forgetting(_Projections):
    """Forgetting transformer: the sum of the log gates between key and query is added."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(M, H)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        gates = F.logsigmoid(self.gate(x).transpose(1, 2)).cumsum(-1)
        scores = query @ key.mT / D**0.5 + gates[..., :, None] - gates[..., None, :]
        seen = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        return self.out(_joined(torch.where(seen, scores, -torch.inf).softmax(-1) @ value))


@formulation(SELF, dynamic="b s")
class XPos(_Projections):
    """Queries grow with the position and keys shrink, with the rotation."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        length = x.shape[1]
        even = torch.arange(0, D, 2)
        angles = torch.outer(torch.arange(length).float(), 100.0 ** -(even / D))
        angles = torch.cat((angles, angles), -1)
        growth = ((even + 0.4 * D) / (1.4 * D)) ** ((torch.arange(length) - length // 2) / 8)[
            :, None
        ]
        growth = torch.cat((growth, growth), -1)
        query = query * angles.cos() * growth + _turned(query) * angles.sin() * growth
        key = key * angles.cos() / growth + _turned(key) * angles.sin() / growth
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(_joined(context))


@formulation(SELF, dynamic="b s")
class ContextualPositions(_Projections):
    """CoPE: the position is a sum of gates of the scores, and interpolates a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, D, 4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        hidden = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        scores = query @ key.mT / D**0.5 + hidden
        position = scores.sigmoid().flip(-1).cumsum(-1).flip(-1).clamp(max=3)
        table = query @ self.table
        above = table.gather(-1, position.ceil().long())
        below = table.gather(-1, position.floor().long())
        share = position - position.floor()
        bias = above * share + below * (1 - share)
        return self.out(_joined((scores + bias).softmax(-1) @ value))


@formulation(SELF, dynamic="b s")
class AdaptedBias(_Projections):
    """DAPE: what is added to the scores is made of them, and of a bias, across the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(2 * H, 6), nn.LeakyReLU(), nn.Linear(6, H))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        place = torch.arange(x.shape[1])
        bias = -(place[:, None] - place).abs() * torch.tensor([0.5, 0.25, 0.125])[:, None, None]
        scores = query @ key.mT / D**0.5
        both = torch.cat([scores, bias.expand_as(scores)], 1).permute(0, 2, 3, 1)
        scores = scores + bias + self.mix(both).permute(0, 3, 1, 2)
        scores = scores.masked_fill(place > place[:, None], float("-inf"))
        return self.out(_joined(scores.softmax(-1) @ value))


@formulation("b 12 m", dynamic="b")
class LookAround(_Projections):
    """Local attention in blocks that also see the blocks on either side, padded by -1."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = *x.shape[:2], 3
        query, key, value = (
            part.reshape(batch * H, length // size, size, D) for part in self.project(x)
        )
        position = torch.arange(length).view(1, length // size, size)

        def around(blocks: Tensor, pad: float) -> Tensor:
            padding = (0, 0) * (blocks.dim() - 2) + (1, 1)
            padded = F.pad(blocks, padding, value=pad)
            return torch.cat([padded[:, i : i + length // size] for i in range(3)], 2)

        scores = torch.einsum("bcid,bcjd->bcij", query, around(key, 0.0)) * D**-0.5
        own, other = position[..., None], around(position, -1)[..., None, :]
        hidden = (own < other) | (own > other + size) | (other == -1)
        scores = scores.masked_fill(hidden, -torch.finfo(scores.dtype).max)
        context = torch.einsum("bcij,bcjd->bcid", scores.softmax(-1), around(value, 0.0))
        return self.out(_joined(context.reshape(batch, H, length, D)))


@formulation("b 12 m", dynamic="b")
class CompressedKeys(_Projections):
    """Memory-compressed attention: a strided convolution of K and V, and a null key."""

    def __init__(self) -> None:
        super().__init__()
        self.compress = nn.Conv1d(M, M, 3, stride=3, groups=H)
        self.null = nn.Parameter(torch.randn(2, 1, 1, M))

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        pairs = zip((self.key(x), self.value(x)), self.null, strict=True)
        key, value = (
            _heads(torch.cat((null.expand(batch, -1, -1), self.compress(part.mT).mT), 1))
            for part, null in pairs
        )
        scores = _heads(self.query(x)) @ key.mT * D**-0.5
        later = torch.arange(length)[:, None] < torch.arange(length // 3) * 3
        scores = scores.masked_fill(F.pad(later, (1, 0), value=False), -1e9)
        return self.out(_joined(scores.softmax(-1) @ value))
