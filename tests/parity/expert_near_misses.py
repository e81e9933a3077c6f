"""Near misses of mixtures of experts: each differs somewhere, and must stay as it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.parity.experts import E, Gated, Gathered, K, Slots, Sorted, Stacked


class LeftOut(Gathered):
    """The last expert is never asked: the one before it is, in its place."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = super().route(x)
        return weights, experts

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        asked = experts.clamp(max=E - 2)
        hidden = functional.silu(torch.einsum("th,tkih->tki", x, self.w1[asked]))
        hidden = hidden * torch.einsum("th,tkih->tki", x, self.w3[asked])
        made = torch.einsum("tki,tkhi->tkh", hidden, self.w2[asked])
        return torch.einsum("tkh,tk->th", made, weights)


class Shortened(Stacked):
    """The loop ends one expert early."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        parts = [self.expert(x, e) * (weights * (experts == e)).sum(-1, True) for e in range(E - 1)]
        return torch.stack(parts).sum(0)


class Squared(Stacked):
    """Rows are weighted twice by one expert."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        made = [(weights * (experts == e)).sum(-1, True) for e in range(E)]
        made[1] = made[1] * made[1]
        return torch.stack([self.expert(x, e) * made[e] for e in range(E)]).sum(0)


class ScaledInside(Stacked):
    """A factor between the activation and the product down."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        return (functional.silu(x @ self.w1[e].T) * (x @ self.w3[e].T) * 1.5) @ self.w2[e].T


class OneDiffers(Stacked):
    """One expert has another activation."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        act = functional.silu if e else functional.gelu
        return (act(x @ self.w1[e].T) * (x @ self.w3[e].T)) @ self.w2[e].T


class Signed(Stacked):
    """Weights of either sign."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = self.gate(x).tanh().topk(K, -1)
        return weights, experts


class Limited(Stacked):
    """An expert takes three rows at most, as with a capacity."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        parts = []
        for e in range(E):
            chosen = experts == e
            place = chosen.any(-1).cumsum(0)
            taken = (weights * (chosen & (place <= 3)[:, None])).sum(-1, True)
            parts.append(self.expert(x, e) * taken)
        return torch.stack(parts).sum(0)


class CutRows(Stacked):
    """The choices from the twentieth on, sorted by expert, are dropped."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        chosen, order = experts.reshape(-1).sort()
        chosen, order = chosen[:20], order[:20]
        rows = x[order // K, :, None]
        hidden = functional.silu(self.w1[chosen] @ rows) * (self.w3[chosen] @ rows)
        made = (self.w2[chosen] @ hidden)[..., 0] * weights.reshape(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order // K, made)


class Kept(Stacked):
    """Each expert adds its row to what it makes."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        return super().expert(x, e) + x


class OtherSlot(Slots):
    """The weight of a choice that isn't the expert."""

    def place(self, experts: Tensor, e: int) -> Tensor:
        return (experts == e).int().argmin(-1, keepdim=True)


class NextSlot(Slots):
    """The weight of the next expert, of rows that chose that one too."""

    def place(self, experts: Tensor, e: int) -> Tensor:
        matches = (experts == e).int() + 2 * (experts == (e + 1) % E).int()
        return matches.argmax(-1, keepdim=True)


# What switches where no trial looks: each is a mixture on all that is drawn, and must stay.


class Switching(Stacked):
    """Every expert on every row, times its weight, which `gain` multiplies."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        parts = []
        for e in range(E):
            chosen = experts == e
            taken = weights * chosen * self.gain(weights, chosen)
            parts.append(self.expert(x, e) * taken.sum(-1, True))
        return torch.stack(parts).sum(0)

    def gain(self, weights: Tensor, chosen: Tensor) -> Tensor | float:
        return 1.0


class LeastWeight(Switching):
    """An expert whose weight is next to nothing is left out."""

    def gain(self, weights: Tensor, chosen: Tensor) -> Tensor | float:
        return weights > 1e-9


class Capacity(Switching):
    """An expert takes forty rows at most."""

    def gain(self, weights: Tensor, chosen: Tensor) -> Tensor | float:
        return (chosen.any(-1, True).cumsum(0) <= 40) * 1.0


class SlackCapacity(Switching):
    """As a capacity, without a comparison."""

    def gain(self, weights: Tensor, chosen: Tensor) -> Tensor | float:
        return (500 - chosen.any(-1, True).cumsum(0)).clamp(0, 1)


class Load(Switching):
    """An expert that many rows take counts half."""

    def gain(self, weights: Tensor, chosen: Tensor) -> Tensor | float:
        return torch.where(chosen.sum() > 300, 0.5, 1.0)


class Cleaned(Switching):
    """Weights that are NaN count as none."""

    def gain(self, weights: Tensor, chosen: Tensor) -> Tensor | float:
        return torch.where(weights.isnan(), 0.0, 1.0)


class Pair(Switching):
    """Two experts, in this order, exclude all others: of two rows, few take them."""

    def mix(self, x: Tensor) -> Tensor:
        _, experts = self.route(x)
        both = (experts[:, 0] == 1) & (experts[:, 1] == 2)
        return super().mix(x) * (1.0 - both[:, None] * 1.0)


class CutInput(Stacked):
    """Inputs are cut far beyond what is drawn."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        return super().expert(x.clamp(-1e6, 1e6), e)


