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


@pytest.mark.parametrize("dim", [Dim("length", min=1, max=300), Dim("length")])
@pytest.mark.parametrize("write", [_past_the_first, _every_other])
def test_what_broadcasts_to_a_part_takes_any_length(write: Write, dim: Any) -> None:
    """torch asks whether the part is longer than 1, and has the length begin at 3 or at 5."""
    model = Written(write).eval()
    optimized = optimize(model, (torch.randn(2, 9, 4),), dynamic_shapes=({1: dim},))
    for length in (1, 2, 3, 4, 5, 30):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)


def test_a_least_size_is_kept_if_any_below_it_is_wrong() -> None:
    """The trace is right at 1 as well, but not at 2."""
    model = Written(_before_the_last).eval()
    optimized = optimize(model, (torch.randn(2, 9, 4),), dynamic_shapes=({1: Dim("length")},))
    with pytest.raises(UsageError, match="at least 3"):
        optimized(torch.randn(2, 2, 4))
    for length in (3, 4, 30):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)


def test_a_least_size_below_what_the_trace_holds_for_is_refused() -> None:
    x = torch.randn(2, 9, 4)
    with pytest.raises(CaptureError, match=r"length is at least 3, as torch\.export traces it"):
        optimize(
            Written(_before_the_last), (x,), dynamic_shapes=({1: Dim("length", min=1, max=90)},)
        )


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


def test_a_dim_begins_at_the_least_size_that_is_right() -> None:
    """torch takes a part of an axis for shorter than the axis; the trace is right where it isn't,
    and has 4 neighbours where the model has fewer."""
    model = Nearest().eval()
    optimized = optimize(model, (torch.randn(2, 9, 4),), dynamic_shapes=({1: Dim("length")},))
    for length in (4, 5, 30):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)
    with pytest.raises(UsageError, match="at least 4"):
        optimized(torch.randn(2, 3, 4))
