"""Loops of Python over the blocks of an axis, `range(0, n, 64)`, and masks made block by block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph import optimize
from attngraph.errors import CaptureError, UsageError

pytestmark = pytest.mark.wide

DIMS = {0: Dim("batch"), 1: Dim("length")}
UP_TO = {0: Dim("batch"), 1: Dim("length", max=64)}


class Blocks(nn.Module):
    """An attention whose queries are computed block by block, to save memory."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), step

    def forward(self, x: Tensor) -> Tensor:
        key, found = self.linear(x), torch.zeros_like(x)
        for start in range(0, x.shape[1], self.step):
            end = start + self.step
            found[:, start:end] = (x[:, start:end] @ key.mT).softmax(-1) @ x
        return found


class Parts(Blocks):
    """The same, as the refusal advises."""

    def forward(self, x: Tensor) -> Tensor:
        key = self.linear(x)
        parts = [(part @ key.mT).softmax(-1) @ x for part in x.split(self.step, 1)]
        return torch.cat(parts, 1)


def _fits(model: nn.Module, *lengths: int, sample: int = 9) -> None:
    model = model.eval()
    optimized = optimize(model, (torch.randn(2, sample, 4),), dynamic_shapes=(DIMS,))
    for length in lengths:
        x = torch.randn(3, length, 4)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)


def test_an_axis_of_one_block_takes_every_length_that_one_block_has() -> None:
    _fits(Blocks(64), 1, 2, 30, 63)


def test_a_sample_of_more_blocks_takes_any_number_of_them() -> None:
    _fits(Blocks(4), 1, 4, 5, 9, 64)
    _fits(Blocks(64), 1, 2, 64, 65, 200, sample=100)


class Growing(Blocks):
    """Each block reads the sum of all that are found: of another length in each step."""

    def forward(self, x: Tensor) -> Tensor:
        found = x[:, :1]
        for start in range(0, x.shape[1], self.step):
            found = torch.cat([found, x[:, start : start + self.step] + found.mean(1, True)], 1)
        return found


def test_blocks_that_no_scan_takes_are_refused_with_a_rewrite_that_compiles() -> None:
    with pytest.raises(CaptureError) as told:
        optimize(Growing(4).eval(), (torch.randn(2, 9, 4),), dynamic_shapes=(UP_TO,))
    assert "range(0, x.shape[1], self.step)" in str(told.value)
    assert "x.split(step, dim)" in str(told.value)
    _fits(Parts(4), 1, 4, 13)


def test_without_ends_they_take_as_many_blocks_as_the_sample_has() -> None:
    model = Growing(4).eval()
    optimized = optimize(model, (torch.randn(2, 9, 4),), dynamic_shapes=(DIMS,))
    told = [note for note in optimized.report.notes if "self.step):" in note]
    assert "at most 12" in told[0]
    assert "length ≥ 9" in told[1]
    for length in (9, 12):
        x = torch.randn(3, length, 4)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)
    for length in (8, 13):
        with pytest.raises(UsageError, match=str(length)):
            optimized(torch.randn(3, length, 4))


def test_the_axis_that_a_line_fixes_is_named_and_not_one_that_shares_its_dim() -> None:
    class Both(Growing):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(other)[:, 1:] + x

    samples = torch.randn(2, 9, 4), torch.randn(2, 9, 4)
    with pytest.raises(CaptureError, match=r"Input other's axis 1 .*test_blocks_of_python\.py"):
        optimize(Both(4).eval(), samples, dynamic_shapes=(UP_TO, UP_TO))
    auto = {1: Dim.AUTO}
    notes = optimize(Both(4).eval(), samples, dynamic_shapes=(auto, auto)).report.notes
    (told,) = (note for note in notes if "self.step):" in note)
    assert "other_1 > 8" in told


class Streaming(nn.Module):
    """A query sees the keys of its own chunk, and of some before it."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def forward(self, x: Tensor) -> Tensor:
        size = x.size(1)
        mask = torch.zeros(size, size, dtype=torch.bool)
        for i in range(size):
            if self.left < 0:
                start = 0
            else:
                first = i // 4 - self.left
                start = max(first * 4, 0)
            mask[i, start : min((i // 4 + 1) * 4, size)] = True
        return (x @ x.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ x


@pytest.mark.parametrize("left", [-1, 1])
def test_a_mask_of_static_chunks_takes_every_length(left: int) -> None:
    _fits(Streaming(left), 1, 4, 5, 21)
