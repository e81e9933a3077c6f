"""Gathers, scatters and diagonals: of single numbers, of bools, and where infinities lie beside."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

import attngraph
from tests.export.lowered import agrees, module

pytestmark = pytest.mark.wide

ROW = torch.tensor([0])
NUMBER = torch.tensor(2.5)

OF_A_NUMBER: dict[str, Callable[..., Any]] = {
    "gather": lambda x, k: x.gather(0, k),
    "gather-number": lambda x, k: x.gather(-1, k[0]),
    "index-select": lambda x, k: x.index_select(0, k),
    "index-fill": lambda x, k: x.index_fill(0, k, 3.0),
    "index-copy": lambda x, k: x.index_copy(0, k, x * 2),
    "index-add": lambda x, k: x.index_add(0, k, x, alpha=2),
    "index-reduce": lambda x, k: x.index_reduce(0, k, x * 3, "mean"),
    "scatter": lambda x, k: (x * 1).scatter(0, k[0], x * 2),
    "scatter-value": lambda x, k: (x * 1).scatter(0, k[0], 7.0),
    "scatter-add": lambda x, k: x.scatter_add(0, k[0], x),
    "scatter-reduce": lambda x, k: x.scatter_reduce(0, k[0], x * 3, "amax", include_self=False),
}


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument")
@pytest.mark.parametrize("name", OF_A_NUMBER)
def test_a_number_is_indexed_as_a_row_of_one(name: str) -> None:
    agrees(OF_A_NUMBER[name], (NUMBER, ROW), (NUMBER - 9, ROW))


def test_a_number_that_is_indexed_compiles() -> None:
    model = module(lambda x, k: x.index_select(0, k), 2)
    assert float(attngraph.optimize(model, (NUMBER, ROW))(NUMBER, ROW)) == 2.5


def _masked(rows: int, columns: int) -> Tensor:
    """A square of numbers, infinite off its diagonal."""
    x = torch.arange(float(rows * columns)).reshape(rows, columns)
    return torch.where(torch.eye(rows, columns) > 0, x, -math.inf)


DIAGONALS: dict[str, Callable[[Tensor], Any]] = {
    "diagonal": lambda x: x.diagonal(),
    "diagonals": lambda x: (x.diagonal(1), x.diagonal(-2)),
    "of-axes": lambda x: x.unsqueeze(1).diagonal(0, 0, 2),
    "of-axes-swapped": lambda x: x.unsqueeze(1).diagonal(1, 2, 0),
    "diag": lambda x: torch.diag(x),
    "trace": lambda x: torch.trace(x),
    "copy": lambda x: torch.diagonal_copy(x),
    "einsum": lambda x: torch.einsum("ii->i", x[:, : x.shape[0]]),
}


@pytest.mark.parametrize("name", DIAGONALS)
def test_nothing_beside_a_diagonal_is_read(name: str) -> None:
    agrees(DIAGONALS[name], (_masked(4, 5),))


@pytest.mark.parametrize("name", ["diagonal", "diagonals", "of-axes", "trace"])
def test_diagonals_of_sizes_that_only_a_run_tells(name: str) -> None:
    sizes = ({0: Dim("rows", min=4, max=40), 1: Dim("columns", min=4, max=40)},)
    runs = [(_masked(*size),) for size in ((4, 5), (9, 4), (4, 9), (40, 40))]
    agrees(DIAGONALS[name], *runs, shapes=sizes)


PLACES = torch.tensor([[0, 2, 2], [2, 2, 0]])
FAR = torch.tensor([[math.inf, -math.inf, 1.0], [-math.inf, math.inf, 2.0]])
BASE = torch.tensor([[math.inf, 1.0, -math.inf], [0.5, -math.inf, 3.0], [math.inf, 2.0, 0.25]])


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", ["sum", "prod", "mean", "amin", "amax"])
def test_scatters_of_infinities_and_of_large_integers(kind: str, own: bool) -> None:
    def scattered(x: Tensor, source: Tensor) -> Tensor:
        return x.scatter_reduce(0, PLACES, source, kind, include_self=own)

    agrees(scattered, (BASE, FAR), (-BASE, FAR.flip(0)))
    large = torch.tensor([[-(1 << 40), 7, 1 << 33], [5, -3, -(1 << 62)]])
    agrees(scattered, (torch.full((3, 3), 1 << 32), large), (torch.full((3, 3), -9), -large))


@pytest.mark.filterwarnings("ignore:The reduce argument")
@pytest.mark.parametrize("kind", ["amin", "amax"])
def test_scatters_of_bools(kind: str) -> None:
    def scattered(x: Tensor, source: Tensor) -> Any:
        found = [
            x.scatter_reduce(0, PLACES, source, kind, include_self=own) for own in (False, True)
        ]
        return *found, x.index_add(0, torch.tensor([2, 2]), source)

    x, source = torch.eye(3) > 0, torch.tensor([[True, False, True], [False, False, True]])
    agrees(scattered, (x, source), (~x, ~source))


def test_places_are_taken_from_all_elements() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    agrees(lambda x, k: x.take(k), (x, torch.tensor([[3, -1], [5, 0]])))
    agrees(lambda x, k: x.take(k), (NUMBER, torch.tensor([0, -1])))


@pytest.mark.parametrize("size", [0, 3, 30])
def test_as_many_places_as_are_asked_for(size: int) -> None:
    def places(x: Tensor) -> Any:
        return torch.nonzero_static(x, size=size), torch.nonzero_static(x > 2, size=2, fill_value=9)

    runs = [(torch.arange(n * 4.0).reshape(n, 4).remainder(3),) for n in (2, 1, 7)]
    agrees(places, *runs, shapes=({0: Dim("rows", max=9)},))


def test_a_padding_row_may_be_infinite() -> None:
    table = torch.arange(12.0).reshape(4, 3)
    table[1] = math.inf
    bags, weights = torch.tensor([[0, 1], [1, 1], [2, 3]]), torch.ones(3, 2)
    for mode in ("sum", "mean", "max"):
        agrees(lambda k, w, m=mode: F.embedding_bag(k, w, mode=m, padding_idx=1), (bags, table))
    agrees(
        lambda k, w, s: F.embedding_bag(k, w, mode="sum", padding_idx=1, per_sample_weights=s),
        (bags, table, weights),
    )
