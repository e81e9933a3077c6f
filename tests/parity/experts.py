"""Mixtures of experts, written in the ways that are published."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

E, K, H, I = 4, 2, 8, 12  # noqa: E741  experts, those of a row, features, hidden features


class Stacked(nn.Module):
    """Mixtral's router, and matrices that are stacked."""

    count = K

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(H, E, bias=False)
        self.w1 = nn.Parameter(torch.randn(E, I, H) / 2)
        self.w3 = nn.Parameter(torch.randn(E, I, H) / 2)
        self.w2 = nn.Parameter(torch.randn(E, H, I) / 2)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = self.gate(x).softmax(-1).topk(self.count, -1)
        return weights / weights.sum(-1, keepdim=True), experts

    def expert(self, x: Tensor, e: int) -> Tensor:
        hidden = functional.silu(x @ self.w1[e].T) * (x @ self.w3[e].T)
        return hidden @ self.w2[e].T

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        result = torch.zeros_like(x)
        mask = functional.one_hot(experts, E).permute(2, 1, 0)
        for e in range(E):
            place, row = torch.where(mask[e])
            result.index_add_(0, row, self.expert(x[row], e) * weights[row, place, None])
        return result

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.reshape(-1, H)).reshape(x.shape) + x


class Modules(Stacked):
    """A list of experts; the softmax after the top-k; sums by index_put (mistral-inference)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(H, 2 * I) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(I, H) for _ in range(E))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = self.gate(x).topk(K, -1)
        return weights.softmax(-1), experts

    def expert(self, x: Tensor, e: int) -> Tensor:
        gate, linear = self.up[e](x).chunk(2, -1)
        made: Tensor = self.down[e](functional.silu(gate) * linear)
        return made

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        result = torch.zeros_like(x)
        for e in range(E):
            row, place = torch.where(experts == e)
            result[row] += weights[row, place, None] * self.expert(x[row], e)
        return result


class Slots(Modules):
    """Rows with a choice that is the expert, and the place of that choice (LLMs-from-scratch)."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        result = torch.zeros_like(x)
        for e in range(E):
            row = (experts == e).any(-1).nonzero().squeeze(-1)
            place = self.place(experts[row], e)
            weight = weights.index_select(0, row).gather(-1, place)
            result.index_add_(0, row, self.expert(x.index_select(0, row), e) * weight)
        return result

    def place(self, experts: Tensor, e: int) -> Tensor:
        return (experts == e).int().argmax(-1, keepdim=True)


class Slotted(Slots):
    """The same of floats, of which the largest is found with its place."""

    def place(self, experts: Tensor, e: int) -> Tensor:
        return (experts == e).float().max(-1, keepdim=True).indices


class Gathered(Stacked):
    """Matrices of the chosen experts for each row (gpt-fast)."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        gate = functional.silu(torch.einsum("th,tkih->tki", x, self.w1[experts]))
        linear = torch.einsum("th,tkih->tki", x, self.w3[experts])
        made = torch.einsum("tki,tkhi->tkh", gate * linear, self.w2[experts])
        return torch.einsum("tkh,tk->th", made, weights)


class OneHot(Stacked):
    """Products with a one-hot tensor there and back (GShard, without a capacity)."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        chosen = functional.one_hot(experts, E).to(x.dtype)
        rows = torch.einsum("te,th->eth", chosen.sum(1), x)
        hidden = functional.silu(rows @ self.w1.mT) * (rows @ self.w3.mT)
        return torch.einsum("te,eth->th", (chosen * weights[..., None]).sum(1), hidden @ self.w2.mT)


class Dense(Stacked):
    """Every expert on every row, with weights that are zero but for the chosen ones."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        spread = torch.zeros(x.shape[0], E).scatter(-1, experts, weights)
        hidden = functional.silu(torch.einsum("th,eih->tei", x, self.w1))
        hidden = hidden * torch.einsum("th,eih->tei", x, self.w3)
        return torch.einsum("teh,te->th", torch.einsum("tei,ehi->teh", hidden, self.w2), spread)


class Masked(Stacked):
    """Every expert on every row, times where it was chosen."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        parts = [self.expert(x, e) * (weights * (experts == e)).sum(-1, True) for e in range(E)]
        return torch.stack(parts).sum(0)


