"""Additive attention that pools a sequence into one vector, every role in its own space.

    q = W_q x_q,  kⱼ = W_k xⱼ,  vⱼ = W_v xⱼ,    eⱼ = wᵀ tanh(U q + V kⱼ),
    α = softmax(mask(e)),    result = Σⱼ αⱼ vⱼ

Each role is first projected to its own width and then to the attention's: two linears in a row,
which are one matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim


class AdditivePooling(nn.Module):
    """Query (B, Q), keys and values (B, T, K), mask (B, T): result (B, V), weights (B, T)."""

    def __init__(
        self, query: int = 40, key: int = 48, width: int = 64, value: int = 56, attention: int = 32
    ) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(query, width), nn.Linear(width, attention))
        self.key = nn.Sequential(nn.Linear(key, width), nn.Linear(width, attention))
        self.value = nn.Linear(key, value)
        self.energy = nn.Linear(attention, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The pooled vector, the weighted values (B, T, V) it is the sum of, and the weights."""
        hidden = torch.tanh(self.query(query)[:, None] + self.key(keys))
        energy = self.energy(hidden)[..., 0].masked_fill(~mask, float("-inf"))
        weights = energy.softmax(dim=-1)
        weighted = weights[..., None] * self.value(keys)
        return weighted.sum(dim=1), weighted, weights


Shapes = tuple[dict[int, Dim], dict[int, Dim], dict[int, Dim]]


def build() -> tuple[AdditivePooling, tuple[Tensor, Tensor, Tensor], Shapes]:
    torch.manual_seed(0)
    batch = Dim("batch", max=1024)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, 7:] = False
    keys = {0: batch, 1: Dim("seq", max=4096)}
    args = (torch.randn(3, 40), torch.randn(3, 12, 48), mask)
    return AdditivePooling().eval(), args, ({0: batch}, keys, keys)


if __name__ == "__main__":
    module, args, _ = build()
    print([tuple(result.shape) for result in module(*args)])
