"""Recurrent encoders: Elman's RNN (1990), LSTM (Hochreiter and Schmidhuber, 1997), GRU (Cho, 2014).

    RNN   hₜ = tanh(W xₜ + U hₜ₋₁ + b)
    LSTM  cₜ = f ⊙ cₜ₋₁ + i ⊙ g,  hₜ = o ⊙ tanh(cₜ),  (i, f, o) = σ(W xₜ + U hₜ₋₁ + b)
    GRU   hₜ = (1 - z) ⊙ n + z ⊙ hₜ₋₁,  n = tanh(W xₜ + b + r ⊙ (U hₜ₋₁ + d))

A tagger over padded sentences: they are packed, so the backward direction starts at the last word.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Kind = type[nn.RNN] | type[nn.LSTM] | type[nn.GRU]


class Tagger(nn.Module):
    """Token ids (B, T) and lengths (B,) to tag logits (B, T, tags)."""

    def __init__(self, kind: Kind, width: int = 48, tags: int = 9) -> None:
        super().__init__()
        self.embedding = nn.Embedding(120, width)
        self.layers = kind(width, width, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, tags)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        steps = ids.shape[1]
        packed = pack_padded_sequence(
            self.embedding(ids), lengths.clamp(max=steps), batch_first=True, enforce_sorted=False
        )
        states, _ = pad_packed_sequence(
            self.layers(packed)[0], batch_first=True, total_length=steps
        )
        logits: Tensor = self.out(states)
        return logits


Shapes = tuple[dict[int, Dim], dict[int, Dim]]


def build(kind: Kind = nn.LSTM) -> tuple[Tagger, tuple[Tensor, Tensor], Shapes]:
    torch.manual_seed(0)
    batch = Dim("batch", max=1024)
    args = (torch.randint(120, (3, 12)), torch.tensor([12, 5, 9]))
    return Tagger(kind).eval(), args, ({0: batch, 1: Dim("seq", max=4096)}, {0: batch})


def build_rnn() -> tuple[Tagger, tuple[Tensor, Tensor], Shapes]:
    return build(nn.RNN)


def build_gru() -> tuple[Tagger, tuple[Tensor, Tensor], Shapes]:
    return build(nn.GRU)


if __name__ == "__main__":
    for make in (build_rnn, build, build_gru):
        module, args, _ = make()
        print(tuple(module(*args).shape))
