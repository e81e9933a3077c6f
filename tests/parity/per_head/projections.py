"""Heads that are projected and brought together in different ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.parity.per_head.kit import D, H, Head, Heads, M, attend, case, causal


@case()
class Listed(Heads):
    """A ModuleList, concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))


@case()
class Stacked(Heads):
    """Stacked on an axis of their own, then flattened."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.stack([head(x) for head in self.heads], dim=2).flatten(2))


@case()
class StackedFirst(Heads):
    """Stacked in front, permuted and flattened."""

    def forward(self, x: Tensor) -> Tensor:
        stacked = torch.stack([head(x) for head in self.heads])
        return self.out(stacked.permute(1, 2, 0, 3).flatten(2))


@case()
class Assigned(Heads):
    """Written into slices of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape)
        for h, head in enumerate(self.heads):
            out[..., h * D : (h + 1) * D] = head(x)
        return self.out(out)


@case()
class AssignedHeads(Heads):
    """Written into an axis of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], x.shape[1], H, D)
        for h, head in enumerate(self.heads):
            out[:, :, h] = head(x)
        return self.out(out.flatten(2))


class Projected(Heads):
    """Each head has its own output projection."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.outs = nn.ModuleList(nn.Linear(D, M) for _ in range(H))
        self.out = nn.Identity()

    def terms(self, x: Tensor) -> list[Tensor]:
        return [out(head(x)) for head, out in zip(self.heads, self.outs, strict=True)]


@case()
class Summed(Projected):
    """Python's sum."""

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(self.terms(x))


@case()
class SummedInPlace(Projected):
    """+= in a loop, onto zeros."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for term in self.terms(x):
            total += term
        return total


@case()
class SummedStack(Projected):
    """The sum over a stack."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.terms(x)).sum(0)


@case()
class AveragedStack(Projected):
    """The mean over a stack."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.terms(x), dim=-1).mean(-1)


@case(gemms=1)
class AveragedHeads(Heads):
    """The mean of the heads' contexts (Graph attention's last layer)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads]).mean(0)


class Parameters(nn.Module):
    """Stacked weights: (H, M, D) for queries, keys and values, (H, D, M) for the output."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Parameter(torch.randn(H, M, D) / M**0.5) for _ in range(3)
        )
        self.out = nn.Parameter(torch.randn(H, D, M) / M**0.5)


@case()
class LoopOverParameters(Parameters):
    """x @ W[h]."""

    def forward(self, x: Tensor) -> Tensor:
        contexts = [attend(x @ self.query[h], x @ self.key[h], x @ self.value[h]) for h in range(H)]
        return torch.cat(contexts, -1) @ self.out.flatten(0, 1)


@case()
class EinsumPerHead(Parameters):
    """An einsum per head, output projections summed."""

    def forward(self, x: Tensor) -> Tensor:
        total = 0
        for a, b, c, o in zip(self.query, self.key, self.value, self.out, strict=True):
            q, k, v = (torch.einsum("bsm,md->bsd", x, w) for w in (a, b, c))
            weights = torch.einsum("bsd,btd->bst", q, k).mul(D**-0.5).softmax(-1)
            context = torch.einsum("bst,btd->bsd", weights, v)
            total = total + torch.einsum("bsd,dm->bsm", context, o)
        return total


class Packed(nn.Module):
    """Projections of all heads, used head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(M, M) for _ in range(4))


@case()
class SlicesOfPacked(Packed):
    """Slices of the features."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        cuts = [slice(h * D, (h + 1) * D) for h in range(H)]
        return self.out(torch.cat([attend(q[..., c], k[..., c], v[..., c]) for c in cuts], -1))


@case()
class ChunksOfPacked(Packed):
    """chunk."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).chunk(H, dim=-1) for f in (self.query, self.key, self.value))
        return self.out(torch.cat([attend(*qkv) for qkv in zip(q, k, v, strict=True)], dim=2))


