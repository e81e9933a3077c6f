"""Attention, one rung at a time: from any similarity to packed multi-head attention.

    attention(q, K, V) = Σⱼ αⱼ vⱼ,    α = softmaxⱼ(similarity(q, kⱼ))

Each rung is a module of its own, and each adds one idea to the rung before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.export import Dim

WIDTH, HEADS = 48, 4


class AnySimilarity(nn.Module):
    """One query (B, C) over vectors x (B, T, C) to (B, C); here −‖q − xⱼ‖² (a Gaussian kernel)."""

    def forward(self, query: Tensor, x: Tensor) -> Tensor:
        distance = (query[:, None] - x).square().sum(-1)
        return ((-distance).softmax(-1)[..., None] * x).sum(1)


class DotProduct(nn.Module):
    """The similarity is qᵀ xⱼ."""

    def forward(self, query: Tensor, x: Tensor) -> Tensor:
        weights = torch.einsum("bc,btc->bt", query, x).softmax(-1)
        return torch.einsum("bt,btc->bc", weights, x)


class ScaledDotProduct(nn.Module):
    """qᵀ xⱼ / √C: the variance of the scores no longer grows with C."""

    def forward(self, query: Tensor, x: Tensor) -> Tensor:
        scores = torch.einsum("bc,btc->bt", query, x) / x.shape[-1] ** 0.5
        return torch.einsum("bt,btc->bc", scores.softmax(-1), x)


class ManyQueries(nn.Module):
    """Queries (B, S, C) over x (B, T, C) to (B, S, C): two matrix products."""

    def forward(self, queries: Tensor, x: Tensor) -> Tensor:
        scores = queries @ x.mT / x.shape[-1] ** 0.5
        context: Tensor = scores.softmax(-1) @ x
        return context


class KeysAndValues(nn.Module):
    """What is compared and what is returned are two projections of x."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, queries: Tensor, x: Tensor) -> Tensor:
        scores = queries @ self.key(x).mT / WIDTH**0.5
        context: Tensor = scores.softmax(-1) @ self.value(x)
        return context


class SelfAttention(nn.Module):
    """The queries are a projection of x (B, T, C) too."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT / WIDTH**0.5
        context: Tensor = scores.softmax(-1) @ self.value(x)
        return context


class MaskedSelfAttention(SelfAttention):
    """A position sees those before it and itself."""

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[1]
        seen = torch.ones(steps, steps, dtype=torch.bool).tril()
        scores = self.query(x) @ self.key(x).mT / WIDTH**0.5
        context: Tensor = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ self.value(x)
        return context


class CrossAttention(nn.Module):
    """Queries from x (B, S, C), keys and values from a memory (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(memory).mT / WIDTH**0.5
        context: Tensor = scores.softmax(-1) @ self.value(memory)
        return context


class Head(nn.Module):
    """One head of width C / H."""

    def __init__(self) -> None:
        super().__init__()
        width = WIDTH // HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        context: Tensor = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value
        return context


class HeadByHead(nn.Module):
    """Several heads, one after the other, concatenated and mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.out(torch.cat([head(x) for head in self.heads], dim=-1))
        return mixed


class Packed(nn.Module):
    """The same heads in one projection and one product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        packed = self.qkv(x).view(batch, steps, 3, HEADS, WIDTH // HEADS)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        context = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, steps, WIDTH)
        mixed: Tensor = self.out(context)
        return mixed


RUNGS: dict[str, Callable[[], nn.Module]] = {
    "any-similarity": AnySimilarity,
    "dot": DotProduct,
    "scaled-dot": ScaledDotProduct,
    "many-queries": ManyQueries,
    "keys-and-values": KeysAndValues,
    "self": SelfAttention,
    "masked-self": MaskedSelfAttention,
    "cross": CrossAttention,
    "head-by-head": HeadByHead,
    "packed": Packed,
}
_ONE_QUERY = {"any-similarity", "dot", "scaled-dot"}
_TWO_SEQUENCES = {"many-queries", "keys-and-values", "cross"}

Built = tuple[nn.Module, tuple[Tensor, ...], tuple[dict[int, Dim], ...]]


def build_rung(name: str) -> Built:
    """A rung by its name in `RUNGS`."""
    torch.manual_seed(0)
    batch, x = Dim("batch", max=1024), torch.randn(3, 12, WIDTH)
    sequence = {0: batch, 1: Dim("seq", max=4096)}
    module = RUNGS[name]().eval()
    if name in _ONE_QUERY:
        return module, (torch.randn(3, WIDTH), x), ({0: batch}, sequence)
    if name in _TWO_SEQUENCES:
        queries = {0: batch, 1: Dim("queries", max=4096)}
        return module, (torch.randn(3, 7, WIDTH), x), (queries, sequence)
    return module, (x,), (sequence,)


def build() -> Built:
    return build_rung("packed")


if __name__ == "__main__":
    for name in RUNGS:
        module, args, _ = build_rung(name)
        print(name, tuple(module(*args).shape))
