"""Heads written one by one: the parts that they share, and what each must become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import Dim

H, D, M = 4, 6, 24

BATCH, SEQ, MEMORY = Dim("batch", max=64), Dim("seq", max=64), Dim("memory", max=64)


@dataclass(frozen=True)
class Case:
    """A module, its inputs ("x", "memory", "padding"), and what it must become."""

    make: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    attentions: int
    gemms: int


CASES: dict[str, Case] = {}


def case(
    *inputs: str, attentions: int = 1, gemms: int = 2
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def register(module: type[nn.Module]) -> type[nn.Module]:
        CASES[module.__name__] = Case(module, inputs or ("x",), attentions, gemms)
        return module

    return register


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = query @ key.transpose(-2, -1) * D**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value


def causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


class Head(nn.Module):
    """Self-attention of one head, causal."""

    def __init__(self, bias: bool = False, depth: int = D) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(M, depth, bias=bias) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * D**-0.5
        scores = scores.masked_fill(~causal(x), float("-inf"))
        return self.dropout(scores.softmax(-1)) @ self.value(x)


class Heads(nn.Module):
    """H heads and an output projection."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(bias) for _ in range(H))
        self.out = nn.Linear(M, M)
