"""Reductions over an axis that may have no elements: the tokens after the first, of one token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph

REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(1),
    "all axes": lambda x: x.mean(),
    "std": lambda x: x.std(1),
    "variance": lambda x: x.var(1, unbiased=False),
    "sum": lambda x: x.sum(1),
    "kept": lambda x: x.mean(1, keepdim=True).expand(-1, 2, -1),
}


class Rest(nn.Module):
    def __init__(self, reduced: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.reduced = reduced

    def forward(self, x: Tensor) -> Tensor:
        return self.reduced(x[:, 1:] * 2)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("way", REDUCED)
def test_what_eager_makes_of_nothing(way: str) -> None:
    module = Rest(REDUCED[way])
    dims = ({0: Dim("batch"), 1: Dim("length")},)
    optimized = attngraph.optimize(module, (torch.randn(2, 7, 4),), dynamic_shapes=dims)
    for length in (1, 2, 9):
        x = torch.randn(3, length, 4)
        torch.testing.assert_close(optimized(x), module(x), equal_nan=True)


class _PlacesOfRest(nn.Module):
    """The largest of each row but the first, of a matrix: onnxruntime leaves the axis of no rows
    as long as it is, where it is counted from the last."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rest = x[1:] * 2
        places = rest.argmax(-1, keepdim=True)
        return rest * rest.gather(-1, places), rest + rest.min(-1, keepdim=True).indices


def test_places_in_no_rows() -> None:
    module, dims = _PlacesOfRest(), ({0: Dim("rows")},)
    optimized = attngraph.optimize(module, (torch.randn(7, 4),), dynamic_shapes=dims)
    for rows in (1, 2, 9):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(optimized(x), module(x))


def test_an_axis_that_has_elements_costs_nothing() -> None:
    dims = ({0: Dim("batch"), 1: Dim("length")},)
    module = nn.Sequential(nn.Linear(4, 4), nn.AdaptiveAvgPool2d((None, 1)))
    sample = (torch.randn(2, 7, 4),)
    optimized = attngraph.optimize(module, sample, dynamic_shapes=dims)
    assert "Where" not in [node.op_type for node in optimized.model.graph]
