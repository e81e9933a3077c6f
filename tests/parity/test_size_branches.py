"""Branches on sizes that only a run knows: of experts without tokens, of masks that select none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import AttngraphError

pytestmark = pytest.mark.wide

SEEN = torch.ones(3)
"""A tensor among a file's globals, which are looked through for functions that remember sizes."""


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(4)
        )

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.reshape(-1, 16)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        return rows, weights, chosen


class PassesOverIdleExperts(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        rows, weights, chosen = self.routed(x)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(rows[token]) * weights[token, slot, None])
        return out.view_as(x)


class AsksForLength(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        rows, weights, chosen = self.routed(x)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero()
            if len(at) > 0:
                token, slot = at.unbind(1)
                out[token] += expert(rows[token]) * weights[token, slot, None]
        return out.view_as(x)


class CutsSortedRows(Mixture):
    """Each expert takes the next of the sorted rows, as many as were counted for it."""

    def forward(self, x: Tensor) -> Tensor:
        rows, weights, chosen = self.routed(x)
        taken = chosen.new_zeros((rows.shape[0], 4)).scatter_(1, chosen, 1).sum(0)
        order = chosen.view(-1).argsort()
        sorted_rows = rows[order // 2]
        parts, start = [], 0
        for number, count in enumerate(taken.tolist()):
            end = start + count
            if count == 0:
                continue
            parts.append(self.experts[number](sorted_rows[start:end]))
            start = end
        joined = torch.cat(parts) if parts else sorted_rows
        back = torch.empty_like(joined)
        back[order] = joined
        return (back.view(*chosen.shape, 16) * weights[..., None]).sum(1).view_as(x)


class CountsByBins(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        rows, weights, chosen = self.routed(x)
        out = torch.zeros_like(rows)
        counts = torch.bincount(chosen.flatten(), minlength=4).tolist()
        for number, expert in enumerate(self.experts):
            if counts[number] == 0:
                continue
            token, slot = torch.where(chosen == number)
            out[token] += expert(rows[token]) * weights[token, slot, None]
        return out.view_as(x)


class SelectsNone(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        found = x[x[..., 0] > 0.5]
        if found.shape[0] == 0:
            return x.new_zeros(0, 4)
        logits: Tensor = self.router(found)
        return logits


@pytest.mark.parametrize(
    "kind", [PassesOverIdleExperts, AsksForLength, CutsSortedRows, CountsByBins, SelectsNone]
)
def test_no_rows_are_a_shortcut(kind: type[Mixture]) -> None:
    module = kind().eval()
    dims = ({0: Dim("batch"), 1: Dim("length")},)
    optimized = attngraph.optimize(module, (torch.randn(2, 7, 16),), dynamic_shapes=dims)
    (note,) = (note for note in optimized.report.notes if "chooses by a tensor's values" in note)
    assert "test_size_branches.py" in note
    none = torch.randn(2, 3, 16)
    none[..., 0] = -1.0
    for x in (torch.randn(1, 1, 16), none, torch.randn(3, 5, 16)):
        with torch.no_grad():
            torch.testing.assert_close(optimized(x), module(x))


class Masked(PassesOverIdleExperts):
    """A branch of each kind; at these sizes all experts have rows, unless all rows are alike."""

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        if torch.isnan(x).any():
            raise ValueError("a number is missing")
        if visible.all():
            return super().forward(x)
        return super().forward(x) * visible[..., None]


def test_several_branches_of_a_model_without_dims() -> None:
    module, x, visible = Masked().eval(), torch.randn(3, 9, 16), torch.rand(3, 9) > 0.3
    optimized = attngraph.optimize(module, (x, visible))
    said = [note for note in optimized.report.notes if "test_size_branches.py" in note]
    assert len(said) == 3
    for rows in (x, x[:1, :1].expand_as(x)):
        for mask in (visible, torch.ones_like(visible)):
            with torch.no_grad():
                torch.testing.assert_close(optimized(rows, mask), module(rows, mask))


class DiffersWhereNone(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        found = torch.nonzero(x[0, :, 0] > 0).squeeze(1)
        if found.numel() == 0:
            return x.sum(1)
        return x[:, found].sum(1)


class DiffersWhereFew(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        found = x[x[..., 0] > 0.5]
        if found.shape[0] < 3:
            return found * 2
        return found


class AsksTwice(Mixture):
    """Which of its two conditions is meant doesn't show in a run."""

    def forward(self, x: Tensor) -> Tensor:
        found = x[x[..., 0] > 0.5]
        return found * 2 if found.shape[0] > 2 and found.shape[0] < 9 else found * 3


@pytest.mark.parametrize("kind", [DiffersWhereNone, DiffersWhereFew, AsksTwice])
def test_sides_that_differ_are_both_computed(kind: type[Mixture]) -> None:
    module, x = kind().eval(), torch.randn(2, 7, 16)
    optimized = attngraph.optimize(module, (x,))
    (note,) = (note for note in optimized.report.notes if "computes both sides" in note)
    assert "test_size_branches.py" in note
    for start in (-2.0, -0.5, 0.0, 0.5, 2.0):
        given = x.clone()
        given[..., 0] += start
        torch.testing.assert_close(optimized(given), module(given))


class CountsGivenIds(nn.Module):
    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        counts = torch.bincount(ids, minlength=4).tolist()
        if counts[1] == 0:
            return x * sum(counts)
        return x * (counts[0] + counts[1] + counts[2] + counts[3])


def test_a_value_beyond_the_bins_is_no_silent_zero() -> None:
    module, x = CountsGivenIds().eval(), torch.randn(5)
    optimized = attngraph.optimize(module, (torch.tensor([0, 1, 3, 3, 2]), x))
    ids = torch.tensor([0, 2, 2, 2, 3])
    torch.testing.assert_close(optimized(ids, x), module(ids, x))
    with pytest.raises(AttngraphError, match=r"out of data bounds|out of bounds"):
        optimized(torch.tensor([0, 1, 9, 3, 2]), x)
