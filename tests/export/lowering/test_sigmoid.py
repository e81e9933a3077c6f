"""A sigmoid's small results are computed where they matter; a gate keeps one operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph

X = torch.tensor([[-30.0, -25.0, -19.0, -17.0], [-3.0, 0.0, 3.0, 30.0]])


class Model(nn.Module):
    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x)


def _weights(x: Tensor) -> Tensor:
    p = x.sigmoid()
    return p / p.sum(-1, keepdim=True)


def _masked_weights(x: Tensor) -> Tensor:
    p = x.sigmoid() * (x > -26).float()
    return p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "of", [_weights, _masked_weights, lambda x: x.sigmoid().log(), lambda x: x.sigmoid() * 1]
)
def test_small_results_are_right(of: Callable[[Tensor], Tensor]) -> None:
    found = attngraph.optimize(Model(of), (X,))
    torch.testing.assert_close(found(X), of(X), rtol=2e-6, atol=0)


def test_a_gate_is_one_operator() -> None:
    found = attngraph.optimize(Model(lambda x: (x + 1) * x.sigmoid()), (X[1:],))
    assert [node.op_type for node in found.model.graph].count("Sigmoid") == 1
