"""Loops over time that keep the last inputs of a convolution, as a step of Mamba is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import attngraph
from attngraph.errors import CaptureError

pytestmark = pytest.mark.wide
CHANNELS, REACH = 6, 4


class Rolled(nn.Module):
    """What is kept is rolled, and its last place is written over."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(CHANNELS, REACH))
        self.bias = nn.Parameter(torch.randn(CHANNELS))

    def step(self, kept: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.roll(kept, -1, -1)
        kept[..., -1] = x
        return kept, self.sum(kept)

    def sum(self, kept: Tensor) -> Tensor:
        return F.silu((kept * self.weight).sum(-1) + self.bias)

    def forward(self, x: Tensor) -> Tensor:
        kept, given = x.new_zeros(x.shape[0], CHANNELS, REACH), []
        for t in range(x.shape[1]):
            kept, y = self.step(kept, x[:, t])
            given.append(y)
        return torch.stack(given, 1)


class Inline(Rolled):
    """The same in the loop's own body, and by a sum that is written there."""

    def forward(self, x: Tensor) -> Tensor:
        kept, given = x.new_zeros(x.shape[0], CHANNELS, REACH), []
        for t in range(x.shape[1]):
            kept = torch.roll(kept, shifts=-1, dims=-1)
            kept[:, :, -1] = x[:, t]
            given.append(self.sum(kept))
        return torch.stack(given, 1)


class Joined(Rolled):
    """What is kept and the input are joined."""

    def step(self, kept: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.cat([kept[..., 1:], x[..., None]], -1)
        return kept, self.sum(kept)


class Late(Joined):
    """Reads what was kept before this step's input is."""

    def step(self, kept: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().step(kept, x)[0], self.sum(kept)


class ByTwo(Rolled):
    """Moves by two places."""

    def step(self, kept: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.roll(kept, -2, -1)
        kept[..., -1] = x
        return kept, self.sum(kept)


class Behind(Inline):
    """Reads a view of what was kept once it is written over."""

    def forward(self, x: Tensor) -> Tensor:
        kept, given = x.new_zeros(x.shape[0], CHANNELS, REACH), []
        for t in range(x.shape[1]):
            kept = torch.roll(kept, -1, -1)
            last = kept[..., -1]
            kept[..., -1] = x[:, t]
            given.append(self.sum(kept) + 2 * last)
        return torch.stack(given, 1)


class OfCarried(Inline):
    """Writes into what the step before has left, by another name."""

    def forward(self, x: Tensor) -> Tensor:
        kept, given = x.new_zeros(x.shape[0], CHANNELS, REACH), []
        for t in range(x.shape[1]):
            same = kept
            same[..., 0] = x[:, t]
            given.append(self.sum(kept))
            kept = torch.roll(same, 1, -1)
        return torch.stack(given, 1)


def _compiled(kind: type[Rolled]) -> tuple[attngraph.Optimized, set[str]]:
    module = kind().eval()
    shapes = ({0: Dim("batch", max=8), 1: Dim("seq", max=128)},)
    made = attngraph.optimize(module, (torch.randn(2, 7, CHANNELS),), dynamic_shapes=shapes)
    for batch, length in ((1, 1), (2, REACH - 1), (3, REACH), (1, 40)):
        x = torch.randn(batch, length, CHANNELS)
        torch.testing.assert_close(made(x), module(x), rtol=1e-5, atol=1e-5)
    return made, {node.op_type for node in made.model.graph.all_nodes()}


@pytest.mark.parametrize("kind", [Rolled, Inline, Joined])
def test_it_is_a_convolution_over_all_steps(kind: type[Rolled]) -> None:
    made, ops = _compiled(kind)
    assert "Scan" not in ops
    assert "stays a loop" not in str(made.report)


@pytest.mark.parametrize("kind", [Late, ByTwo, Behind])
def test_another_state_stays_in_the_loop(kind: type[Rolled]) -> None:
    made, ops = _compiled(kind)
    assert "Scan" in ops
    assert "stays a loop" in str(made.report)


def test_what_a_step_is_given_is_not_written_over() -> None:
    """In eager that shows in all that shares its memory, which no scan has."""
    with pytest.raises(CaptureError, match="fixes it to 7"):
        _compiled(OfCarried)
