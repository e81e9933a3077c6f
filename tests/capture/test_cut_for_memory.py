"""An axis that is cut into parts for memory alone is whole in the graph, at any size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph import optimize
from attngraph.errors import UsageError

pytestmark = pytest.mark.wide

X = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))


class Parts(nn.Module):
    """A function of each part, and the parts again along the axis."""

    def __init__(self, cut: Callable[[Tensor], tuple[Tensor, ...]], *, mixes: bool = False) -> None:
        super().__init__()
        self.cut, self.mixes = cut, mixes
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.cut(x)
        made = [part.softmax(1) if self.mixes else self.layer(part).relu() for part in parts]
        return torch.cat(made, 1)


@pytest.mark.parametrize(
    "cut",
    [lambda x: x.chunk(100, dim=1), lambda x: torch.split(x, 4, 1)],
    ids=["by-number", "by-size"],
)
def test_parts_that_are_treated_alike_are_no_parts(cut: Callable[..., tuple[Tensor, ...]]) -> None:
    model = Parts(cut).eval()
    optimized = optimize(model, (X,), dynamic_shapes=({1: Dim.AUTO},))
    assert any("the graph has it whole" in note for note in optimized.report.notes)
    for length in (6, 1, 4, 13, 130):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(optimized(x), model(x))


def test_parts_that_each_sum_to_one_are_kept() -> None:
    model = Parts(lambda x: x.split(4, 1), mixes=True)
    optimized = optimize(model, (X,), dynamic_shapes=({1: Dim.AUTO},))
    torch.testing.assert_close(optimized(X), model(X))
    with pytest.raises(UsageError):
        optimized(torch.randn(2, 13, 4))
    assert not any("the graph has it whole" in note for note in optimized.report.notes)
