"""The largest size that was asked for, where the code asks whether a table is longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError, UsageError

AXES = ({0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=16)},)


class Projected(nn.Module):
    """(B, N, 8) to (B, 8, 4): Linformer's projection of at most 16 keys."""

    def __init__(self, cut: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 4))
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        return x.mT @ self.cut(self.table, x)


def _shorter(table: Tensor, x: Tensor) -> Tensor:
    length = x.shape[1]
    assert length <= 16
    if length < 16:
        table = table[:length]
    return table


def _whole(table: Tensor, x: Tensor) -> Tensor:
    return table if x.shape[1] == len(table) else table[: x.shape[1]]


def _scaled(table: Tensor, x: Tensor) -> Tensor:
    return 2 * table[: x.shape[1]] if x.shape[1] < 16 else table


def _larger(table: Tensor, x: Tensor) -> Tensor:
    """The other side only where numbers are large."""
    if x.shape[1] == 16:
        return table + (x.amax() > 20).to(table.dtype)
    return table[: x.shape[1]]


@pytest.mark.parametrize("cut", [_shorter, _whole])
def test_a_table_that_is_cut_if_it_is_longer_is_taken_whole_too(
    cut: Callable[[Tensor, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    module = Projected(cut).eval()
    optimized = attngraph.optimize(module, (torch.randn(2, 9, 8),), dynamic_shapes=AXES)
    for length in (1, 9, 15, 16):
        x = torch.randn(3, length, 8)
        torch.testing.assert_close(optimized(x), module(x))


@pytest.mark.parametrize("cut", [_scaled, _larger])
def test_one_that_is_another_at_its_full_length_is_refused(
    cut: Callable[[Tensor, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    said = r"can't be 1\.\.16: the model demands length (is at most 15|≠ 16) at .*test_largest"
    with pytest.raises(CaptureError, match=said):
        attngraph.optimize(Projected(cut).eval(), (torch.randn(2, 9, 8),), dynamic_shapes=AXES)


class Masked(nn.Module):
    """nanoGPT's table, of as many rows as a text may have."""

    keep: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("keep", torch.ones(rows, rows).tril()[None])

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.mT
        keep = self.keep[:, : scores.shape[-2], : scores.shape[-1]]
        return scores.masked_fill(keep == 0, -torch.inf).softmax(-1) @ x


@pytest.mark.parametrize("rows", [20, 200])
def test_no_text_is_longer_than_a_table_of_a_mask(rows: int) -> None:
    """Fused, the file would make a mask of any length, where the model fails."""
    module, shapes = Masked(rows), ({0: Dim("batch"), 1: Dim("length")},)
    optimized = attngraph.optimize(module, (torch.randn(2, 7, 4),), dynamic_shapes=shapes)
    assert optimized.ranges.dims["length"] == (1, rows)
    (note,) = [note for note in optimized.report.notes if str(rows) in note]
    assert note == f"Sizes have length ≤ {rows}: the model itself fails at larger ones."
    longest = torch.randn(1, rows, 4)
    torch.testing.assert_close(optimized(longest), module(longest))
    with pytest.raises(UsageError, match=f"at most {rows}"):
        optimized(torch.randn(1, rows + 1, 4))


class Long(nn.Module):
    """Other code from 33 tokens on, which is beyond eight times the sample."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(1) if x.shape[1] <= 32 else x.tanh()


def test_what_follows_the_largest_size_of_a_trace_is_tried() -> None:
    shapes = ({1: Dim("length")},)
    optimized = attngraph.optimize(Long(), (torch.randn(2, 3, 4),), dynamic_shapes=shapes)
    for length in (1, 32, 33, 90):
        x = torch.randn(2, length, 4)
        if optimized.ranges.broken({"length": length}):
            assert length > 32
            continue
        torch.testing.assert_close(optimized(x), Long()(x))
