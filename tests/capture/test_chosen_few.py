"""`if k < n: scores.topk(k)`: a choice of the largest few takes an axis that has fewer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph import optimize
from attngraph.errors import CaptureError, UsageError

Hide = Callable[[Tensor], Tensor]


class Sparse(nn.Module):
    """Attention whose scores some function hides, to `own` keys beside the tokens' as well."""

    def __init__(self, hide: Hide, own: int = 0) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.hide, self.own = hide, own

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        keys, values = (nn.functional.pad(each, (0, 0, self.own, 0)) for each in (key, value))
        return self.hide(4 * query @ keys.mT).softmax(-1) @ values


def below_the_largest(scores: Tensor, count: int = 4) -> Tensor:
    return scores.masked_fill(scores < scores.topk(count).values[..., -1:], -torch.inf)


def if_more(scores: Tensor) -> Tensor:
    return below_the_largest(scores) if scores.shape[-1] > 4 else scores


def unless_few(scores: Tensor) -> Tensor:
    if scores.shape[-1] <= 4:
        return scores
    top, places = torch.topk(scores, k=4, dim=-1)
    return torch.full_like(scores, -torch.inf).scatter(-1, places, top)


def of_queries(scores: Tensor) -> Tensor:
    """The largest of another axis, twice, of which the second one is larger."""
    if scores.shape[-2] > 2:
        scores = scores - scores.topk(2, dim=-2).values[:, -1:]
    return below_the_largest(scores, 6) if scores.shape[-1] > 6 else scores


def otherwise_doubled(scores: Tensor) -> Tensor:
    return below_the_largest(scores) if scores.shape[-1] > 4 else 2 * scores


def also_of_others(scores: Tensor) -> Tensor:
    """Where there are 4, none is hidden but the smallest."""
    if scores.shape[-1] >= 4:
        scores = scores.masked_fill(scores <= scores.topk(4).values[..., -1:], -30.0)
    return scores


def from_nine(scores: Tensor) -> Tensor:
    return below_the_largest(scores) if scores.shape[-1] > 8 else scores


def compared(model: nn.Module, sample: int, least: int, lengths: tuple[int, ...]) -> None:
    """Compiled at the sample's length, a model is right from the least one on, and says so."""
    model = model.eval()
    shapes = ({0: Dim("batch", max=8), 1: Dim("length", max=64)},)
    optimized = optimize(model, (torch.randn(2, sample, 8),), dynamic_shapes=shapes)
    for length in lengths:
        x = torch.randn(3, length, 8)
        if length >= least:
            torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)
        else:
            with pytest.raises(UsageError, match=f"at least {least}"):
                optimized(x)


@pytest.mark.parametrize("sample", [7, 4, 3])
def test_a_choice_behind_a_look_at_the_length_takes_any_length(sample: int) -> None:
    """The sample chooses, or doesn't as it has just as many, or fewer."""
    compared(Sparse(if_more), sample, 1, (1, 2, 3, 4, 5, 6, 40))


@pytest.mark.wide
@pytest.mark.parametrize("sample", [9, 2])
@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("hide", [if_more, unless_few])
def test_so_it_does_of_other_axes(hide: Hide, own: int, sample: int) -> None:
    compared(Sparse(hide, own), sample, 1, (1, 2, 3, 4, 5, 6, 33))


@pytest.mark.wide
def test_several_choices_of_several_sizes() -> None:
    """`x - x` of the second largest is what isn't the model where there are 2 rows or 1."""
    compared(Sparse(of_queries), 9, 3, (1, 2, 3, 5, 6, 7, 33))


def test_a_choice_without_a_look_begins_where_the_model_does() -> None:
    model = Sparse(below_the_largest).eval()
    optimized = optimize(
        model, (torch.randn(2, 9, 8),), dynamic_shapes=({1: Dim("length", min=4, max=64)},)
    )
    for length in (4, 5, 33):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)
    shapes = ({1: Dim("length", min=1, max=64)},)
    with pytest.raises(CaptureError, match="length is at least 4"):
        optimize(model, (torch.randn(2, 9, 8),), dynamic_shapes=shapes)


@pytest.mark.parametrize(
    ("hide", "least"), [(otherwise_doubled, 5), (also_of_others, 4), (from_nine, 9)]
)
def test_where_fewer_are_treated_otherwise_the_length_begins_beyond(hide: Hide, least: int) -> None:
    compared(Sparse(hide), 12, least, (least - 1, least, least + 1, 33))


def test_the_refusal_names_the_line_that_looks() -> None:
    shapes = ({1: Dim("length", min=1, max=64)},)
    with pytest.raises(CaptureError, match=r"length is at least 5 at .*test_chosen_few\.py"):
        optimize(Sparse(otherwise_doubled), (torch.randn(2, 9, 8),), dynamic_shapes=shapes)
