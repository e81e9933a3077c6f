"""What Python reads of literal tensors and of integer buffers is known to the trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attngraph.errors import CaptureError
from attngraph.frontend.capture import capture
from attngraph.ir import interpret
from tests.capture.formula import states

GRID = torch.tensor([[1, 2, 3], [2, 1, 2]])  # frames, height, width of each image


class Packed(nn.Module):
    """Softmax over the patches of each frame, whose number follows from a grid (I, 3)."""

    def __init__(self, grid: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("grid", grid, persistent=False)

    def read(self) -> Tensor:
        return torch.tensor([[1, 2, 3], [2, 1, 2]]) if self.grid is None else self.grid

    def forward(self, x: Tensor) -> Tensor:
        frames, height, width = self.read().unbind(-1)
        ends = (height * width).repeat_interleave(frames).cumsum(0)
        lengths = ends.diff(prepend=torch.zeros(1, dtype=torch.long))
        return torch.cat([part.softmax(0) for part in x.split(lengths.tolist())])


class Counting(Packed):
    def read(self) -> Tensor:
        return self.grid.add_(torch.tensor([[0, 0, 0], [-1, 0, 2]]))


@pytest.mark.parametrize("grid", [None, GRID], ids=["literal", "buffer"])
def test_sizes_computed_of_constants_are_numbers(grid: Tensor | None) -> None:
    model, x = Packed(grid).eval(), states(10, 4)
    graph = capture(model, (x,)).graph
    assert torch.equal(interpret(graph, (x,))[0], model(x))


def test_a_buffer_that_the_model_writes_is_what_it_is_then() -> None:
    x = states(10, 4)
    expected = Counting(GRID.clone()).eval()(x)
    graph = capture(Counting(GRID.clone()).eval(), (x,)).graph
    assert torch.equal(interpret(graph, (x,))[0], expected)


def test_memory_that_nothing_was_written_to_is_no_constant() -> None:
    class Unset(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sizes = torch.empty_like(torch.tensor([3, 2]))
            return x if sizes[0] > 2 else -x

    with pytest.raises(CaptureError, match="data-dependent"):
        capture(Unset(), (states(4),))
