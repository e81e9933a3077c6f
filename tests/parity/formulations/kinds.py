"""Whole designs: cross attention, pooling, caches, MLA, differential, loops of layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.formulations.kit import SELF, SIZES, K, Q, V, formulation

H, D, M = SIZES["h"], SIZES["d"], SIZES["m"]


def _heads(x: Tensor, width: int = D) -> Tensor:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v


@formulation("b s m", "b t 11", dynamic="b s t")
class CrossAttention(nn.Module):
    """Memory of another width, packed keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(M, M), nn.Linear(11, 2 * M), nn.Linear(M, M)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        k, v = self.kv(memory).chunk(2, -1)
        context = _attend(_heads(self.q(x)), _heads(k), _heads(v))
        return self.out(context.transpose(1, 2).flatten(2))


@formulation("b t m", dynamic="b t")
class LearnedQueries(nn.Module):
    """Perceiver: learned queries, the same for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.zeros(4, M))
        self.q, self.k, self.v = (nn.Linear(M, M, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.latents).expand(x.shape[0], -1, -1)
        return _attend(_heads(q), _heads(self.k(x)), _heads(self.v(x))).transpose(1, 2).flatten(2)


@formulation("b t m", fused=None)
class PoolingVector(nn.Module):
    """One learned vector scores the tokens: softmax(x w)ᵀ x."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(M, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.score(x * 0.3).softmax(1) * x).sum(1)


