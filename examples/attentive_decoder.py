"""A recurrent decoder that attends at every step (Bahdanau et al., 2015; Luong et al., 2015).

    additive  eᵢⱼ = wᵀ tanh(W_q sᵢ₋₁ + W_k hⱼ)
    dot       eᵢⱼ = sᵢ₋₁ᵀ hⱼ
    general   eᵢⱼ = sᵢ₋₁ᵀ W hⱼ

    αᵢ = softmaxⱼ(eᵢⱼ),    cᵢ = Σⱼ αᵢⱼ hⱼ,    sᵢ = GRU([yᵢ₋₁; cᵢ], sᵢ₋₁)

The steps depend on each other, so they are a loop: torch's `scan`, of any length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim

VOCABULARY, START = 120, 1


class Additive(nn.Module):
    """A state (B, C) and keys (B, S, C) to energies (B, S)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.energy = nn.Linear(width, 1, bias=False)

    def forward(self, state: Tensor, keys: Tensor) -> Tensor:
        hidden = torch.tanh(self.query(state)[:, None] + self.key(keys))
        energy: Tensor = self.energy(hidden)[..., 0]
        return energy


class Dot(nn.Module):
    """As `Additive`, without parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, state: Tensor, keys: Tensor) -> Tensor:
        return torch.bmm(keys, state[:, :, None])[..., 0]


class General(nn.Module):
    """As `Additive`, with one matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key = nn.Linear(width, width, bias=False)

    def forward(self, state: Tensor, keys: Tensor) -> Tensor:
        return torch.bmm(self.key(keys), state[:, :, None])[..., 0]


class Translator(nn.Module):
    """Source (B, S), its mask (B, S) and target ids (B, T): logits (B, T, V), weights (B, T, S)."""

    def __init__(self, score: Callable[[int], nn.Module] = Additive, width: int = 64) -> None:
        super().__init__()
        self.source, self.target = (nn.Embedding(VOCABULARY, width) for _ in range(2))
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.score = score(width)
        self.cell = nn.GRUCell(2 * width, width)
        self.start = nn.Linear(width, width)
        self.out = nn.Linear(2 * width, VOCABULARY)

    def encode(self, source: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The annotations hⱼ (B, S, C), and the decoder's first state (B, C) from their mean."""
        states, _ = self.encoder(self.source(source))
        present = mask[..., None].to(states.dtype)
        mean = (states * present).sum(1) / present.sum(1)
        return states, torch.tanh(self.start(mean))

    def step(
        self, state: Tensor, word: Tensor, states: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The next state (B, C), the context (B, C) and the weights (B, S)."""
        energy = self.score(state, states).masked_fill(~mask, float("-inf"))
        weights = energy.softmax(dim=-1)
        context = torch.bmm(weights[:, None], states)[:, 0]
        return self.cell(torch.cat([word, context], dim=-1), state), context, weights

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Teacher forcing: each step reads the true previous word."""
        states, first = self.encode(source, mask)

        def step(state: Tensor, word: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            state, context, weights = self.step(state, word, states, mask)
            return state, (torch.cat([state, context], dim=-1), weights)

        _, (outputs, weights) = scan(step, first, self.target(target).transpose(0, 1))
        return self.out(outputs.transpose(0, 1)), weights.transpose(0, 1)

    @torch.no_grad()
    def greedy(self, source: Tensor, mask: Tensor, steps: int) -> Tensor:
        """The likeliest word each time: ids (B, steps)."""
        states, state = self.encode(source, mask)
        word = source.new_full((source.shape[0],), START)
        words = []
        for _ in range(steps):
            state, context, _ = self.step(state, self.target(word), states, mask)
            word = self.out(torch.cat([state, context], dim=-1)).argmax(-1)
            words.append(word)
        return torch.stack(words, dim=1)


Shapes = tuple[dict[int, Dim], dict[int, Dim], dict[int, Dim]]
Built = tuple[Translator, tuple[Tensor, Tensor, Tensor], Shapes]


def build(score: Callable[[int], nn.Module] = Additive) -> Built:
    torch.manual_seed(0)
    batch, limit = Dim("batch", max=1024), 4096
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, 7:] = False
    source = {0: batch, 1: Dim("source", min=2, max=limit)}
    target = {0: batch, 1: Dim("target", min=2, max=limit)}
    args = (torch.randint(VOCABULARY, (3, 12)), mask, torch.randint(VOCABULARY, (3, 7)))
    return Translator(score).eval(), args, (source, source, target)


def build_dot() -> Built:
    return build(Dot)


def build_general() -> Built:
    return build(General)


if __name__ == "__main__":
    for score in (Additive, Dot, General):
        module, args, _ = build(score)
        logits, weights = module(*args)
        print(score.__name__, tuple(logits.shape), tuple(weights.shape))
