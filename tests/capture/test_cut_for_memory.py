"""An axis that is cut into parts for memory alone is whole in the graph, at any size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph import optimize
from attngraph.errors import CaptureError, UsageError

pytestmark = pytest.mark.wide

X = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))


class Parts(nn.Module):
    """A function of each part, and the parts again along the axis."""

    def __init__(self, cut: Callable[[Tensor], tuple[Tensor, ...]], *, mixes: bool = False) -> None:
        super().__init__()
        self.cut, self.mixes = cut, mixes
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.cut(x)
        made = [part.softmax(1) if self.mixes else self.layer(part).relu() for part in parts]
        return torch.cat(made, 1)


@pytest.mark.parametrize(
    "cut",
    [lambda x: x.chunk(100, dim=1), lambda x: torch.split(x, 4, 1)],
    ids=["by-number", "by-size"],
)
def test_parts_that_are_treated_alike_are_no_parts(cut: Callable[..., tuple[Tensor, ...]]) -> None:
    model = Parts(cut).eval()
    optimized = optimize(model, (X,), dynamic_shapes=({1: Dim.AUTO},))
    assert any("the graph has it whole" in note for note in optimized.report.notes)
    for length in (6, 1, 4, 13, 130):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(optimized(x), model(x))


def test_parts_that_each_sum_to_one_are_kept() -> None:
    model = Parts(lambda x: x.split(4, 1), mixes=True)
    optimized = optimize(model, (X,), dynamic_shapes=({1: Dim.AUTO},))
    torch.testing.assert_close(optimized(X), model(X))
    with pytest.raises(UsageError):
        optimized(torch.randn(2, 13, 4))
    assert not any("the graph has it whole" in note for note in optimized.report.notes)


NEAR = [
    lambda part: part / part.abs().amax().clamp(min=10.0),
    lambda part: torch.where(part.mean(1, keepdim=True) > 5, part, part * 2),
    lambda part: part - (part.amax(1, keepdim=True) - 8).relu(),
    lambda part: part * (1 + ((part > 9).sum(1, keepdim=True) > 1)),
]


@pytest.mark.parametrize(
    "function",
    [NEAR[0], *(pytest.param(each, marks=pytest.mark.slow) for each in NEAR[1:])],
    ids=["scale", "threshold", "excess", "count"],
)
def test_rows_that_usual_numbers_keep_apart_are_still_of_a_part(
    function: Callable[[Tensor], Tensor],
) -> None:
    """Only large numbers show that a row of a part is computed from its others."""

    class Near(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([function(part) for part in x.chunk(3, 1)], 1)

    optimized = optimize(Near(), (X,), dynamic_shapes=({1: Dim.AUTO},))
    assert not any("the graph has it whole" in note for note in optimized.report.notes)
    for x in (X, X * 30):
        torch.testing.assert_close(optimized(x), Near()(x))


def test_parts_of_two_tensors_in_step_are_no_parts() -> None:
    class Queries(nn.Module):
        """A mask (B, S) is cut in step with the queries; one cut lies within another."""

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            pairs = zip(x.chunk(100, 1), mask.chunk(100, 1), strict=True)
            return torch.cat([self.attend(q, hides, x) for q, hides in pairs], 1)

        def attend(self, q: Tensor, hides: Tensor, x: Tensor) -> Tensor:
            found = torch.cat([(each @ x.mT).softmax(-1) @ x for each in q.split(2, 1)], 1)
            return found.masked_fill(hides[..., None], 0.0)

    mask = torch.arange(6).expand(2, 6) > 3
    shapes = ({1: Dim.AUTO}, {1: Dim.AUTO})
    optimized = optimize(Queries(), (X, mask), dynamic_shapes=shapes)
    assert any("the graph has it whole" in note for note in optimized.report.notes)
    assert optimized.report.fused == 1
    for length in (1, 13, 130):
        x, hides = torch.randn(2, length, 4), torch.rand(2, length) > 0.5
        torch.testing.assert_close(optimized(x, hides), Queries()(x, hides))


class InFour(nn.Module):
    """Attention of a query in four parts, or of keys in four to which a state is handed on."""

    def __init__(self, *, carries: bool) -> None:
        super().__init__()
        self.carries = carries

    def forward(self, x: Tensor) -> Tensor:
        if self.carries:
            state, found = torch.zeros(x.shape[0], 8, 8), []
            for part in x.chunk(4, 1):
                state = state + part.mT @ part
                found.append(part @ state)
            return torch.cat(found, 1)
        parts = [(part @ x.mT).softmax(-1) @ x for part in x.chunk(4, 1)]
        return torch.cat(parts, 1)


def test_the_line_of_a_cut_is_told_whether_it_is_left_out_or_stays() -> None:
    """Loops of the same function are rewritten in its source, whose first line isn't the cut's."""
    inputs, shapes = (torch.randn(2, 16, 8),), ({1: Dim("length", max=64)},)
    optimized = optimize(InFour(carries=False), inputs, dynamic_shapes=shapes)
    (note,) = [note for note in optimized.report.notes if "cut into parts" in note]
    assert "parts = [(part @ x.mT)" in note
    with pytest.raises(CaptureError, match=r"fixes it to 16 at .*for part in x\.chunk\(4, 1\)"):
        optimize(InFour(carries=True), inputs, dynamic_shapes=shapes)
