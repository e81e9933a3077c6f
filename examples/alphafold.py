"""AlphaFold's attention (Jumper et al., 2021, supplement, algorithms 7, 13 and 14).

    row-wise with pair bias   softmaxⱼ(⟨qᵢ, kⱼ⟩ / √d + bᵢⱼ) vⱼ,  gated by σ(W_g x)
    triangle, starting node   over k for each edge ij: ⟨q_ij, k_ik⟩ / √d + b_jk

The pair representation z (R, R, C) biases the attention over a row of the alignment, and attends to
itself along its rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.export import Dim

WIDTH, PAIR, HEADS, DEPTH = 48, 32, 4, 12


class GatedAttention(nn.Module):
    """Rows x (B, N, C) with a bias (H, N, N) and a mask (B, N): (B, N, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = HEADS * DEPTH
        self.query, self.key, self.value = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.gate, self.out = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (HEADS, DEPTH)) for part in (self.query, self.key, self.value)
        )
        logits = torch.einsum("bqhd,bkhd->bhqk", query / math.sqrt(DEPTH), key)
        logits = logits + bias + 1e9 * (mask[:, None, None].to(x.dtype) - 1)
        context = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(dim=-1), value).flatten(2)
        mixed: Tensor = self.out(torch.sigmoid(self.gate(x)) * context)
        return mixed


class Evoformer(nn.Module):
    """Alignment m (S, R, C), pairs z (R, R, P) and residues (R,) that are there: both, updated."""

    def __init__(self) -> None:
        super().__init__()
        self.row_norm, self.pair_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(PAIR)
        self.row_bias = nn.Linear(PAIR, HEADS, bias=False)
        self.row = GatedAttention(WIDTH)
        self.triangle_norm = nn.LayerNorm(PAIR)
        self.triangle_bias = nn.Linear(PAIR, HEADS, bias=False)
        self.triangle = GatedAttention(PAIR)

    def forward(self, m: Tensor, z: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.row_bias(self.pair_norm(z)).permute(2, 0, 1)
        m = m + self.row(self.row_norm(m), bias, present.expand(m.shape[0], -1))
        normed = self.triangle_norm(z)
        bias = self.triangle_bias(normed).permute(2, 0, 1)
        z = z + self.triangle(normed, bias, present.expand(z.shape[0], -1))
        return m, z


Shapes = tuple[dict[int, Dim], dict[int, Dim], dict[int, Dim]]


def build() -> tuple[Evoformer, tuple[Tensor, Tensor, Tensor], Shapes]:
    torch.manual_seed(0)
    rows, residues = Dim("rows", max=1024), Dim("residues", max=1024)
    present = torch.ones(9, dtype=torch.bool)
    present[6] = False
    args = (torch.randn(5, 9, WIDTH), torch.randn(9, 9, PAIR), present)
    return (
        Evoformer().eval(),
        args,
        ({0: rows, 1: residues}, {0: residues, 1: residues}, {0: residues}),
    )


if __name__ == "__main__":
    module, args, _ = build()
    print([tuple(result.shape) for result in module(*args)])
