"""The largest size that was asked for, where the code asks whether a table is longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError

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
