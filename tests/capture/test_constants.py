"""What Python reads of literal tensors and of integer buffers is known to the trace."""

from __future__ import annotations

from collections.abc import Callable

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


class Windows(nn.Module):
    """The ends of windows of at most 4 rows, which Python lists from lengths in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lengths", torch.tensor([6, 4, 3]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.where(self.lengths == 0, 4, self.lengths)
        ends = [0]
        for length in lengths:
            ends += [4] * (length // 4)
            if length % 4 != 0:
                ends += [length % 4]
        edges = torch.tensor(ends).cumsum(0)
        return torch.cat([part.softmax(0) for part in x.split(edges.diff().tolist())])


def test_a_list_of_numbers_and_of_known_tensors_is_known() -> None:
    model, x = Windows().eval(), states(13, 4)
    graph = capture(model, (x,)).graph
    assert torch.equal(interpret(graph, (x,))[0], model(x))


LISTS: dict[str, Callable[[Tensor], Tensor]] = {
    "of sums": lambda x: torch.tensor([x.sum(), x[0, 0]]),
    "with numbers": lambda x: torch.tensor([[1, x.argmax()], [x.argmin(), 2]]),
    "with floats": lambda x: torch.tensor([0.5, x.argmax(), True]),
    "of doubles": lambda x: torch.tensor((x.double().sum(), 1)),
    "of a dtype": lambda x: torch.tensor([x.sum(), 1], dtype=torch.float64),
    "like another": lambda x: x.new_tensor([x.argmax(), 3]),
}


@pytest.mark.parametrize("made", LISTS.values(), ids=LISTS)
def test_a_tensor_of_tensors_has_their_values_and_common_dtype(
    made: Callable[[Tensor], Tensor],
) -> None:
    class Listed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return made(x)

    graph = capture(Listed(), (states(3, 4),)).graph
    x = states(3, 4) * torch.tensor([-1.0, 3.0, 0.5, 2.0])
    (found,) = interpret(graph, (x,))
    torch.testing.assert_close(found, made(x), rtol=0, atol=0)