@formulation("b t m", "b t:padding", fused=None)
class PoolingMlp(nn.Module):
    """Self-attentive pooling with a tanh layer and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.score = nn.Linear(M, 7), nn.Linear(7, 1)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        scores = self.score(torch.tanh(self.hidden(x))).squeeze(-1)
        weights = scores.masked_fill(~padding, -1e9).softmax(-1)
        return torch.bmm(weights.unsqueeze(1), x).squeeze(1)


@formulation("b t m")
class PoolingByMultihead(nn.Module):
    """Set transformer: a seed attends to the set, heads split into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = nn.Parameter(torch.zeros(1, 2, M))
        self.q, self.k, self.v = (nn.Linear(M, M) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(self.seed.repeat(x.size(0), 1, 1)), self.k(x), self.v(x)
        q_, k_, v_ = (torch.cat(y.split(D, 2), 0) for y in (q, k, v))
        weights = torch.softmax(q_.bmm(k_.transpose(1, 2)) / M**0.5, 2)
        return torch.cat((q_ + weights.bmm(v_)).split(q.size(0), 0), 2)


@formulation("b d", "b t d", "b t e")
def pooling_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DIN-like: one query per element, bmm with a column."""
    weights = torch.bmm(k, q.unsqueeze(2)).squeeze(2).mul(0.4).softmax(1)
    return torch.bmm(weights.unsqueeze(1), v).squeeze(1)


@formulation("b h s d", "b h t d", "b h t e", "b h s d", "b h s e", dynamic="b t")
def cache_concatenated(q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A past concatenated before, causal with the past."""
    k, v = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return (q @ k.mT * 0.4).masked_fill(~keep, float("-inf")).softmax(-1) @ v


@formulation("b h 1 d", "b h t d", "b h t e", "b h 1 d", "b h 1 e", dynamic="b t")
def cache_returned(
    q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token, the grown cache is returned."""
    k, v = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
    return _attend(q, k, v), k, v


@formulation("b h 1 d", "b h t d", "b h t e", "b h 1 d", "b h 1 e", "1:length")
def cache_index_copied(
    q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor, at: Tensor
) -> Tensor:
    """A static cache written by index_copy, keys beyond the position hidden."""
    pk, pv = pk.index_copy(2, at, k), pv.index_copy(2, at, v)
    keep = torch.arange(pk.shape[2]) <= at
    return F.scaled_dot_product_attention(q, pk, pv, keep[None, None, None])


@formulation("b h 2 d", "b h t d", "b h t e", "b h 2 d", "b h 2 e")
def cache_assigned(q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A static cache written by slice assignment."""
    pk, pv = pk.clone(), pv.clone()
    pk[:, :, 3:5], pv[:, :, 3:5] = k, v
    keep = torch.arange(pk.shape[2])[None, :] <= torch.tensor([3, 4])[:, None]
    return (q @ pk.mT * 0.4).masked_fill(~keep, -1e9).softmax(-1) @ pv


@formulation(SELF, fused=2, dynamic="b s")
class Differential(nn.Module):
    """Differential transformer: the difference of two softmaxes times V."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(M, 2 * M), nn.Linear(M, 2 * M), nn.Linear(M, M)
        self.gain = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(p(x * 0.5)) for p in (self.q, self.k, self.v))
        (q1, q2), (k1, k2) = q.chunk(2, 1), k.chunk(2, 1)
        first, second = ((a @ b.mT * 0.3).softmax(-1) for a, b in ((q1, k1), (q2, k2)))
        return (first - self.gain * second) @ v


@formulation(SELF, fused=2)
class DifferentialContexts(nn.Module):
    """The difference of two contexts: the same, distributed."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(M, 2 * M), nn.Linear(M, 2 * M), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(p(x * 0.5)) for p in (self.q, self.k, self.v))
        (q1, q2), (k1, k2) = q.chunk(2, 1), k.chunk(2, 1)
        return _attend(q1, k1, v) - 0.4 * _attend(q2, k2, v)


@formulation(SELF)
class DifferentialViewed(nn.Module):
    """The paper's code: one softmax over 2·H heads, viewed as (B, H, 2, S, S), subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(M, 2 * M), nn.Linear(M, 2 * M), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(p(x * 0.5)) for p in (self.q, self.k, self.v))
        weights = (q @ k.mT * 0.3).softmax(-1).unflatten(1, (H, 2))
        return (weights[:, :, 0] - 0.4 * weights[:, :, 1]) @ v


@formulation(SELF, dynamic="b s")
class LatentAttention(nn.Module):
    """MLA: low-rank keys and values, a rotary part that all heads share, V narrower than K."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(M, H * (D + 2))
        self.down, self.up = nn.Linear(M, 5 + 2), nn.Linear(5, H * (D + 4))

    def forward(self, x: Tensor) -> Tensor:
        q = _heads(self.q(x * 0.5), D + 2)
        latent, shared = self.down(x).split([5, 2], -1)
        k, v = _heads(self.up(latent), D + 4).split([D, 4], -1)
        k = torch.cat([k, shared[:, None].expand(-1, H, -1, -1)], -1)
        return _attend(q, k, v).transpose(1, 2).flatten(2)


@formulation(SELF)
class LatentSummed(nn.Module):
    """MLA with the two parts of the scores computed apart and added."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(M, H * (D + 2))
        self.down, self.up = nn.Linear(M, 5 + 2), nn.Linear(5, H * (D + 4))

    def forward(self, x: Tensor) -> Tensor:
        content, place = _heads(self.q(x * 0.5), D + 2).split([D, 2], -1)
        latent, shared = self.down(x).split([5, 2], -1)
        k, v = _heads(self.up(latent), D + 4).split([D, 4], -1)
        scores = content @ k.mT + torch.einsum("bhsr,btr->bhst", place, shared)
        return (scores * (D + 2) ** -0.5).softmax(-1) @ v


@formulation(SELF)
class LatentAbsorbed(nn.Module):
    """MLA absorbed: the keys are the latent itself, shared by all heads, and so are the values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(M, H * 5), nn.Linear(M, 5)
        self.value = nn.Parameter(torch.zeros(H, 5, D))

    def forward(self, x: Tensor) -> Tensor:
        q, latent = _heads(self.q(x * 0.5), 5), self.down(x)
        weights = torch.einsum("bhsc,btc->bhst", q, latent).softmax(-1)
        return torch.einsum(
            "bhsc,hcd->bshd", torch.einsum("bhst,btc->bhsc", weights, latent), self.value
        )


@formulation(SELF, fused=3, dynamic="b s")
class LayersShareKeys(nn.Module):
    """Three layers read the same keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Linear(M, 2 * M)
        self.qs = nn.ModuleList(nn.Linear(M, M) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        k, v = (_heads(y) for y in self.kv(x).chunk(2, -1))
        for layer in self.qs:
            x = F.layer_norm(x + _attend(_heads(layer(x)), k, v).transpose(1, 2).flatten(2), (M,))
        return x


@formulation(SELF, fused=2, dynamic="b s")
class LayersCausal(nn.Module):
    """One block applied twice with the same weights and mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(M, 3 * M), nn.LayerNorm(M)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        for _ in range(2):
            q, k, v = (_heads(y) for y in self.qkv(self.norm(x)).chunk(3, -1))
            scores = q @ k.mT * D**-0.5 + mask
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x


@formulation("1 h s d", "1 h t d", "1 h t e")
def batch_of_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch 1."""
    return _attend(q, k, v)


@formulation("b h 1 d", "b h t d", "b h t e", dynamic="b t")
def one_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sequence 1, as when decoding."""
    return _attend(q, k, v)


@formulation("1 h 1 d", "1 h 1 d", "1 h 1 e", fused=None)
def one_of_everything(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch, queries and keys 1: the weights are 1."""
    return _attend(q, k, v)


@formulation("b 1 s d", "b 1 t d", "b 1 t e", dynamic="b s t")
def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head."""
    return _attend(q, k, v)


@formulation("b h s 1", "b h t 1", "b h t 1")
def one_feature(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads of width 1."""
    return _attend(q, k, v)


@formulation(SELF)
def keys_are_queries(x: Tensor) -> Tensor:
    """softmax(X Xᵀ) X without any projection."""
    return (x @ x.mT * 0.2).softmax(-1) @ x


@formulation(Q, K, dynamic="b s t")
def values_are_keys(q: Tensor, k: Tensor) -> Tensor:
    """Hopfield: keys are values too."""
    return (q @ k.mT * 0.4).softmax(-1) @ k


@formulation(Q, K, fused=3, dynamic="s")
def hopfield_iterated(q: Tensor, k: Tensor) -> Tensor:
    """The retrieved pattern queries again, three times."""
    for _ in range(3):
        q = (q @ k.mT * 0.4).softmax(-1) @ k
    return q


@formulation("b h s m", "b h t m", "b h t e")
def queries_projected_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Luong's general form, a bilinear product q W kᵀ."""
    w = torch.linspace(-0.2, 0.2, M * M).sin().view(M, M) * 0.2
    return (q @ w @ k.mT).softmax(-1) @ v


@formulation("b 4 5 m", dynamic="b")
class Windows(nn.Module):
    """Window partition of an image: (B, 2, 2, 1, 5, C) permuted into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(M, 3 * M)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        windows = x.view(batch, 2, 2, 1, 5, M).transpose(2, 3).reshape(-1, 10, M)
        q, k, v = self.qkv(windows).view(-1, 10, 3, H, D).permute(2, 0, 3, 1, 4)
        y = _attend(q, k, v).transpose(1, 2).reshape(batch, 2, 1, 2, 5, M)
        return y.transpose(2, 3).reshape(batch, 4, 5, M)


@formulation("b 6 h d", "b 6 h d", "b 6 h e")
def blocks_local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Block-local attention: blocks of 2 with the block before, by padding and concatenation."""
    q, k, v = (x.transpose(1, 2).unflatten(2, (3, 2)) for x in (q, k, v))
    k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x], 3) for x in (k, v))
    scores = torch.einsum("bhnid,bhnjd->bhnij", q, k) * 0.4
    hidden = (torch.arange(3)[:, None] == 0) & (torch.arange(4) < 2)
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    return torch.einsum("bhnij,bhnje->bhnie", scores.softmax(-1), v).flatten(2, 3)


@formulation("b s m", "b 4 m", fused=2)
class Agent(nn.Module):
    """Agent attention: agents attend to keys, queries attend to agents."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(M, 3 * M)

    def forward(self, x: Tensor, agents: Tensor) -> Tensor:
        q, k, v = (_heads(y) for y in self.qkv(x * 0.5).chunk(3, -1))
        a = _heads(agents)
        return _attend(q, a, _attend(a, k, v))


@formulation(Q, K, V, Q)
def gated_output(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Qwen-Next: a sigmoid gate per head on the context."""
    return _attend(q, k, v) * torch.sigmoid(gate.mean(-1, keepdim=True))


@formulation("b m s", dynamic="b")
class CrossCovariance(nn.Module):
    """XCiT: attention between channels; queries and keys are channels, tokens are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unflatten(1, (H, D)), (x * 0.7).unflatten(1, (H, D)), x.unflatten(1, (H, D))
        q, k = F.normalize(q, dim=-1), F.normalize(k + 0.2, dim=-1)
        return ((q @ k.mT) * self.temperature * 4).softmax(-1) @ v


@formulation("b h s d", "b h t d", "b h t e", "b h t e", fused=None)
def two_values(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The same weights applied to two values."""
    weights = (q @ k.mT * 0.4).softmax(-1)
    return weights @ v, weights @ w
