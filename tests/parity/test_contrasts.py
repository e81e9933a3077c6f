"""Sides of a choice of Python's that differ only on inputs that no sample shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError
from attngraph.ir.traits import CHOICE

IDS = torch.randint(30, (2, 12), generator=torch.Generator().manual_seed(0))
OPEN = torch.ones(2, 12, dtype=torch.int64)
X = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
LEFT = (torch.arange(12) > 3).long().expand(2, 12)
Change: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


class OfIds(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.embed, self.inner, self.change = nn.Embedding(50, 8), nn.Linear(8, 8), change

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        ids, kept = self.change(ids, mask)
        x = self.embed(ids)
        scores = self.inner(x) @ x.mT
        if kept is not None:
            scores = scores.masked_fill(kept[:, None] == 0, -torch.inf)
        attended: Tensor = scores.softmax(-1) @ x
        return attended


class OfFloats(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = nn.Linear(8, 8), change

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(self.change(x))
        return made


class LastToken(OfIds):
    """The row of each last token, as it is found for masks that all end in one and for others."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        rows = super().forward(ids, mask)
        if mask[:, -1].sum() == mask.shape[0]:
            return rows[:, -1]
        return rows[torch.arange(ids.shape[0]), mask.sum(1) - 1]


def of_one(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    return ids, (None if ids.shape[0] == 1 else mask)


def rare_when_long(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    return (ids.clamp(max=39) if ids.shape[1] > 30 else ids), mask


def rare_elsewhere(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    return (ids if ids.shape[1] == 12 else ids.clamp(max=45)), mask


def cut_when_long(x: Tensor) -> Tensor:
    return x.clamp(-50, 50) if x.shape[1] > 30 else x


def filled_when_one(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 1e-5, 1.0, x) if x.shape[1] == 1 else x


def cut_when_large(x: Tensor) -> Tensor:
    return x if x.abs().max() <= 1 else x.clamp(-50, 50)


def cut_above_one(x: Tensor) -> Tensor:
    return x.clamp(-50, 50) if x.abs().max() > 1 else x


def without_nans(x: Tensor) -> Tensor:
    return torch.nan_to_num(x) if x.isnan().any() else x


def with_nans_counted(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=1.0) if x.sum() != x.sum() else x


def floored_if_low(x: Tensor) -> Tensor:
    return x if (x > -100).all() else x.clamp(min=-100)


def cut_far_out_when_long(x: Tensor) -> Tensor:
    return x.clamp(-1e30, 1e30) if x.shape[1] > 30 else x


_LONG_OR_ONE = (of_one, rare_when_long)


def all_when_long(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    return ids, (mask if ids.shape[1] <= 30 else mask * (ids > -1))


@pytest.mark.parametrize(
    "change", [rare_elsewhere, *(pytest.param(c, marks=pytest.mark.wide) for c in _LONG_OR_ONE)]
)
def test_masks_and_ids_that_the_sample_lacks(change: Change) -> None:
    model = OfIds(change).eval()
    axes = {0: Dim.AUTO, 1: Dim.AUTO}
    compiled = attngraph.optimize(model, (IDS, OPEN), dynamic_shapes=(axes, axes))
    asked = {
        of_one: (IDS[:1], LEFT[:1]),
        rare_when_long: (torch.full((2, 40), 49), torch.ones(2, 40, dtype=torch.int64)),
        rare_elsewhere: (torch.full((2, 12), 49), OPEN),
    }[change]
    try:
        found = compiled(*asked)
    except attngraph.errors.UsageError:  # a size that the file doesn't take
        return
    assert torch.allclose(found, model(*asked), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        (cut_when_long, X.repeat(1, 4, 1) * 100),
        (filled_when_one, X[:, :1] * 1e-7),
        (cut_when_large, X * 100),
        (cut_above_one, X * 100),
    ],
)
def test_numbers_that_the_sample_lacks(change: Callable[[Tensor], Tensor], asked: Tensor) -> None:
    model = OfFloats(change).eval()
    compiled = attngraph.optimize(model, (X,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    try:
        found = compiled(asked)
    except attngraph.errors.UsageError:
        return
    assert torch.allclose(found, model(asked), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "change", [without_nans, with_nans_counted, floored_if_low], ids=lambda c: c.__name__
)
@pytest.mark.parametrize(
    "number",
    [torch.nan, *(pytest.param(n, marks=pytest.mark.wide) for n in (torch.inf, -torch.inf, -1e6))],
)
def test_numbers_that_are_far_out_or_not_finite(
    change: Callable[[Tensor], Tensor], number: float
) -> None:
    """Both sides of the first two are equal for all finite numbers, and not for infinite ones."""
    model = OfFloats(change).eval()
    compiled = attngraph.optimize(model, (X,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    asked = X.clone()
    asked[1, 3, 5] = number
    assert torch.allclose(compiled(asked), model(asked), rtol=1e-5, atol=1e-6, equal_nan=True)


class OfSteps(OfFloats):
    """Floats beside whole numbers that are neither ids nor lengths: the steps of a diffusion."""

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:  # type: ignore[override]
        angles: Tensor = self.change(steps)[:, None, None] * torch.arange(8) / 7
        made: Tensor = self.inner(x + angles.sin())
        return made


def turned_from_1000_on(steps: Tensor) -> Tensor:
    return steps if (steps < 1000).all() else steps % 1000


def cut_from_500_on(steps: Tensor) -> Tensor:
    return steps.clamp(max=600) if (steps > 500).any() else steps


@pytest.mark.parametrize("change", [turned_from_1000_on, cut_from_500_on], ids=lambda c: c.__name__)
def test_whole_numbers_that_the_sample_lacks(change: Callable[[Tensor], Tensor]) -> None:
    model, axis = OfSteps(change).eval(), {0: Dim.AUTO}
    sample = X, torch.tensor([3, 80])
    compiled = attngraph.optimize(model, sample, dynamic_shapes=(axis, axis))
    for steps in ([-5, 80], [999, 1002], [900, 7], [-3, -9]):
        asked = X, torch.tensor(steps)
        assert torch.allclose(compiled(*asked), model(*asked), atol=1e-4)


def test_a_side_that_is_right_for_all_numbers_is_the_file_s_only_one() -> None:
    assert _chooses(OfFloats(without_nans))
    assert not _chooses(OfFloats(floored_if_low))


def _chooses(model: nn.Module) -> bool:
    graph = attngraph.optimize(model.eval(), (X,)).graph
    return any(node.op in CHOICE for node in graph)


def zeros_for_nans(x: Tensor) -> Tensor:
    return x if (x < 100).all() else x.nan_to_num(0.0)


class OfTables(OfFloats):
    """Floats whose whole parts are looked up: of a NaN there is none."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(torch.eye(8)[self.change(x).abs().long().clamp(max=7)])
        return made


def test_a_side_that_fails_where_the_other_one_is_taken() -> None:
    model = OfTables(zeros_for_nans).eval()
    compiled = attngraph.optimize(model, (X,))
    asked = X.masked_fill(torch.arange(8) == 3, torch.nan)
    assert torch.allclose(compiled(asked), model(asked), atol=1e-6)


def test_a_choice_by_all_rows_of_a_mask() -> None:
    """Padding on the left in one row of several takes the same side as none at all."""
    model = LastToken(lambda ids, mask: (ids, mask)).eval()
    axes = {0: Dim.AUTO, 1: Dim.AUTO}
    try:
        compiled = attngraph.optimize(model, (IDS, OPEN), dynamic_shapes=(axes, axes))
    except CaptureError:
        return
    for mask in (LEFT, LEFT.flip(1), torch.stack([LEFT[0], LEFT[0].flip(0)])):
        assert torch.allclose(compiled(IDS, mask), model(IDS, mask), atol=1e-5)


def test_sides_that_are_equal_for_all_that_may_be_asked_leave_the_size_open() -> None:
    compiled = attngraph.optimize(
        OfFloats(cut_far_out_when_long).eval(), (X,), dynamic_shapes=({1: Dim("n", max=60)},)
    )
    assert compiled(X.repeat(1, 5, 1)).shape == (2, 60, 8)
    axes = {0: Dim("batch", max=8), 1: Dim("n", max=60)}
    longer = IDS.repeat(1, 5), OPEN.repeat(1, 5)
    model = OfIds(all_when_long).eval()
    masked = attngraph.optimize(model, (IDS, OPEN), dynamic_shapes=(axes, axes))
    assert torch.allclose(masked(*longer), model(*longer), atol=1e-5)


class OfShares(nn.Module):
    """A row of zeros, as padding is, has no share of its length: one side is NaN there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        length = x.norm(dim=-1, keepdim=True)
        if (length > 1).any():
            x = x / length
        scores = self.inner(x) @ x.mT
        return scores.masked_fill(~kept[:, None], -1e9).softmax(-1) @ x


def test_a_side_without_a_number_is_not_the_other_one() -> None:
    model, axes = OfShares().eval(), {0: "batch", 1: "n"}
    x, kept = torch.randn(2, 6, 8).exp(), torch.rand(2, 6) > 0.3
    compiled = attngraph.optimize(model, (x, kept), dynamic_shapes=(axes, axes))
    for asked in (x, x * 0.01, x * 0, x * (torch.arange(6) < 3)[:, None] * 0.01):
        assert torch.allclose(compiled(asked, kept), model(asked, kept), atol=1e-6)
