"""A model that chooses by a size takes all of them, as one graph of both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError

LAST = 16
FREE, RANGED = Dim("length"), Dim("length", min=1, max=64)
Turn = Callable[["Chosen", Tensor], Tensor]


class Chosen(nn.Module):
    """(B, N, 8): queries by one of two functions."""

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.places = nn.Embedding(LAST, 8)
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        return (self.turn(self, self.query(x)) @ x.mT / 4).softmax(-1) @ x


def _two_forms(module: Chosen, query: Tensor) -> Tensor:
    return 2 * query if query.shape[1] > LAST else query.tanh()


def _ntk(module: Chosen, query: Tensor) -> Tensor:
    """Rotary embeddings whose base grows beyond the length that was trained on."""
    length, base = query.shape[1], 10_000.0
    if length > LAST:
        base = base * ((2.0 * length / LAST) - 1) ** (8 / 6)
    turns = torch.arange(length).float()[:, None] / base ** (torch.arange(0, 8, 2).float() / 8)
    angles = torch.cat([turns, turns], -1)
    first, second = query.chunk(2, -1)
    return query * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def _divided(module: Chosen, query: Tensor) -> Tensor:
    """By nothing at the last size of the other side."""
    length = query.shape[1]
    return query * (4 / (length - LAST)) if length > LAST else query


def _looked_up(module: Chosen, query: Tensor) -> Tensor:
    """Beyond the table's end on the other side."""
    place = torch.arange(query.shape[1])
    return query + module.places(place) if query.shape[1] <= LAST else query - 1


def _clamped(module: Chosen, query: Tensor) -> Tensor:
    return query.clamp(-1, 1) if query.shape[1] > LAST else query


def _optimized(turn: Turn, dim: Any, length: int) -> tuple[nn.Module, attngraph.Optimized]:
    torch.manual_seed(0)
    module = Chosen(turn).eval()
    x = torch.randn(2, length, 8)
    return module, attngraph.optimize(module, (x,), dynamic_shapes=({1: dim},))


@pytest.mark.parametrize("length", [12, 24])
@pytest.mark.parametrize("dim", [FREE, RANGED], ids=["free", "ranged"])
@pytest.mark.parametrize("turn", [_two_forms, _ntk, _divided, _looked_up, _clamped])
def test_both_sides_are_computed(turn: Turn, dim: Any, length: int) -> None:
    module, optimized = _optimized(turn, dim, length)
    (note,) = [each for each in optimized.report.notes if "chooses by a size at" in each]
    assert "test_both_sizes.py" in note
    for size in (1, 2, 7, LAST - 1, LAST, LAST + 1, 31, 64):
        x = torch.randn(2, size, 8)
        torch.testing.assert_close(optimized(x), module(x), atol=1e-5, rtol=1e-5)


class Given(Chosen):
    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch.x)


@dataclass
class Batch:
    x: Tensor


def test_dims_may_be_given_by_name_and_by_attribute() -> None:
    torch.manual_seed(0)
    for module, of in ((Chosen(_two_forms), lambda x: x), (Given(_two_forms), Batch)):
        shapes: Any = {1: "length"} if of is not Batch else {"x": {1: "length"}}
        module.eval()
        optimized = attngraph.optimize(
            module, (of(torch.randn(2, 12, 8)),), dynamic_shapes=(shapes,)
        )
        x = torch.randn(2, 40, 8)
        torch.testing.assert_close(optimized(of(x)), module(of(x)), atol=1e-5, rtol=1e-5)


def _of_another_length(module: Chosen, query: Tensor) -> Tensor:
    return query[:, 1:] if query.shape[1] > LAST else query


def _two_products(module: Chosen, query: Tensor) -> Tensor:
    """Each side avoids what the other computes."""
    return query @ query.mT @ query if query.shape[1] <= LAST else query


def _three_forms(module: Chosen, query: Tensor) -> Tensor:
    return query if query.shape[1] <= LAST else 2 * query if query.shape[1] <= 32 else 3 * query


def _cut_table(module: Chosen, query: Tensor) -> Tensor:
    """The table has no more rows."""
    length = query.shape[1]
    return query + module.places.weight[:length] if length <= LAST else query


def _raising(module: Chosen, query: Tensor) -> Tensor:
    if query.shape[1] > LAST:
        raise ValueError("too long")
    return query


@pytest.mark.parametrize(
    "turn", [_of_another_length, _two_products, _three_forms, _cut_table, _raising]
)
def test_sides_that_are_no_one_graph_stay_apart(turn: Turn) -> None:
    module, optimized = _optimized(turn, FREE, 12)
    assert any(
        f"'length' is at most {LAST}: the model demands it at" in note
        for note in optimized.report.notes
    )
    for size in (1, 2, LAST):
        x = torch.randn(2, size, 8)
        torch.testing.assert_close(optimized(x), module(x), atol=1e-5, rtol=1e-5)
    with pytest.raises(CaptureError, match=rf"can't be 1\.\.64: .* length is at most {LAST} at"):
        _optimized(turn, RANGED, 12)
