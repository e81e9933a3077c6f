"""Mixtures of experts as two papers write them.

Mixtral (Jiang et al., 2024, arXiv:2401.04088):

    y = Σᵢ Softmax(Top2(x W_g))ᵢ · SwiGLUᵢ(x)

whose other experts have no weight, and DeepSeek-V3 (2024,
arXiv:2412.19437), whose gates are sigmoids, chosen by gates with a bias that the weights lack:

    h = u + FFN_s(u) + Σᵢ gᵢ FFNᵢ(u),  g = g' / Σ g',  g'ᵢ = sᵢ where sᵢ + bᵢ is among the top

As the formulas say, every expert computes every token; the operator computes the chosen ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

WIDTH, HIDDEN, EXPERTS, CHOSEN = 32, 48, 8, 2


class SwiGLU(nn.Module):
    """(…, C) to (…, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Mixtral(nn.Module):
    """(B, T, C) to (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(SwiGLU() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.router(x).topk(CHOSEN, -1)
        return self.mixed(x, best.softmax(-1), chosen)

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Σ wᵢ · Eᵢ(x), of weights (B, T, K) of the experts `chosen` (B, T, K)."""
        total = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            total = total + (weights * (chosen == i)).sum(-1, keepdim=True) * expert(x)
        return total


class DeepSeek(Mixtral):
    """The same with sigmoids, a bias for the choice and an expert that all tokens share."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shared = SwiGLU()
        self.register_buffer("bias", torch.randn(EXPERTS) / 4)

    def forward(self, u: Tensor) -> Tensor:
        s = torch.sigmoid(self.router(u))
        chosen = (s + self.bias).topk(CHOSEN, -1).indices
        g = s.gather(-1, chosen)
        result: Tensor = u + self.shared(u)
        return result + self.mixed(u, g / g.sum(-1, keepdim=True), chosen)


Built = tuple[Mixtral, tuple[Tensor], tuple[dict[int, Dim]]]


def build(kind: type[Mixtral] = Mixtral) -> Built:
    torch.manual_seed(0)
    shapes = ({0: Dim("batch", max=1024), 1: Dim("seq", max=4096)},)
    return kind().eval(), (torch.randn(3, 12, WIDTH),), shapes


def build_deepseek() -> Built:
    return build(DeepSeek)


if __name__ == "__main__":
    for made in (build(), build_deepseek()):
        module, args, _ = made
        print(type(module).__name__, tuple(module(*args).shape))
