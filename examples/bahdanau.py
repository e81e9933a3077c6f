"""Additive attention, where it all began (Bahdanau, Cho and Bengio, 2015, arXiv:1409.0473).

    eᵢⱼ = vᵀ tanh(W sᵢ + U hⱼ),    αᵢ = softmaxⱼ(eᵢⱼ),    cᵢ = Σⱼ αᵢⱼ hⱼ

Here a decoder's states s are aligned with an encoder's states h for a whole target at once (teacher
forcing), as in training or in scoring a translation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim


class AdditiveAttention(nn.Module):
    """States (B, T, C) over a source (B, S, C) to contexts (B, T, C) and weights (B, T, S).

    `mask` (B, S) is true where the source has a token.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.decoder = nn.Linear(width, width, bias=False)
        self.encoder = nn.Linear(width, width)
        self.energy = nn.Linear(width, 1, bias=False)
        nn.init.normal_(self.energy.weight)  # peaked: the default init aligns nearly uniformly

    def forward(self, state: Tensor, source: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.decoder(state)[:, :, None] + self.encoder(source)[:, None])
        energy = self.energy(hidden).squeeze(-1)
        weights = energy.masked_fill(~mask[:, None], float("-inf")).softmax(dim=-1)
        return weights @ source, weights


class Aligner(nn.Module):
    """Embeds source (B, S) and target (B, T) ids and aligns them: logits (B, T, vocabulary)."""

    def __init__(self, vocabulary: int = 120, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.source = nn.Linear(width, width)
        self.target = nn.Linear(width, width)
        self.attention = AdditiveAttention(width)
        self.out = nn.Linear(2 * width, vocabulary)

    def forward(self, source_ids: Tensor, mask: Tensor, target_ids: Tensor) -> Tensor:
        source = torch.tanh(self.source(self.embedding(source_ids)))
        state = torch.tanh(self.target(self.embedding(target_ids)))
        context, _ = self.attention(state, source, mask)
        logits: Tensor = self.out(torch.cat([state, context], dim=-1))
        return logits


Shapes = tuple[dict[int, Dim], dict[int, Dim], dict[int, Dim]]


def build() -> tuple[Aligner, tuple[Tensor, Tensor, Tensor], Shapes]:
    torch.manual_seed(0)
    module = Aligner().eval()
    source_ids = torch.randint(120, (3, 12))
    target_ids = torch.randint(120, (3, 7))
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, :3] = False
    batch, limit = Dim("batch", max=1024), 4096
    source, target = (
        {0: batch, 1: Dim("source", max=limit)},
        {0: batch, 1: Dim("target", max=limit)},
    )
    return module, (source_ids, mask, target_ids), (source, source, target)


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
