"""Heads whose scores differ: biases, masks, scales, norms and rotary embeddings of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.per_head.kit import D, H, Heads, attend, case, causal


@case()
class Alibi(Heads):
    """A slope per head."""

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1])
        distance = (position[None, :] - position[:, None]).to(x.dtype)
        contexts = []
        for h, head in enumerate(self.heads):
            scores = head.query(x) @ head.key(x).transpose(-2, -1) * D**-0.5
            scores = scores - 2.0 ** -(h + 1) * distance.abs()
            contexts.append(scores.softmax(-1) @ head.value(x))
        return self.out(torch.cat(contexts, -1))


@case()
class LearnedBias(Heads):
    """A table of relative positions per head."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList(torch.randn(127) for _ in range(H))

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1])
        relative = position[None, :] - position[:, None] + 63
        contexts = []
        for head, table in zip(self.heads, self.tables, strict=True):
            scores = head.query(x) @ head.key(x).transpose(-2, -1) * D**-0.5
            contexts.append((scores + table[relative]).softmax(-1) @ head.value(x))
        return self.out(torch.cat(contexts, -1))


@case()
class Temperatures(Heads):
    """A scale per head."""

    def forward(self, x: Tensor) -> Tensor:
        contexts = [
            (head.query(x) @ head.key(x).mT * (0.2 + 0.1 * h)).softmax(-1) @ head.value(x)
            for h, head in enumerate(self.heads)
        ]
        return self.out(torch.cat(contexts, -1))


@case(attentions=2)
class Windows(Heads):
    """Half of the heads are causal: two attentions of two heads."""

    def forward(self, x: Tensor) -> Tensor:
        contexts = []
        for h, head in enumerate(self.heads):
            mask = causal(x) if h < 2 else None
            contexts.append(attend(head.query(x), head.key(x), head.value(x), mask))
        return self.out(torch.cat(contexts, -1))


def rotate(x: Tensor) -> Tensor:
    position = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
    angle = position * 10000.0 ** (-torch.arange(0, D, 2) / D)
    angle = torch.cat([angle, angle], -1)
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


@case()
class Rotary(Heads):
    """Rotary embeddings within each head."""

    def forward(self, x: Tensor) -> Tensor:
        contexts = [
            attend(rotate(head.query(x)), rotate(head.key(x)), head.value(x), causal(x))
            for head in self.heads
        ]
        return self.out(torch.cat(contexts, -1))


@case()
class NormedAndGated(Heads):
    """Norms of queries and keys with weights of each head's own, and a gate on each context."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(H))
        self.gates = nn.ParameterList(torch.randn(D) for _ in range(H))
        for norm in self.norms:
            nn.init.normal_(norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        contexts = [
            attend(norm(head.query(x)), head.key(x), head.value(x)) * gate.sigmoid()
            for head, norm, gate in zip(self.heads, self.norms, self.gates, strict=True)
        ]
        return self.out(torch.cat(contexts, -1))


@case()
class Sdpa(Heads):
    """torch's own attention on (B, 1, S, D)."""

    def forward(self, x: Tensor) -> Tensor:
        contexts = []
        for head in self.heads:
            q, k, v = (f(x)[:, None] for f in (head.query, head.key, head.value))
            contexts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.out(torch.cat(contexts, 1).transpose(1, 2).flatten(2))


@case()
class WeightsReturned(Heads):
    """The weights of all heads are returned, stacked."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        contexts, weights = [], []
        for head in self.heads:
            probabilities = (head.query(x) @ head.key(x).mT * D**-0.5).softmax(-1)
            weights.append(probabilities)
            contexts.append(probabilities @ head.value(x))
        return self.out(torch.cat(contexts, -1)), torch.stack(weights, 1)
