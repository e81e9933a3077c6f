"""The range of a dim: what the model demands of it, what it excludes, and what is told of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.capture import capture
from attngraph.ir import DimInfo
from attngraph.options import Verify
from tests.capture.formula import BATCH, BOTH, Formula, X, check, states


def test_a_range_that_the_model_demands_is_applied_and_noted() -> None:
    result = check(
        lambda self, x, y: x + torch.zeros(64)[: x.shape[1]],
        X,
        dims=(BOTH,),
        further=(states(5, 64),),
    )
    assert result.graph.dims["seq"] == DimInfo(1, 64, 9)
    assert result.notes == ("Dim 'seq' is at most 64: the model demands it.",)


def test_a_range_is_applied_beside_a_dim_that_torch_may_choose() -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + torch.zeros(64)[: x.shape[1]] + y.sum()

    shapes = ({1: Dim("seq")}, {0: Dim.AUTO})
    result = capture(Cut(), (states(3, 5), states(7)), dynamic_shapes=shapes)
    assert result.graph.dims["seq"].high == 64


def test_a_comparison_that_the_range_does_not_settle_narrows_it() -> None:
    def forward(self: Formula, x: Tensor, y: Any) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=x.shape[1] > 6)

    result = check(forward, states(3, 5, 4), dims=(BOTH,))
    assert result.graph.dims["seq"].high == 6
    (note,) = result.notes
    assert note.startswith("Dim 'seq' is at most 6: the model demands it at ")
    assert "is_causal=x.shape[1] > 6" in note


def test_a_dim_may_be_as_long_as_the_tables_it_cuts() -> None:
    def forward(self: Formula, x: Tensor, y: Any) -> Tensor:
        length = x.shape[1]
        table, square = torch.ones(32, 4), torch.ones(32, 32)
        x = x + table.cumsum(0)[:length].reshape(length, 2, 2).flatten(1)
        scores = (x @ x.mT).masked_fill(square.tril()[:length, :length] == 0, -9.0)
        return scores.softmax(-1) @ x

    dims = ({0: BATCH, 1: Dim("seq", max=32)},)
    result = check(forward, states(3, 5, 4), dims=dims, further=(states(2, 32, 4),))
    assert result.graph.dims["seq"].high == 32


class Kept(nn.Module):
    """A cache that the model writes its rows into, and reads as many of."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4, rows, 16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        self.kept[:batch, :length] = x
        keys = self.kept[:batch, :length]
        return (x @ keys.mT).softmax(-1) @ keys


@pytest.mark.parametrize("rows", [40, 200])
def test_a_dim_may_be_as_long_as_a_cache_that_is_written(rows: int) -> None:
    """torch asks whether the whole of it is taken, which is no demand of the model."""
    dims = ({0: Dim("batch", max=4), 1: Dim("seq", max=rows)},)
    optimized = attngraph.optimize(Kept(rows), (torch.randn(2, 7, 16),), dynamic_shapes=dims)
    assert optimized.report.dims["seq"] == (1, rows)
    for batch, length in ((4, rows), (2, rows - 1), (1, 1)):
        x = torch.randn(batch, length, 16)
        torch.testing.assert_close(optimized(x), Kept(rows)(x))


class OtherAtTheEnd(nn.Module):
    """(B, N, 4) to the same, of which 32 rows are doubled and fewer are one more."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(32, 4)[: x.shape[1]] if x.shape[1] != 32 else x * 2


def test_a_largest_size_that_the_model_itself_excludes_is_refused() -> None:
    """A trace leaves it out, and the check finds that the model does something else there."""
    module, x = OtherAtTheEnd(), torch.randn(3, 5, 4)
    with pytest.raises(CaptureError, match=r"can't be 1\.\.32: .* seq is at most 31 at"):
        attngraph.optimize(module, (x,), dynamic_shapes=({0: BATCH, 1: Dim("seq", max=32)},))
    dims = ({0: BATCH, 1: Dim("seq", max=31)},)
    assert attngraph.optimize(module, (x,), dynamic_shapes=dims).report.dims["seq"] == (1, 31)


class OtherAt(nn.Module):
    """(B, N, 4) to the same, of which 20 rows are doubled and others are one more."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.shape[1] != 20 else x * 2


@pytest.mark.parametrize("verify", ["final", "off"])
def test_another_size_that_the_model_excludes_is_refused(verify: Any) -> None:
    dims = ({0: BATCH, 1: Dim("seq", max=32)},)
    with pytest.raises(CaptureError, match=r"seq.* can't be 1\.\.32: .* seq ≠ 20 at"):
        attngraph.optimize(OtherAt(), (torch.randn(3, 5, 4),), dynamic_shapes=dims, verify=verify)


def test_a_table_may_be_cut_from_its_start() -> None:
    def forward(self: Formula, x: Tensor, y: Any) -> Tensor:
        if x.shape[1] > 32:
            raise ValueError
        return x @ torch.ones(32, 4)[32 - x.shape[1] :].transpose(0, 1)

    result = check(
        forward, states(3, 5, 4), dims=({0: BATCH, 1: Dim("seq")},), further=(states(2, 32, 4),)
    )
    assert result.graph.dims["seq"].high == 32


def test_a_size_of_which_a_stride_leaves_one_is_taken_where_the_model_is_right() -> None:
    """A trace takes a size for 2 or more; which conditions come of it is torch's affair."""

    class Signal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv1d(1, 4, 10, 5), nn.Conv1d(4, 4, 3, 2)

        def forward(self, signal: Tensor) -> Tensor:
            x = self.second(self.first(signal[:, None])).transpose(1, 2)
            x = x.unflatten(-1, (2, -1)).transpose(1, 2)
            return torch.matmul(torch.matmul(x, x.mT).softmax(-1), x)

    signal, model = torch.randn(2, 200), Signal()
    for samples in (Dim("samples"), Dim("samples", min=20)):
        dims = ({0: Dim("batch"), 1: samples},)
        optimized = attngraph.optimize(model, (signal,), dynamic_shapes=dims)
        for other in (signal, torch.randn(1, 20), torch.randn(1, 30), torch.randn(3, 47)):
            torch.testing.assert_close(optimized(other), model(other))
    dims = ({0: Dim("batch"), 1: Dim("samples")},)
    unchecked = attngraph.optimize(model, (signal,), dynamic_shapes=dims, verify="off")
    assert unchecked.graph.dims["samples"].low == 30


class TwoPaths(nn.Module):
    """What it computes of one row of x is not what its code for several would."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < 2:
            return x * 3
        return x.softmax(1).cumsum(1)


@pytest.mark.parametrize("verify", ["off", "final"])
def test_a_range_that_was_asked_for_from_2_on_is_given(verify: Verify) -> None:
    """torch.export's own advice for a model that it can't trace at a size of 1."""
    x, model = torch.randn(2, 5, 4), TwoPaths()

    def compiled(least: int) -> attngraph.Optimized:
        dims = ({1: Dim("seq", min=least, max=64)},)
        return attngraph.optimize(model, (x,), dynamic_shapes=dims, verify=verify)

    optimized = compiled(2)
    for length in (2, 3, 64):
        other = torch.randn(2, length, 4)
        torch.testing.assert_close(optimized(other), model(other))
    with pytest.raises(UsageError, match="seq"):
        optimized(torch.randn(2, 1, 4))
    with pytest.raises(
        CaptureError, match=r"can't be 1\.\.64: the model demands seq is at least 2"
    ):
        compiled(1)
