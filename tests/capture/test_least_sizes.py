"""A least size that torch takes for granted is one only if the model needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph import optimize
from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.capture import capture
from attngraph.ir import interpret

pytestmark = pytest.mark.wide

Write = Callable[[Tensor], None]


class Written(nn.Module):
    """Attention with scores that are partly written over."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.mT / x.shape[-1]
        self.write(scores)
        return scores.softmax(-1) @ x


def _past_the_first(scores: Tensor) -> None:
    scores[..., 1:, 1:] += torch.full((1, 1), 2.0)


def _every_other(scores: Tensor) -> None:
    scores[:, ::2, 1::3] -= 1.0


def _before_the_last(scores: Tensor) -> None:
    scores[:, :, -3:-1] += 5.0


def _the_last(scores: Tensor) -> None:
    scores[:, -2:] = 0.0


@pytest.mark.parametrize("dim", [Dim("length", min=1, max=300), Dim("length")])
@pytest.mark.parametrize("write", [_past_the_first, _every_other, _before_the_last, _the_last])
def test_what_broadcasts_to_a_part_takes_any_length(write: Write, dim: Any) -> None:
    """torch asks whether the part is longer than 1, and has the length begin at 3 or at 5."""
    model = Written(write).eval()
    optimized = optimize(model, (torch.randn(2, 9, 4),), dynamic_shapes=({1: dim},))
    for length in (1, 2, 3, 4, 5, 30):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)


class Sinks(nn.Module):
    """The first tokens have vectors of their own added, as many as there are vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        keys = x[:, :4] + self.own
        return (x @ keys.mT).softmax(-1) @ keys


class Counted(nn.Module):
    """The code does something else where there are fewer than 4 tokens."""

    def forward(self, x: Tensor) -> Tensor:
        keys = x[:, :4]
        return (x @ keys.mT).softmax(-1) @ keys if keys.shape[1] == 4 else x


@pytest.mark.parametrize("model", [Sinks(), Counted()])
def test_a_least_size_is_kept_if_the_trace_is_wrong_below_it(model: nn.Module) -> None:
    """One vector is added to 4 where there is one token; no trace that says 4 does that."""
    model = model.eval()
    optimized = optimize(model, (torch.randn(2, 9, 4),), dynamic_shapes=({1: Dim("length")},))
    with pytest.raises(UsageError, match="at least 4"):
        optimized(torch.randn(2, 1, 4))
    for length in (4, 5, 30):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)


def test_a_least_size_below_what_the_trace_holds_for_is_refused() -> None:
    x = torch.randn(2, 9, 4)
    with pytest.raises(CaptureError, match=r"length is at least 4, as torch\.export traces it"):
        optimize(Sinks().eval(), (x,), dynamic_shapes=({1: Dim("length", min=1, max=90)},))


class Distances(nn.Module):
    """Points attend to those that are near."""

    def forward(self, x: Tensor) -> Tensor:
        return (-torch.cdist(x, x)).softmax(-1) @ x


def test_a_distance_takes_any_number_of_rows() -> None:
    """torch takes another way from 26 rows on, which is less exact: a trace of 9 rows would end
    there, and the file is nearer to float64."""
    model = Distances().eval()
    optimized = optimize(model, (torch.randn(2, 9, 4),), dynamic_shapes=({1: Dim("length")},))
    assert optimized.report.notes == []
    for length in (1, 3, 30):
        x = torch.randn(2, length, 4)
        exact = model(x.double()).float()
        torch.testing.assert_close(optimized(x), exact, atol=1e-5, rtol=1e-5)


class Nearest(nn.Module):
    """Each point attends to its nearest 4, or to all where there are fewer."""

    def forward(self, x: Tensor) -> Tensor:
        near = (x[:, :, None] - x[:, None]).square().sum(-1).argsort()[:, :, :4]
        size = near.size()
        flat = near.reshape(size[0], -1)[..., None].expand(-1, -1, x.size(-1))
        rows = torch.gather(x, 1, flat).reshape(*size, -1)
        return ((rows - x[:, :, None]).softmax(2) * rows).sum(2)


def _nearest_global(x: Tensor) -> Tensor:
    """Queries of the last tokens over those of the first and of the middle."""
    keys = torch.cat([x[:, :2], x[:, 2:5], x[:, -7:-2:2]], 1)
    return (x[:, -3:] @ keys.mT).softmax(-1) @ keys


def _doubled(x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)[:, :7].cumsum(1)[:, 2:-2]


def _banded(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    mask[:, :3], mask[-2:, 1:] = True, False
    return (x @ x.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ x


class Cut(nn.Module):
    def __init__(self, cut: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(x)


CUT = [(Cut(cut), sample) for cut in (_nearest_global, _doubled, _banded) for sample in (9, 3)]


@pytest.mark.parametrize(("model", "sample"), [(Nearest(), 9), *CUT])
def test_a_part_is_as_long_as_the_axis_lets_it_be(model: nn.Module, sample: int) -> None:
    """torch takes a part for as long as the sample's, and had 4 neighbours where there are 3."""
    model = model.eval()
    shapes = ({0: Dim("batch"), 1: Dim("length")},)
    optimized = optimize(model, (torch.randn(2, sample, 4),), dynamic_shapes=shapes)
    for length in (1, 2, 3, 4, 5, 6, 30):
        x = torch.randn(3, length, 4)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)


class Lags(nn.Module):
    """Weights each row and the three before it, which lie as one view of overlapping rows."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        rows = nn.functional.pad(x.mT, (3, 0)).unfold(-1, 4, 1).flip(-1)
        return (rows.transpose(1, 2) * weights.unsqueeze(2)).sum(-1)


@pytest.mark.parametrize("rows", [3, 7])
def test_how_a_sample_lies_in_memory_ends_no_dim(rows: int) -> None:
    """torch orders equal strides by their sizes: of 3 rows and 4 lags, the lags are first."""
    module, dims = Lags().eval(), {0: Dim("batch"), 1: Dim("rows")}
    inputs = torch.randn(2, rows, 5), torch.randn(2, rows, 4)
    captured = capture(module, inputs, dynamic_shapes=(dims, dims))
    assert captured.notes == ()
    assert [(dim.low, dim.high) for dim in captured.graph.dims.values()] == [(1, None)] * 2
    for count in (1, 2, 3, 4, 9):
        other = torch.randn(3, count, 5), torch.randn(3, count, 4)
        torch.testing.assert_close(interpret(captured.graph, other)[0], module(*other))
