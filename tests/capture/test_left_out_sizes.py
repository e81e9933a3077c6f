"""A size amid others at which the code does something else: a table that needs no stretching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError, UsageError

LENGTH = Dim("length")
TABLE = 7


class Relative(nn.Module):
    """(B, N, 8): scores with a table of 2·7 − 1 relative positions, stretched to others (SAM)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * TABLE - 1, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        table, most = self.table, int(2 * length - 1)
        if table.shape[0] != most:
            rows = table.reshape(1, table.shape[0], -1).permute(0, 2, 1)
            table = F.interpolate(rows, size=most, mode="linear")
            table = table.reshape(-1, most).permute(1, 0)
        place = torch.arange(length)
        rows = table[place[:, None] - place + length - 1]
        return (x @ x.mT / 4 + torch.einsum("bqd,qkd->bqk", x, rows)).softmax(-1) @ x


class Elsewhere(nn.Module):
    """(B, N, 8): another formula at one size."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        if 2 * x.shape[1] - 1 != 2 * TABLE - 1:
            x = self.change(x)
        return (x @ x.mT / 4).softmax(-1) @ x


def _optimized(module: nn.Module, dim: Any, length: int = 12) -> attngraph.Optimized:
    torch.manual_seed(0)
    return attngraph.optimize(
        module.eval(), (torch.randn(2, length, 8),), dynamic_shapes=({1: dim},)
    )


@pytest.mark.parametrize("dim", [LENGTH, Dim("length", min=1, max=64)])
@pytest.mark.parametrize(
    "length", [4, *(pytest.param(size, marks=pytest.mark.wide) for size in (12, TABLE))]
)
def test_what_is_the_same_at_the_size_that_is_left_out_takes_it(dim: Any, length: int) -> None:
    module = Relative()
    optimized = _optimized(module, dim, length)
    (note,) = [each for each in optimized.report.notes if f"length ≠ {TABLE}" in each]
    assert "are equal" in note
    for size in (1, 2, 6, 7, 8, 13, 30):
        x = torch.randn(2, size, 8)
        torch.testing.assert_close(optimized(x), module(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("change", [lambda x: 2 * x, lambda x: x.clamp(-50, 50)])
def test_what_is_another_there_leaves_that_size_alone_out(
    change: Callable[[Tensor], Tensor],
) -> None:
    module = Elsewhere(change)
    optimized = _optimized(module, LENGTH)
    assert any("'length' can't be 7: the model demands it at" in n for n in optimized.report.notes)
    for size in (1, 6, 8, 20):
        x = 40 * torch.randn(2, size, 8)
        torch.testing.assert_close(optimized(x), module(x))
    with pytest.raises(UsageError, match="length ≠ 7"):
        optimized(torch.randn(2, TABLE, 8))


@pytest.mark.parametrize("dim", [Dim("length", min=1, max=64), Dim("length", min=3)])
def test_a_range_that_was_asked_for_by_number_has_the_size(dim: Any) -> None:
    with pytest.raises(CaptureError, match=r"the model demands length ≠ 7 at .*test_left_out"):
        _optimized(Elsewhere(lambda x: 2 * x), dim)
    _optimized(Elsewhere(lambda x: 2 * x), Dim("length", min=8, max=64))
