"""Weights folded ahead of time: the nodes that go, the bytes that don't grow, and the parity."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from attngraph.compiling.compiler import optimize
from attngraph.optimized import Optimized

WIDTH, HEADS = 32, 4


class LowRank(nn.Module):
    """A linear with a low-rank update beside it (Hu et al. 2021)."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


class Attention(nn.Module):
    """Attention with adapted queries, a learned temperature per head, and layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = LowRank(), LowRank()
        self.key, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.gamma = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(value: torch.Tensor) -> torch.Tensor:
            return value.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        weights = (q * self.temperature @ k.transpose(-1, -2)).softmax(-1)
        return x + self.gamma * self.out((weights @ v).transpose(1, 2).flatten(2))


class ConvNorm(nn.Module):
    """Convolutions with batch norm, and weights that are normalised at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.norm.running_mean = torch.randn(8)
        self.norm.running_var = torch.rand(8) + 0.5
        self.second = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.first.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std(
            (1, 2, 3), keepdim=True
        )
        first = nn.functional.conv2d(x, weight)
        return self.second(self.norm(first).relu())


def _compiled(
    module: nn.Module, *shape: int, exact: bool = False, dynamic: bool = True
) -> Optimized:
    torch.manual_seed(0)
    shapes: Any = ({0: Dim("batch", max=64)},) if dynamic else None
    return optimize(module.eval(), (torch.randn(shape),), dynamic_shapes=shapes, exact=exact)


def _ops(compiled: Optimized) -> Counter[str]:
    return Counter(node.op for node in compiled.graph)


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def test_an_adapted_attention_has_the_products_of_one_without_adapters() -> None:
    module = Attention()
    compiled = _compiled(module, 2, 6, WIDTH)
    ops = _ops(compiled)
    assert ops["aten.linear"] == 4
    assert ops["attn.attention"] == 1
    assert ops["aten.mul.Tensor"] == ops["aten.mul.Scalar"] == 0
    assert compiled.report.weight_bytes < _bytes(module)
    made = Counter(rewrite.made_by for rewrite in compiled.report.reassociated)
    assert made == {"fold-scales": 2, "compose-linears": 2, "drop-key-bias": 1}


def test_exact_keeps_the_adapters_and_the_factors() -> None:
    compiled = _compiled(Attention(), 2, 6, WIDTH, exact=True)
    ops = _ops(compiled)
    assert ops["attn.attention"] == 1
    assert ops["aten.add.Tensor"] >= 2
    assert ops["aten.mul.Tensor"] == 2
    assert ops["aten.mul.Scalar"] == 0, "a half goes into the weights without rounding"
    assert compiled.report.reassociated == []


def test_norms_of_weights_and_batches_leave_two_convolutions() -> None:
    compiled = _compiled(ConvNorm(), 2, 3, 12, 12)
    assert set(_ops(compiled)) == {"aten.conv2d", "aten.relu"}


@pytest.mark.parametrize("exact", [False, True])
def test_a_low_rank_pair_alone_stays(exact: bool) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH))
    compiled = _compiled(module, 2, 6, WIDTH, exact=exact)
    assert _ops(compiled) == {"aten.linear": 2}
    assert compiled.report.reassociated == []
