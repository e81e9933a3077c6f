"""Where people put the scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.formulations.kit import SIZES, K, Q, V, formulation


@formulation(Q, K, V, dynamic="b s t")
def scale_on_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The query is scaled."""
    return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v


@formulation(Q, K, V)
def scale_on_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The key is scaled."""
    return torch.matmul(torch.softmax(torch.matmul(q, (k / 6**0.5).transpose(2, 3)), 3), v)


@formulation(Q, K, V, dynamic="s")
def scale_root_on_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fourth root of the width on either side."""
    root = 1 / math.sqrt(math.sqrt(q.size(-1)))
    return F.softmax((q * root) @ (k * root).transpose(-2, -1), dim=-1) @ v


@formulation(Q, K, V, dynamic="b t")
def scale_on_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The scores are divided."""
    return ((q @ k.mT) / math.sqrt(q.shape[-1])).softmax(-1) @ v


@formulation(Q, K, V, "b 1 s t:mask")
def scale_after_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked first, scaled afterwards."""
    scores = (q @ k.mT).masked_fill(~mask, float("-inf"))
    return (scores * 0.4).softmax(-1) @ v


@formulation(Q, K, V, "b 1 s t:mask")
def scale_after_finite_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A finite fill is scaled along."""
    scores = (q @ k.mT).masked_fill(~mask, -1e9)
    return (scores * 0.4).softmax(-1) @ v


@formulation("h s d", "h t d", "h t e", "h s t")
def scale_as_alpha(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """baddbmm with alpha and beta."""
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=0.5, alpha=0.4)
    return torch.bmm(scores.softmax(-1), v)


@formulation("h s d", "h t d", "h t e")
def scale_as_alpha_of_empty(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Megatron's baddbmm into an uninitialised matrix with beta 0."""
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1])
    scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0.0, alpha=0.4)
    return torch.bmm(scores.softmax(-1), v)


@formulation(Q, K, V, dynamic="b s")
class ScaleLearnedPerHead(nn.Module):
    """A learned temperature per head."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(SIZES["h"], 1, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) * self.temperature).softmax(-1) @ v


@formulation(Q, K, V)
class ScaleLearnedDivides(nn.Module):
    """A learned temperature, softplus of a parameter, divides."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) / F.softplus(self.temperature)).softmax(-1) @ v


@formulation(Q, K, V, dynamic="b s t")
class ScaleCosine(nn.Module):
    """Swin v2: cosine similarity times exp of a clamped logit scale per head."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(SIZES["h"], 1, 1)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scale = torch.clamp(self.logit_scale, max=math.log(100.0)).exp()
        return (scores * scale).softmax(-1) @ v


@formulation(Q, K, V)
def scale_log_length_static(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores times log n."""
    return ((q @ k.mT) * (math.log(k.shape[-2]) / math.sqrt(q.shape[-1]))).softmax(-1) @ v


@formulation(
    Q,
    K,
    V,
    dynamic="t",
)
def scale_by_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores divided by the root of the number of keys, known at run time only."""
    return ((q @ k.mT) / k.shape[-2] ** 0.5).softmax(-1) @ v


@formulation(Q, K, V, dynamic="b s")
def scale_log_position(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """log-n scaling of each query by its position."""
    position = torch.arange(1, q.shape[2] + 1, dtype=q.dtype)
    factor = torch.log(position + 1)[None, None, :, None]
    return ((q * factor) @ k.mT * 0.4).softmax(-1) @ v


@formulation(Q, K, V)
def scale_log_position_on_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, on the scores."""
    position = torch.arange(1, q.shape[2] + 1, dtype=q.dtype)
    return ((q @ k.mT) * torch.log(position + 1)[:, None] * 0.4).softmax(-1) @ v


@formulation(Q, K, V, "1:positive", dynamic="s t")
def scale_input(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """The scale is an input."""
    return ((q @ k.mT) * scale).softmax(-1) @ v


@formulation(Q, K, V)
def scale_tensor_root(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch.sqrt of a tensor that holds the width."""
    width = torch.tensor(k.size(-1), dtype=torch.float32)
    return (torch.matmul(q, k.transpose(-2, -1)) / torch.sqrt(width)).softmax(-1) @ v


@formulation(Q, K, V, dynamic="b s t")
def scale_none(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No scale."""
    return (q @ k.mT).softmax(-1) @ v


@formulation(Q, K, V)
def scale_negative(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attends to what is least alike."""
    return (-(q @ k.mT) * 0.4).softmax(-1) @ v


@formulation(Q, K, V, "b 1 s t")
def scale_after_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The bias is scaled with the scores."""
    return ((q @ k.mT + bias) / 2.5).softmax(-1) @ v


@formulation(Q, K, V, "b 1 s t")
def scale_subtracted_bias(q: Tensor, k: Tensor, v: Tensor, distance: Tensor) -> Tensor:
    """A distance is subtracted, scaled by alpha."""
    return torch.sub(0.4 * (q @ k.mT), distance, alpha=0.7).softmax(-1) @ v


@formulation(Q, K, V, "b 1 1 t:positive", fused=None)
def scale_per_key(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """A factor that differs from key to key."""
    return ((q @ k.mT) * weight).softmax(-1) @ v


@formulation(Q, K, V)
def scale_on_value(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The values are scaled too."""
    return ((q * 0.4) @ k.mT).softmax(-1) @ (v * 3.0)


@formulation(Q, K, V, fused=None)
def scale_after_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Probabilities are scaled, as dropout in training does."""
    return ((0.4 * q @ k.mT).softmax(-1) * 1.25) @ v


@formulation(Q, K, V)
def scale_learned_exponent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """exp(b) with a constant tensor b of one element per head."""
    scale = torch.tensor([0.1, -0.5, -1.0]).exp().view(1, 3, 1, 1)
    return torch.softmax(torch.einsum("bhsd,bhtd->bhst", q, k) * scale, -1) @ v


@formulation(
    Q,
    K,
    V,
    "b 1 s t:lowest",
    fused=0,
    declined=("scores-times-tensor",),
)
def scale_learned_after_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A temperature tensor multiplies scores that already hold the mask."""
    temperature = torch.tensor([0.3, 0.5, 0.7]).view(3, 1, 1)
    return ((q @ k.mT + mask) * temperature).softmax(-1) @ v
