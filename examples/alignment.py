"""A Bahdanau model learns a tiny language, and its attention shows the alignment it found.

    python -m examples.alignment -o docs/alignment.svg

A sentence is translated word by word with a permuted vocabulary, and written backwards. So the
right alignment is known: the i-th word of the translation comes from the i-th word from the end.
The model is trained for less than a minute and optimised; the weights of the optimised model are
drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

from examples.bahdanau import AdditiveAttention

WORDS, START, WIDTH = 16, 16, 48
LENGTH = 8


class Aligner(nn.Module):
    """Source (B, S), its mask (B, S), previous words of the target (B, T): logits (B, T, words)."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS + 1, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attention = AdditiveAttention(WIDTH)
        self.out = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, source: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
        annotations, _ = self.encoder(self.source(source))
        states, _ = self.decoder(self.target(previous))
        context, _ = self.attention(states, annotations, mask)
        logits: Tensor = self.out(torch.cat([states, context], dim=-1))
        return logits


def sentences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sources (B, S), what the decoder has read at each step (B, S), and translations (B, S)."""
    dictionary = torch.randperm(WORDS, generator=torch.Generator().manual_seed(1))
    source = torch.randint(WORDS, (count, LENGTH), generator=generator)
    translation = dictionary[source].flip(1)
    start = torch.full((count, 1), START)
    return source, torch.cat([start, translation[:, :-1]], dim=1), translation


def train(steps: int = 900) -> Aligner:
    """A model that translates nearly every word right; the same at every call on one machine."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(2)
    model = Aligner().train()
    optimiser = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(steps):
        source, previous, translation = sentences(64, generator)
        logits = model(source, torch.ones_like(source, dtype=torch.bool), previous)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), translation.flatten())
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
    return model.eval()


Shapes = tuple[dict[int, Dim], dict[int, Dim], dict[int, Dim]]


def build(steps: int = 0) -> tuple[Aligner, tuple[Tensor, Tensor, Tensor], Shapes]:
    """The model after some steps of training; untrained by default."""
    model = train(steps)
    source, previous, _ = sentences(3, torch.Generator().manual_seed(3))
    batch = Dim("batch", max=1024)
    first = {0: batch, 1: Dim("source", max=4096)}
    second = {0: batch, 1: Dim("target", max=4096)}
    args = (source, torch.ones_like(source, dtype=torch.bool), previous)
    return model, args, (first, first, second)


def accuracy(model: Aligner, count: int = 256) -> float:
    """The share of words that are translated right, on sentences it hasn't seen."""
    source, previous, translation = sentences(count, torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = model(source, torch.ones_like(source, dtype=torch.bool), previous)
    return float((logits.argmax(-1) == translation).float().mean())


def main() -> None:
    import attngraph
    from attngraph.reports.heat_map import heat_map

    parser = argparse.ArgumentParser(description="Train, optimise, and draw the alignment.")
    parser.add_argument("-o", "--output", type=Path, default=Path("alignment.svg"))
    path = parser.parse_args().output
    model, args, shapes = build(steps=900)
    print(f"{accuracy(model):.1%} of the words of new sentences are translated right")
    optimized = attngraph.optimize(model, args, dynamic_shapes=shapes)
    (view,) = optimized.attention(*args)
    _, _, translation = sentences(3, torch.Generator().manual_seed(3))
    source = [f"s{word}" for word in args[0][0].tolist()]
    target = [f"t{word}" for word in translation[0].tolist()]
    path.write_text(heat_map(view.weights[0, 0], target, source), "utf-8")
    print(f"{path}: rows are the words written, columns the words read")


if __name__ == "__main__":
    main()
