"""Inputs of one Dim that are joined and cut again: two images, or a prompt and an empty one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph import optimize
from attngraph.errors import UsageError

Cut = Callable[[Tensor, int], tuple[Tensor, ...]]


class Pair(nn.Module):
    """Each of two batches attends to the other one."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat((x, y))
        turned = torch.cat(self.cut(both, x.shape[0])[::-1])
        found = (both @ turned.mT).softmax(-1) @ turned
        first, second = self.cut(found, x.shape[0])
        return first - 2 * second


CUTS: list[Cut] = [
    lambda both, _: both.chunk(chunks=2, dim=0),
    lambda both, batch: both.split(batch),
    lambda both, batch: both.view(2, batch, -1, 4).unbind(0),
]


@pytest.mark.parametrize("cut", CUTS)
def test_joined_batches_are_cut_at_any_size(cut: Cut) -> None:
    torch.manual_seed(0)  # what is subtracted may cancel to a few digits
    model = Pair(cut).eval()
    dims = {0: Dim("batch"), 1: Dim("length")}
    samples = torch.randn(2, 9, 4), torch.randn(2, 9, 4)
    optimized = optimize(model, samples, dynamic_shapes=(dims, dims))
    for batch, length in ((1, 1), (3, 5), (4, 2)):
        x, y = torch.randn(2, batch, length, 4)
        torch.testing.assert_close(optimized(x, y), model(x, y), atol=1e-5, rtol=1e-5)


def test_batches_of_two_dims_are_not_taken_for_equal() -> None:
    """Half of 2 and 4 joined rows are 3."""
    model = Pair(CUTS[0]).eval()
    samples = torch.randn(2, 9, 4), torch.randn(2, 9, 4)
    optimized = optimize(model, samples, dynamic_shapes=({0: Dim("b")}, {0: Dim("c")}))
    x, y = torch.randn(2, 9, 4), torch.randn(4, 9, 4)
    torch.testing.assert_close(optimized(x, y), model(x, y), atol=1e-5, rtol=1e-5)


class Cross(nn.Module):
    """nn.MultiheadAttention views its keys by the batch of its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        found: Tensor = self.attention(x, memory, memory)[0]
        return found


def test_a_size_that_an_equality_makes_a_number_is_one() -> None:
    """Of batches that are equal torch keeps (8 * k) // q for a head's size."""
    model = Cross().eval()
    dims = ({0: Dim.AUTO}, {0: Dim.AUTO, 1: Dim.AUTO})
    compiled = optimize(model, (torch.randn(2, 5, 16), torch.randn(2, 7, 16)), dynamic_shapes=dims)
    for batch, length in ((1, 3), (4, 20)):
        given = torch.randn(batch, 5, 16), torch.randn(batch, length, 16)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*given), model(*given))
    with pytest.raises(UsageError, match="2"):
        compiled(torch.randn(2, 5, 16), torch.randn(3, 7, 16))
