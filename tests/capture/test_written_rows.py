"""What is written into a row is in the whole: one of `unbind`, or one whose place is a size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph import optimize

pytestmark = pytest.mark.wide


class Rows(nn.Module):
    """Scores to each of whose heads another number is added, and that are read in between."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        scores = (heads @ heads.mT).movedim(1, self.axis).clone()
        rows = scores.unbind(self.axis)
        before = rows[1] * 0.5
        for step, row in enumerate(rows):
            row.add_(before, alpha=0.5 * step)
            row[..., 0] -= step
        after = scores.movedim(self.axis, 1)
        return after.softmax(-1) @ heads + rows[0].mean()


def test_what_is_written_into_rows_takes_any_sizes() -> None:
    sizes = ({0: Dim("batch", max=64), 1: Dim("length", max=300)},)
    for axis in (0, 1, -1):
        model = Rows(axis).eval()
        optimized = optimize(model, (torch.randn(2, 9, 8),), dynamic_shapes=sizes)
        for batch, length in ((1, 1), (3, 25), (2, 2)):
            x = torch.randn(batch, length, 8)
            torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)


class Written(nn.Module):
    """Scores, written to at places that are sizes."""

    def __init__(self, write: Callable[[Tensor, int], None]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.mT
        self.write(scores, x.shape[1])
        return scores.softmax(-1) @ x


def _middle(scores: Tensor, n: int) -> None:
    scores[:, :, n // 2] = 1


def _added(scores: Tensor, n: int) -> None:
    scores[..., (n - 1) // 2, None] += scores[:, n - 1, :, None]


def _wide(scores: Tensor, n: int) -> None:
    """The value has an axis of 1 that the row lacks, and the row is counted from the end."""
    scores[:, -(n // 2) - 1, n // 3 :] = torch.full((1, 1, 1), n)


def _beside_tensors(scores: Tensor, n: int) -> None:
    batch = torch.arange(len(scores))
    scores[batch, n // 2] = scores[batch, :, n - 1] * 2
    scores[..., n // 2][scores[..., 0] > 0] = -1.0


def _first(scores: Tensor, n: int) -> None:
    scores[len(scores) - 1] = 0.5


@pytest.mark.parametrize("write", [_middle, _added, _wide, _beside_tensors, _first])
def test_a_place_that_is_a_size_stays_one(write: Callable[[Tensor, int], None]) -> None:
    """An assignment of torch makes a number of the place, and so a constant of the size."""
    model = Written(write).eval()
    dims = {0: Dim("batch"), 1: Dim("length")}
    optimized = optimize(model, (torch.randn(2, 9, 4),), dynamic_shapes=(dims,))
    for batch, length in ((1, 1), (3, 2), (2, 5), (1, 14)):
        x = torch.randn(batch, length, 4)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)
