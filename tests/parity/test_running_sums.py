"""Linear attention as running sums of outer products (Katharopoulos et al. 2020): one operator."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import attngraph


def _relu(x: Tensor) -> Tensor:
    return torch.relu(x)


def _elu(x: Tensor) -> Tensor:
    return functional.elu(x) + 1


def _cosine(x: Tensor) -> Tensor:
    """The reweighting of cosFormer (Qin et al. 2022)."""
    angle = math.pi / 2 * torch.arange(1, x.shape[2] + 1)[:, None] / x.shape[2]
    x = torch.relu(x)
    return torch.cat([x * angle.sin(), x * angle.cos()], -1)


class Running(nn.Module):
    def __init__(self, features: Callable[[Tensor], Tensor], *, between: bool = False) -> None:
        super().__init__()
        self.features, self.between = features, between
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (3, 8, 4)).permute(2, 0, 3, 1, 4)
        query, key, value = self.features(heads[0]), self.features(heads[1]), heads[2]
        state = torch.einsum("bhtd,bhte->bhtde", key, value).cumsum(2)
        if self.between:
            state = state.tanh()
        context = torch.einsum("bhtd,bhtde->bhte", query, state)
        total = torch.einsum("bhtd,bhtd->bht", query, key.cumsum(2))
        return context / (total + 1)[..., None]


def _compiled(module: nn.Module) -> attngraph.Optimized:
    """It is right at other sizes, too."""
    torch.manual_seed(0)
    shape = {0: Dim("batch"), 1: Dim("length")}
    made = attngraph.optimize(module, (torch.randn(2, 7, 32),), dynamic_shapes=(shape,))
    for length in (1, 11):
        x = torch.randn(3, length, 32)
        with torch.no_grad():
            torch.testing.assert_close(made(x), module(x), rtol=1e-5, atol=1e-5)
    return made


@pytest.mark.parametrize("features", [_relu, _elu, _cosine])
def test_feature_maps_may_have_zeros(features: Callable[[Tensor], Tensor]) -> None:
    """Two tokens that have no feature in common don't tell a decay between them."""
    optimized = _compiled(Running(features))
    assert sum(node.op_type == "LinearAttention" for node in optimized.model.graph) == 2


def test_what_is_between_the_sum_and_the_queries_is_told() -> None:
    optimized = _compiled(Running(_relu, between=True))
    codes = [site.code for site in optimized.report.sites]
    assert sorted(codes) == ["linear-attention", "recurrence"]  # the total is still an operator