@case()
class SelectsOfPacked(Packed):
    """Selects of a view with heads, stacked on the head axis again."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        contexts = [attend(q[:, h], k[:, h], v[:, h]) for h in range(H)]
        return self.out(torch.stack(contexts, 1).transpose(1, 2).flatten(2))


@case()
class SlicesOfOneWeight(nn.Module):
    """One packed (M → H · 3 · D): each head has its query, key and value side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(M, 3 * M), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x).split(D, dim=-1)
        contexts = [attend(*packed[3 * h : 3 * h + 3]) for h in range(H)]
        return self.out(torch.cat(contexts, -1))


@case()
class PackedInThirds(nn.Module):
    """One packed (M → 3 · H · D)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(M, 3 * M), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x).split(D, dim=-1)
        contexts = [attend(*packed[h::H]) for h in range(H)]
        return self.out(torch.cat(contexts, -1))


@case()
class MultiQuery(nn.Module):
    """One key and value for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.ModuleList(nn.Linear(M, D) for _ in range(H))
        self.key, self.value, self.out = nn.Linear(M, D), nn.Linear(M, D), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        contexts = [attend(query(x), self.key(x), self.value(x)) for query in self.queries]
        return self.out(torch.cat(contexts, -1))


@case()
class GroupedQuery(nn.Module):
    """Two heads to a key."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.ModuleList(nn.Linear(M, D) for _ in range(H))
        self.keys = nn.ModuleList(nn.Linear(M, D) for _ in range(H // 2))
        self.values = nn.ModuleList(nn.Linear(M, D) for _ in range(H // 2))
        self.out = nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        contexts = []
        for h, query in enumerate(self.queries):
            key, value = self.keys[h // 2](x), self.values[h // 2](x)
            contexts.append(attend(query(x), key, value, causal(x)))
        return self.out(torch.cat(contexts, -1))


@case()
class SharedValues(nn.Module):
    """Keys of each head's own, one value."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.ModuleList(nn.Linear(M, D) for _ in range(H))
        self.keys = nn.ModuleList(nn.Linear(M, D) for _ in range(H))
        self.value, self.out = nn.Linear(M, D), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        value = self.value(x)
        pairs = zip(self.queries, self.keys, strict=True)
        return self.out(torch.cat([attend(q(x), k(x), value) for q, k in pairs], -1))


@case("x", "memory", "padding", gemms=3)
class Cross(Packed):
    """Cross-attention with a padding mask, one head after another."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (
            nn.ModuleList(nn.Linear(M, D) for _ in range(H)) for _ in range(3)
        )
        self.query = self.key = self.value = nn.Identity()

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        contexts = [
            attend(q(x), k(memory), v(memory), padding[:, None])
            for q, k, v in zip(self.queries, self.keys, self.values, strict=True)
        ]
        return self.out(torch.cat(contexts, -1))


@case()
class ContextReturned(Heads):
    """One head's context is returned as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        contexts = [head(x) for head in self.heads]
        return self.out(torch.cat(contexts, -1)), contexts[1]


@case(gemms=5)
class ChunkedInputs(nn.Module):
    """Each head sees its share of the features: the queries, keys, values stay H products each."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(H))
        self.out = nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        contexts = []
        for part, projection in zip(x.chunk(H, -1), self.projections, strict=True):
            contexts.append(attend(*projection(part).chunk(3, -1)))
        return self.out(torch.cat(contexts, -1))


@case()
class SharedByChunks(nn.Module):
    """The same small projections for each share of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.out = nn.Linear(D, 3 * D), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        contexts = [attend(*self.projection(part).chunk(3, -1)) for part in x.split(D, -1)]
        return self.out(torch.cat(contexts, -1))


@case(attentions=2)
class TwoSizes(nn.Module):
    """Heads of two sizes: grouped by size."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(depth=depth) for depth in (4, 4, 8, 8))
        self.out = nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], -1))