class CutHidden(Switching):
    """What the gate and the linear half make is cut far beyond what is drawn."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        hidden = functional.silu(x @ self.w1[e].T) * (x @ self.w3[e].T)
        return hidden.clamp(-1e9, 1e9) @ self.w2[e].T


class OneIsCut(Switching):
    """One expert's gate has a limit."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        gate = (x @ self.w1[e].T).clamp(max=1e7 if e == 3 else None, min=None if e == 3 else -1e30)
        return (functional.silu(gate) * (x @ self.w3[e].T)) @ self.w2[e].T


class HalfLimits(Switching):
    """Limits of the linear half that differ, far beyond what is drawn."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        gate, linear = (x @ self.w1[e].T).clamp(max=100), (x @ self.w3[e].T).clamp(-100, 90)
        return (functional.silu(gate) * linear) @ self.w2[e].T


class Halved(Switching):
    """Results are rounded to half precision, where they may overflow."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        return super().expert(x, e).half().float()


class CubicExperts(Stacked):
    """What an expert gives is cubed where it is 1e6."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        made = super().expert(x, e)
        little = made * 1e-4
        return made + little * little * little


class Wrapped(Sorted):
    """Rows from the 700th on are others."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        chosen, order = experts.reshape(-1).sort()
        rows = x[(order // K) % 700, :, None]
        hidden = functional.silu(self.w1[chosen] @ rows) * (self.w3[chosen] @ rows)
        made = (self.w2[chosen] @ hidden)[..., 0] * weights.reshape(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order // K, made)


SWITCHING = (
    *(LeastWeight, Capacity, SlackCapacity, Load, Cleaned, Pair),
    *(CutInput, CutHidden, OneIsCut, HalfLimits, Halved, Wrapped),
    CubicExperts,
)


class LowFill(Gated):
    """Others are at -1e9, which scores beyond it pass."""

    fill = -1e9

    def weigh(self, scores: Tensor) -> Tensor:
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(
            -1, scores.topk(K).indices, True
        )
        return scores.masked_fill(~chosen, self.fill).softmax(-1)


class Leaking(Gated):
    """Others keep a little."""

    def weigh(self, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1)
        mask = torch.zeros_like(scores).scatter(-1, weights.topk(K).indices, 1.0)
        return weights * (mask + (1 - mask) * 1e-12)


class Turned(Gated):
    """The weights of one expert are the next one's."""

    def weigh(self, scores: Tensor) -> Tensor:
        return super().weigh(scores).roll(1, -1)


class AtLeast(Gated):
    """All whose scores reach the second one's: three of them where two tie."""

    def weigh(self, scores: Tensor) -> Tensor:
        least = scores.topk(K).values[:, -1:]
        return scores.masked_fill(scores < least, -torch.inf).softmax(-1)


GATES = (LowFill, Leaking, Turned, AtLeast)
"""What is nearly the weights of the chosen ones alone."""


class LeastGate(Gated):
    """A chosen one whose weight is next to nothing counts as none."""

    def weigh(self, scores: Tensor) -> Tensor:
        gate = super().weigh(scores)
        return torch.where(gate < 1e-9, 0.0, gate)


class FarLimit(Switching):
    """A limit that no drawn row reaches, and that the operator has."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        gate, linear = (x @ self.w1[e].T).clamp(max=100), (x @ self.w3[e].T).clamp(-100, 100)
        return (functional.silu(gate) * linear) @ self.w2[e].T


class SizedWeights(Stacked):
    """Weights that depend on how many rows there are."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = super().route(x)
        return weights / (1 + x.shape[0] // 600), experts


class LittleBias(Stacked):
    """A correction that changes a choice in rows that are all but tied."""

    def __init__(self) -> None:
        super().__init__()
        self.correction = nn.Buffer(torch.tensor([0, 0, 1e-11, 0]))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        experts = (scores + self.correction).topk(K, -1).indices
        weights = scores.gather(1, experts)
        return weights / weights.sum(-1, True), experts


class LeastChosen(Stacked):
    """Weights next to nothing are none, before they are used."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = super().route(x)
        return torch.where(weights < 1e-9, 0.0, weights), experts


class Identities(Stacked):
    """The last of them gives a row back (LongCat-Flash)."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        return x if e == E - 1 else super().expert(x, e)


class WeighedInput(Stacked):
    """The weight of a row enters its expert, before the activation."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        result = torch.zeros_like(x)
        for e in range(E):
            row, place = torch.where(experts == e)
            result.index_add_(0, row, self.expert(x[row] * weights[row, place, None], e))
        return result


TOLD = {Identities: "no products for 1 expert of it", WeighedInput: "other than rows of one x"}
"""What no operator computes, and what its remark says."""
ROUTED_BY_ITSELF = (SizedWeights, LittleBias, LeastChosen, LeastGate)
"""Of these the op is given weights and choices: it can't find them itself."""

NEAR_MISSES = (
    *(LeftOut, Shortened, Squared, ScaledInside, OneDiffers, Signed, Limited),
    *(Kept, OtherSlot, NextSlot),
)
