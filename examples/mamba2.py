"""A block of Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060), by the listing of its paper.

    hₜ = e^{A Δₜ} hₜ₋₁ + Δₜ Bₜ xₜᵀ,  yₜ = Cₜᵀ hₜ + D xₜ

State space duality: inside a chunk of tokens that is a product under a mask of decays, whose
logarithms are segment sums; between chunks only states are handed on. The names are the paper's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

WIDTH, HEADS, INNER, STATE, REACH, CHUNK = 48, 4, 16, 8, 4, 8


def segsum(x: Tensor) -> Tensor:
    """(…, T) to (…, T, T): the sums of x from behind column s to row t, −∞ above the diagonal."""
    total = x.cumsum(-1)
    below = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool).tril()
    return (total[..., :, None] - total[..., None, :]).masked_fill(~below, -torch.inf)


def ssd(X: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """X (B, T, H, P), A (B, T, H), B and C (B, T, H, N) to X's shape; T is whole chunks."""
    X, A, B, C = (_chunks(each) for each in (X, A, B, C))
    A = A.permute(0, 3, 1, 2)
    total = A.cumsum(-1)
    # Inside each chunk.
    inside = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, segsum(A).exp(), X)
    # The state that each chunk makes of its own tokens.
    left = (total[..., -1:] - total).exp()
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, left, X)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    # What chunks hand on.
    carried = segsum(F.pad(total[..., -1], (1, 0))).exp()
    states = torch.einsum("bhzc,bchpn->bzhpn", carried, states)[:, :-1]
    # What tokens read of the chunks before theirs.
    before = torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states, total.exp())
    return (inside + before).flatten(1, 2)


def _chunks(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])


class Mamba2(nn.Module):
    """(B, T, C) to (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        inner = HEADS * INNER
        self.sizes = [inner, inner + 2 * STATE, HEADS]
        self.project = nn.Linear(WIDTH, sum(self.sizes), bias=False)
        channels = self.sizes[1]
        self.convolve = nn.Conv1d(channels, channels, REACH, groups=channels, padding=REACH - 1)
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.rand(HEADS)) for _ in range(3))
        self.norm = nn.RMSNorm(inner, eps=1e-5)
        self.out = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        length = u.shape[1]
        z, xBC, dt = torch.split(self.project(u), self.sizes, -1)
        xBC = F.silu(self.convolve(xBC.mT)[..., :length].mT)
        x, B, C = torch.split(xBC, [HEADS * INNER, STATE, STATE], -1)
        x = x.reshape(*x.shape[:-1], HEADS, INNER)
        dt = F.softplus(dt + self.dt_bias)
        B, C = (each[:, :, None].expand(-1, -1, HEADS, -1) for each in (B, C))
        given = x * dt[..., None], -self.A_log.exp() * dt, B, C
        missing = -length % CHUNK
        padded = (F.pad(each, (0, 0) * (each.ndim - 2) + (0, missing)) for each in given)
        y = ssd(*padded)[:, :length] + self.D[:, None] * x
        result: Tensor = self.out(self.norm(y.flatten(2) * F.silu(z)))
        return result


def build() -> tuple[Mamba2, tuple[Tensor], tuple[dict[int, Dim]]]:
    torch.manual_seed(0)
    # torch.export traces the listing's einsums over chunks for one number of these.
    shapes = ({0: Dim("batch", max=1024)},)
    return Mamba2().eval(), (torch.randn(3, 2 * CHUNK + 3, WIDTH),), shapes


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
