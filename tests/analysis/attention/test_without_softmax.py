"""Which products weigh values without a softmax, and which only lie behind an attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attngraph.analysis.attention.without_softmax import without_softmax
from attngraph.frontend.capture import capture

WIDTH = 8


class Shared(nn.Module):
    """Weights that are used twice, as in icefall's Zipformer: with values that a gate multiplies,
    and with values that are made of what that gave. With `scores` they are no softmax's."""

    def __init__(self, *, scores: bool = False) -> None:
        super().__init__()
        self.project, self.gate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.values, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scores = scores

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        queries, keys = self.project(x).chunk(2, -1)
        weights = (queries @ keys.mT).masked_fill(mask, 0.0 if self.scores else -1000.0)
        weights = weights if self.scores else weights.softmax(-1)
        x = x + self.out((weights @ x) * self.gate(x).tanh())
        return weights @ self.values(x)


@pytest.mark.parametrize("scores", [False, True], ids=["of a softmax", "scores"])
def test_values_made_of_an_attention_are_no_scores(scores: bool) -> None:
    x, mask = torch.randn(2, 5, WIDTH), torch.zeros(2, 1, 5, dtype=torch.bool)
    graph = capture(Shared(scores=scores), (x, mask)).graph
    found = [declined.code for _, declined in without_softmax(graph)]
    assert found == ["linear-attention"] * scores


class Convolved(nn.Module):
    """A convolution by Fourier transforms of a length that is open: what multiplies the values is
    made of cosines of sizes alone."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        table = torch.cos(places[:, None] * places / x.shape[1])
        return torch.einsum("tu,bud->btd", table.exp(), torch.einsum("us,bsd->bud", table, x) * x)


def test_tables_of_a_transform_are_no_keys() -> None:
    shapes = ({1: torch.export.Dim("seq", max=64)},)
    graph = capture(Convolved(), (torch.randn(2, 5, WIDTH),), dynamic_shapes=shapes).graph
    assert not [*without_softmax(graph)]