class Sorted(Stacked):
    """Choices sorted by expert, and brought back by an inverse permutation."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        chosen, order = experts.reshape(-1).sort()
        rows = x[order // K, :, None]
        hidden = functional.silu(self.w1[chosen] @ rows) * (self.w3[chosen] @ rows)
        made = (self.w2[chosen] @ hidden)[..., 0] * weights.reshape(-1)[order, None]
        back = torch.empty_like(order).index_put((order,), torch.arange(order.shape[0]))
        return made[back].reshape(-1, K, H).sum(1)


class Unnormalised(Stacked):
    """Weights that don't sum to one (Qwen2-MoE, OLMoE)."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = self.gate(x).softmax(-1).topk(K, -1)
        return weights, experts


class Doubled(Gathered):
    """The softmax in float64, of which scores and weights in float32 are rounded."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = self.gate(x).double().softmax(-1).topk(K, -1)
        return weights.float(), experts


class Corrected(Stacked):
    """Sigmoids, a bias that only chooses, and a factor (DeepSeek-V3)."""

    def __init__(self) -> None:
        super().__init__()
        self.correction = nn.Buffer(torch.randn(E))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).sigmoid()
        experts = (scores + self.correction).topk(K, -1).indices
        weights = scores.gather(1, experts)
        return weights / (weights.sum(-1, True) + 1e-20) * 2.5, experts


class First(Stacked):
    """One expert for each row (Switch)."""

    count = 1


class All(Stacked):
    """As many as there are."""

    count = E


class Clamped(Stacked):
    """gpt-oss: interleaved features, biases, and a SwiGLU that is cut at a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, H, 2 * I))
        self.up_bias = nn.Parameter(torch.randn(E, 2 * I))
        self.down_bias = nn.Parameter(torch.randn(E, H))

    def expert(self, x: Tensor, e: int) -> Tensor:
        both = x @ self.up[e] + self.up_bias[e]
        gate, linear = both[..., ::2].clamp(max=1.5), both[..., 1::2].clamp(-1.5, 1.5)
        hidden = (linear + 1) * gate * torch.sigmoid(gate * 1.702)
        return hidden @ self.w2[e].T + self.down_bias[e]


class Rectified(Stacked):
    """One product up, and relu."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        return torch.relu(x @ self.w1[e].T) @ self.w2[e].T


class Shared(Stacked):
    """Experts that share matrices."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        hidden = functional.silu(x @ self.w1[e].T) * (x @ self.w3[(e + 1) % E].T)
        return hidden @ self.w2[min(e, 2)].T


class Gated(Dense):
    """Every expert on every row, by a gate: a softmax in front of which all others are -inf."""

    def mix(self, x: Tensor) -> Tensor:
        gate = self.weigh(self.gate(x))
        hidden = functional.silu(torch.einsum("th,eih->tei", x, self.w1))
        hidden = hidden * torch.einsum("th,eih->tei", x, self.w3)
        return (torch.einsum("tei,ehi->teh", hidden, self.w2) * gate[..., None]).sum(1)

    def weigh(self, scores: Tensor) -> Tensor:
        best, experts = scores.topk(K, -1)
        return torch.full_like(scores, -torch.inf).scatter(-1, experts, best).softmax(-1)


class MaskedScores(Gated):
    """Scores of others are filled, by ones that are put at the chosen places."""

    def weigh(self, scores: Tensor) -> Tensor:
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(
            -1, scores.topk(K).indices, True
        )
        return scores.masked_fill(~chosen, -torch.inf).softmax(-1)


class OneHotScores(Gated):
    """Scores of others are filled, by one-hot rows of which any is one."""

    def weigh(self, scores: Tensor) -> Tensor:
        chosen = functional.one_hot(scores.topk(K).indices, E).bool().any(-2)
        return torch.where(chosen, scores, -torch.inf).softmax(-1)


class MaskedWeights(Gated):
    """A softmax over all, times ones at the chosen places, made to sum to one again."""

    def weigh(self, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1)
        gate = weights * functional.one_hot(weights.topk(K).indices, E).sum(-2)
        return gate / gate.sum(-1, keepdim=True)


class Sigmoids(Gated):
    """Sigmoids where a mask is above 0."""

    def weigh(self, scores: Tensor) -> Tensor:
        mask = torch.zeros_like(scores).scatter(-1, scores.topk(K).indices, 1.0)
        return torch.where(mask > 0, scores.sigmoid(), 0.0)


PUBLISHED = (
    *(Stacked, Modules, Slots, Slotted, Gathered, OneHot, Dense, Masked, Sorted),
    *(Gated, MaskedScores, OneHotScores, MaskedWeights, Sigmoids),
    *(Unnormalised, Doubled, Corrected, First, All, Clamped, Rectified, Shared),
)
