"""A causal window within lengths: rows whose window lies behind the length see nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph


class Windowed(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        apart = place[:, None] - place
        keep = (place < lengths[:, None])[:, None] & (apart >= 0) & (apart < 3)
        return (x @ x.mT / 2).masked_fill(~keep, -math.inf).softmax(-1) @ x


@pytest.mark.parametrize("sample", [[8, 8], [8, 5], [8, 2]])
@pytest.mark.parametrize("exact", [False, True])
def test_a_window_behind_the_length_is_nan_as_in_eager(sample: list[int], exact: bool) -> None:
    module, batch, length = Windowed(), Dim("batch"), Dim("length", max=512)
    shapes = ({0: batch, 1: length}, {0: batch})
    inputs = torch.randn(2, 8, 6), torch.tensor(sample)
    found = attngraph.optimize(module, inputs, dynamic_shapes=shapes, exact=exact)
    for lengths in ([8, 5, 8], [1, 2, 3], [0, 8, 7]):
        x, n = torch.randn(3, 8, 6), torch.tensor(lengths)
        expected = module(x, n)
        assert bool(expected.isnan().any()) == (min(lengths) < 6)
        torch.testing.assert_close(found(x, n), expected, equal_nan=True)
