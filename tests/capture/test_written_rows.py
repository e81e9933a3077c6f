"""Rows that `unbind` gives are views, and what is written into one is in the whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph import optimize


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
