"""A gated delta net (Yang, Kautz, Hatamizadeh, 2025, arXiv:2412.06464), as the paper has it.

    q, k, v = SiLU(conv(W x)), q and k of length 1
    αₜ = e^{−e^a softplus(W_α xₜ + b)},  βₜ = σ(W_β xₜ)
    Sₜ = Sₜ₋₁ αₜ (I − βₜ kₜ kₜᵀ) + βₜ vₜ kₜᵀ
    oₜ = W_o (RMSNorm(Sₜ qₜ) ⊙ SiLU(W_g xₜ))

The state is a matrix (dᵥ, dₖ) of each head, and a step multiplies it with a matrix (dₖ, dₖ): what
is written is not what is computed, which never makes that matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim
from torch.nn import functional as F

WIDTH, HEADS, KEYS, VALUES, REACH = 48, 3, 8, 16, 4


class GatedDeltaNet(nn.Module):
    """(B, T, C) to (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, HEADS * (2 * KEYS + VALUES), bias=False)
        channels = self.project.out_features
        self.convolve = nn.Conv1d(channels, channels, REACH, groups=channels, bias=False)
        self.alpha, self.beta = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, HEADS, bias=False)
        self.rate = nn.Parameter(torch.randn(HEADS))
        self.norm = nn.RMSNorm(VALUES, eps=1e-6)
        self.gate, self.out = (
            nn.Linear(a, b, bias=False)
            for a, b in ((WIDTH, HEADS * VALUES), (HEADS * VALUES, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.silu(self.convolve(F.pad(self.project(x).mT, (REACH - 1, 0)))).mT
        heads = mixed.reshape(*x.shape[:-1], HEADS, -1)
        q, k, v = torch.split(heads, [KEYS, KEYS, VALUES], -1)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        alpha = torch.exp(-self.rate.exp() * F.softplus(self.alpha(x)))
        beta = torch.sigmoid(self.beta(x))
        start = x.new_zeros(x.shape[0], HEADS, VALUES, KEYS)
        steps = tuple(each.transpose(0, 1) for each in (q, k, v, alpha, beta))
        o = scan(_step, start, steps)[1].transpose(0, 1)
        gated = self.norm(o) * F.silu(self.gate(x)).reshape(o.shape)
        result: Tensor = self.out(gated.flatten(2))
        return result


def _step(state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    q, k, v, alpha, beta = token
    alpha, beta = alpha[..., None, None], beta[..., None, None]
    kept = torch.eye(KEYS) - beta * k[..., :, None] * k[..., None, :]
    state = state @ (alpha * kept) + beta * v[..., :, None] * k[..., None, :]
    return state, (state @ q[..., None])[..., 0]


def build() -> tuple[GatedDeltaNet, tuple[Tensor], tuple[dict[int, Dim]]]:
    torch.manual_seed(0)
    shapes = ({0: Dim("batch", max=1024), 1: Dim("seq", min=2, max=4096)},)
    return GatedDeltaNet().eval(), (torch.randn(3, 12, WIDTH),), shapes


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
