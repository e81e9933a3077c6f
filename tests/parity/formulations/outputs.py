"""Who else reads weights and scores."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.parity.formulations.kit import SELF, SIZES, K, Q, V, formulation

Pair = tuple[Tensor, Tensor]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.4


@formulation(Q, K, V, "b 1 s t:mask", dynamic="b s t")
def weights_returned(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Pair:
    """Context and weights."""
    weights = _scores(q, k).masked_fill(~mask, -1e9).softmax(-1)
    return weights @ v, weights


@formulation(Q, K, V)
def weights_averaged(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """Weights averaged over heads."""
    weights = _scores(q, k).softmax(-1)
    return weights @ v, weights.mean(1)


@formulation("b s h d", "b t h d", "b t h e")
def weights_transposed(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """Weights returned as (B, T, S, H)."""
    weights = torch.einsum("bshd,bthd->bhst", q, k).mul(0.4).softmax(-1)
    return torch.einsum("bhst,bthe->bshe", weights, v), weights.permute(0, 3, 2, 1)


@formulation("b 6 s d", "b h t d", "b h t e")
def weights_grouped(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """Weights of grouped heads, five dims."""
    weights = torch.matmul(q.unflatten(1, (3, 2)), k[:, :, None].mT).mul(0.4).softmax(-1)
    return torch.matmul(weights, v[:, :, None]), weights


@formulation(Q, K, fused=0, declined=("value",))
def weights_only(q: Tensor, k: Tensor) -> Tensor:
    """Only the weights: a pointer network."""
    return _scores(q, k).softmax(-1)


@formulation(Q, K, V, "b 1 s t:mask", fused=None)
def weights_before_guard(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Pair:
    """Weights with NaN rows are returned, the context guarded."""
    weights = _scores(q, k).masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.nan_to_num(0.0) @ v, weights


@formulation(Q, K, V, "b 1 s t:mask")
def weights_after_guard(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Pair:
    """Guarded weights are returned."""
    weights = _scores(q, k).masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    return weights @ v, weights


@formulation(Q, K, V, fused=None)
def weights_argmax(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """The most attended key of each query."""
    weights = _scores(q, k).softmax(-1)
    return weights @ v, weights.argmax(-1)


@formulation(Q, K, V, fused=None)
def weights_entropy(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """The entropy of the weights."""
    weights = _scores(q, k).softmax(-1)
    return weights @ v, -(weights * (weights + 1e-6).log()).sum(-1)


@formulation(Q, K, V, fused=None)
def scores_returned(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """Scores are returned too."""
    scores = _scores(q, k)
    return scores.softmax(-1) @ v, scores


@formulation(Q, K, V, "b 1 s t:mask", fused=None)
def scores_returned_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Pair:
    """Masked scores are returned too."""
    scores = _scores(q, k).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v, scores


@formulation(SELF, fused=None)
class ScoresResidual(nn.Module):
    """RealFormer: scores of the first layer are added to the second's."""

    def __init__(self) -> None:
        super().__init__()
        width = SIZES["m"]
        self.first, self.second = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x * 0.3).chunk(3, -1)
        scores = q @ k.mT * 0.2
        x = x + scores.softmax(-1) @ v
        return scores.softmax(-1) @ v + x.tanh()


@formulation(Q, K, V, V, fused=None)
def scores_two_softmaxes(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Pair:
    """One product, two temperatures."""
    scores = q @ k.mT
    return (scores * 0.4).softmax(-1) @ v, (scores * 0.1).softmax(-1) @ w


@formulation(Q, K, V, "b h s e", fused=2, dynamic="b s t")
def both_ways(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Pair:
    """Scores of both sides to each other, normalised over each: two attentions."""
    scores = q @ k.mT * 0.4
    scores = scores - scores.max()
    return scores.softmax(-1) @ v, scores.softmax(-2).mT @ w
