"""An encoder-decoder that can copy, as summarisers do (See et al., 2017, arXiv:1704.04368).

    p(w) = g · softmax(W_u x)_w + (1 − g) · Σ_{j: source_j = w} αⱼ,    g = σ(w_gᵀ [x; context])

α are the weights of the last layer's attention to the source, averaged over its heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

VOCABULARY, WIDTH, HEADS = 120, 48, 4


class Summariser(nn.Module):
    """Source ids (B, S), their mask (B, S), summary ids (B, T): log-chances (B, T, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
        self.decoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
        self.copy = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.gate, self.out = nn.Linear(2 * WIDTH, 1), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, mask: Tensor, summary: Tensor) -> Tensor:
        memory = self.encoder(self.words(source), src_key_padding_mask=~mask)
        steps = summary.shape[1]
        later = torch.ones(steps, steps, dtype=torch.bool).triu(1)
        x = self.decoder(self.words(summary), src_mask=later)
        context, weights = self.copy(x, memory, memory, key_padding_mask=~mask)
        gate = torch.sigmoid(self.gate(torch.cat([x, context], dim=-1)))
        invented = gate * self.out(x + context).softmax(dim=-1)
        places = source[:, None].expand(-1, steps, -1)
        copied = torch.zeros_like(invented).scatter_add(2, places, (1 - gate) * weights)
        return torch.log(invented + copied + 1e-9)


Shapes = tuple[dict[int, Dim], dict[int, Dim], dict[int, Dim]]


def build() -> tuple[Summariser, tuple[Tensor, Tensor, Tensor], Shapes]:
    torch.manual_seed(0)
    batch, limit = Dim("batch", max=1024), 4096
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, 7:] = False
    source, target = (
        {0: batch, 1: Dim("source", max=limit)},
        {0: batch, 1: Dim("target", min=2, max=limit)},
    )
    args = (torch.randint(VOCABULARY, (3, 12)), mask, torch.randint(VOCABULARY, (3, 7)))
    return Summariser().eval(), args, (source, source, target)


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
