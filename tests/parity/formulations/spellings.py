"""Rare spellings: products of three, sums by other means, masks after the softmax, memories."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.formulations.kit import SIZES, K, Q, V, formulation

H, D, M = SIZES["h"], SIZES["d"], SIZES["m"]


@formulation("b m", "7 m", "b 1:positive", dynamic="b")
def neural_turing_machine(key: Tensor, memory: Tensor, strength: Tensor) -> Tensor:
    """Content addressing: cosine similarity with a memory that the batch shares."""
    similarity = F.cosine_similarity(key.unsqueeze(1), memory.unsqueeze(0), dim=-1)
    return torch.softmax(strength * similarity, -1) @ memory


@formulation("b m", "7 m", "b 1:positive", fused=0, declined=("weights-changed",))
def sharpened_memory(key: Tensor, memory: Tensor, sharpness: Tensor) -> Tensor:
    weights = (key @ memory.mT * 0.3).softmax(-1) ** (1 + sharpness)
    return weights / (weights.sum(-1, keepdim=True) + 1e-16) @ memory


@formulation("b m", "b t m", fused=2)
class MemoryNetwork(nn.Module):
    """End-to-end memory network: two hops, the query expanded over the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Linear(M, M) for _ in range(3))

    def forward(self, query: Tensor, story: Tensor) -> Tensor:
        for hop in range(2):
            keys, values = self.embed[hop](story), self.embed[hop + 1](story)
            scores = torch.sum(keys * query.unsqueeze(1).expand_as(keys), 2)
            weights = F.softmax(scores, dim=1).unsqueeze(2)
            query = query + torch.sum(values * weights, 1)
        return query


@formulation("b s s m", "b s s:mask")
class TriangleStartingNode(nn.Module):
    """AlphaFold, starting node: a pair bias, then a mask that is subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(M, M, bias=False) for _ in range(3))
        self.bias, self.gate = nn.Linear(M, H, bias=False), nn.Linear(M, M)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (H, D)) for linear in (self.q, self.k, self.v))
        scores = torch.einsum("bijhc,bikhc->bihjk", q * D**-0.5, k)
        scores = scores + self.bias(x).permute(0, 3, 1, 2)[:, None]
        scores = scores - 1e9 * (~mask)[:, :, None, None, :].float()
        out = torch.einsum("bihjk,bikhc->bijhc", scores.softmax(-1), v).flatten(-2)
        return out * torch.sigmoid(self.gate(x))


@formulation("b h s d", "b h t d", dynamic="b s t")
def gpt2_with_past(x: Tensor, past: Tensor) -> Tensor:
    """OpenAI's GPT-2: w · b − 1e10 · (1 − b)."""
    keys = torch.cat((past, x), 2)
    rows, columns = x.shape[2], keys.shape[2]
    visible = torch.arange(rows)[:, None] >= torch.arange(columns) - columns + rows
    b = visible.float()
    scores = x @ keys.mT / math.sqrt(D)
    return (scores * b - 1e10 * (1 - b)).softmax(-1) @ keys


@formulation("b s m", "b t m", dynamic="s t")
class BilinearScores(nn.Module):
    """x W y in one einsum of three operands."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(H, M, M))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = torch.einsum("bsi,hij,btj->bhst", x, self.weight, y)
        return torch.einsum("bhst,btj->bhsj", scores.softmax(-1), y)


@formulation(Q, K, V, "h e m", dynamic="s t")
def output_projection_in_einsum(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    weights = torch.einsum("bhsd,bhtd->bhst", q, k).mul(0.3).softmax(-1)
    return torch.einsum("bhst,bhte,hem->bsm", weights, v, out)


@formulation("s d", "t d", "t e", dynamic="s t")
def tensordots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tensordot(q, k, dims=([1], [1])) * 0.4
    return torch.tensordot(torch.special.softmax(scores, 1), v, dims=1)


@formulation(Q, K, V, dynamic="s t")
def padded_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax-plus-one by a column of zeros in front."""
    return F.pad(q @ k.mT * 0.4, (1, 0)).softmax(-1)[..., 1:] @ v


@formulation(Q, K, V, dynamic="s t")
def reciprocal_laid_out_anew(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(q @ k.mT * 0.4)
    inverse = 1 / e.sum(-1)
    return (e @ v).permute(0, 2, 1, 3) * inverse.permute(0, 2, 1).unsqueeze(-1)


@formulation(Q, K, V, dynamic="s t")
def sum_as_product_with_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = math.e ** (q @ k.mT * 0.4)
    return (e @ v) / (e @ torch.ones_like(v[..., :1]))


@formulation("b 4 m", "b 3 t m")
def keys_over_two_axes(q: Tensor, memory: Tensor) -> Tensor:
    scores = torch.einsum("bqm,bntm->bqnt", q, memory) * 0.2
    e = (scores - scores.amax((2, 3), keepdim=True)).exp()
    return torch.einsum("bqnt,bntm->bqm", e / e.sum((2, 3), keepdim=True), memory)


@formulation(Q, K, V, "b t:float_mask", dynamic="s t")
def allennlp_masked_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(x · m) · m, divided by its sum and a small number."""
    m = mask[:, None, None]
    weights = F.softmax(q @ k.mT * 0.4 * m, -1) * m
    return (weights / (weights.sum(-1, keepdim=True) + 1e-13)) @ v


@formulation("b h s d", dynamic="s")
def triangle_after_softmax(q: Tensor) -> Tensor:
    weights = torch.tril((q @ q.mT * 0.4).softmax(-1))
    return weights / weights.sum(-1, keepdim=True) @ q


@formulation("b h s d", "b h s d", fused=0, declined=("talking-heads",))
class ReAttention(nn.Module):
    """DeepViT: a 1 × 1 convolution and a norm over the heads' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(H, H, 1), nn.BatchNorm2d(H)

    def forward(self, q: Tensor, v: Tensor) -> Tensor:
        return self.norm(self.mix((q @ q.mT * 0.4).softmax(-1))) @ v
