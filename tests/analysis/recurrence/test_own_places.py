"""Heads, also of values that share a query, are each read from their own, however little of another
shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attngraph.analysis.recurrence.linear import read_linear
from attngraph.analysis.recurrence.mixing import Tokens
from attngraph.analysis.recurrence.terms import Recurrence
from attngraph.frontend.capture import capture

WIDTH, GROUPS = 4, 2


class Grouped(nn.Module):
    """Causal linear attention of two heads of queries and keys, each with two of values."""

    def __init__(self, leak: float, *, within: bool) -> None:
        super().__init__()
        self.leak, self.within = leak, within
        self.q, self.k = nn.Linear(8, 2 * WIDTH), nn.Linear(8, 2 * WIDTH)
        self.v = nn.Linear(8, 2 * GROUPS * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = (each(x).unflatten(2, (-1, WIDTH)) for each in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in made)
        scores = (q @ k.mT).tril()[:, :, None].expand(-1, -1, GROUPS, -1, -1).flatten(1, 2)
        o = scores @ v
        pairs = o.unflatten(1, (2, GROUPS))
        other = pairs.flip(2 if self.within else 1).flatten(1, 2)
        return o + self.leak * other if self.leak else o


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("leak", [0.0, 1e-12])
def test_a_head_that_shows_in_another_is_found(leak: float, within: bool) -> None:
    graph = capture(Grouped(leak, within=within).eval(), (torch.randn(2, 7, 8),)).graph
    found = read_linear(graph, Tokens(7), graph.outputs, {})
    assert any(isinstance(each, Recurrence) for each in found) is (leak == 0)
