"""Encoder-decoder without attention (Sutskever et al., 2014): one vector carries the whole source.

c = GRU(source),    sᵢ = GRU(yᵢ₋₁, sᵢ₋₁),  s₀ = c,    p(yᵢ) = softmax(W sᵢ)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.utils.rnn import pack_padded_sequence

VOCABULARY, START = 120, 1


class Seq2Seq(nn.Module):
    """Source ids (B, S) with lengths (B,), target ids (B, T): logits (B, T, vocabulary)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.source, self.target = (nn.Embedding(VOCABULARY, width) for _ in range(2))
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, VOCABULARY)

    def encode(self, source: Tensor, lengths: Tensor) -> Tensor:
        """The context vector (1, B, C): the state after the last word."""
        lengths = lengths.clamp(max=source.shape[1])
        packed = pack_padded_sequence(
            self.source(source), lengths, batch_first=True, enforce_sorted=False
        )
        context: Tensor = self.encoder(packed)[1]
        return context

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Teacher forcing: each step reads the true previous word."""
        states, _ = self.decoder(self.target(target), self.encode(source, lengths))
        logits: Tensor = self.out(states)
        return logits

    @torch.no_grad()
    def greedy(self, source: Tensor, lengths: Tensor, steps: int) -> Tensor:
        """The likeliest word each time: ids (B, steps)."""
        state = self.encode(source, lengths)
        word = source.new_full((source.shape[0], 1), START)
        words = []
        for _ in range(steps):
            output, state = self.decoder(self.target(word), state)
            word = self.out(output).argmax(-1)
            words.append(word)
        return torch.cat(words, dim=1)


Shapes = tuple[dict[int, Dim], dict[int, Dim], dict[int, Dim]]


def build() -> tuple[Seq2Seq, tuple[Tensor, Tensor, Tensor], Shapes]:
    torch.manual_seed(0)
    batch, limit = Dim("batch", max=1024), 4096
    args = (torch.randint(120, (3, 12)), torch.tensor([12, 5, 9]), torch.randint(120, (3, 7)))
    shapes = (
        {0: batch, 1: Dim("source", max=limit)},
        {0: batch},
        {0: batch, 1: Dim("target", max=limit)},
    )
    return Seq2Seq().eval(), args, shapes


if __name__ == "__main__":
    module, (source, lengths, target), _ = build()
    print(tuple(module(source, lengths, target).shape), module.greedy(source, lengths, 5).tolist())
