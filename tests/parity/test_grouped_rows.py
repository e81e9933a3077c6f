"""Rows of several graphs or documents side by side, with the number of the one each belongs to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import attngraph
from tests.models.attends import Attends

pytestmark = pytest.mark.wide

ROWS = {0: Dim("rows")}


class Dense(Attends):
    """Each group's rows are one row of a padded batch, and go back to where they were."""

    def forward(self, x: Tensor, group: Tensor) -> Tensor:
        counts = torch.bincount(group)
        longest = int(counts.max())
        place = torch.arange(len(group)) - (counts.cumsum(0) - counts)[group]
        batch = x.new_zeros(group[-1].item() + 1, longest, 16)
        there = torch.zeros(batch.shape[:2], dtype=torch.bool)
        batch[group, place] = x
        there[group, place] = True
        return self.attend(batch, ~there[:, None])[there]


class Means(Attends):
    def forward(self, x: Tensor, group: Tensor) -> Tensor:
        count = int(group.max()) + 1
        sums = x.new_zeros(count, 16).index_add_(0, group, self.query(x))
        return sums / torch.bincount(group, minlength=count).clamp(min=1)[:, None]


@pytest.mark.parametrize("kind", [Dense, Means])
def test_any_number_of_groups(kind: type[Attends]) -> None:
    module = kind().eval()
    sample = torch.randn(12, 16), torch.arange(12) // 4
    optimized = attngraph.optimize(module, sample, dynamic_shapes=(ROWS, ROWS))
    assert not any("stops with an error" in note for note in optimized.report.notes)
    for sizes in ([1], [2, 3], [4, 1, 7, 2, 1], [20, 30]):
        group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        x = torch.randn(sum(sizes), 16)
        with torch.no_grad():
            torch.testing.assert_close(optimized(x, group), module(x, group))


class Packed(Attends):
    """Sequences side by side, by where each of them ends (`cu_seqlens`) or by their lengths."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        group = torch.bucketize(torch.arange(len(x)), ends[1:], right=True)
        return self.attend(x[None], (group[:, None] != group)[None])[0]


class ByLengths(Attends):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        group = torch.arange(len(lengths)).repeat_interleave(lengths, output_size=len(x))
        return self.attend(x[None], (group[:, None] != group)[None])[0]


@pytest.mark.parametrize("first", [[5, 4, 3], [4, 4, 4]], ids=["uneven", "even"])
@pytest.mark.parametrize("kind", [Packed, ByLengths])
def test_any_number_of_packed_sequences(kind: type[Attends], first: list[int]) -> None:
    def inputs(lengths: list[int]) -> tuple[Tensor, Tensor]:
        told = torch.tensor(lengths)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return torch.randn(sum(lengths), 16), ends if kind is Packed else told

    module = kind().eval()
    dims = ROWS, {0: Dim("sequences", min=2)}
    optimized = attngraph.optimize(module, inputs(first), dynamic_shapes=dims)
    is_summed = any("the sum of lengths is rows" in note for note in optimized.report.notes)
    assert is_summed == (kind is ByLengths)
    for lengths in ([1, 3], [2, 0, 5], [20, 1, 1, 30], [12, 12, 12]):
        given = inputs(lengths)
        with torch.no_grad():
            torch.testing.assert_close(optimized(*given), module(*given))


class InOrder(Attends):
    """Rows attend to those before them in time, in whatever order they come."""

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        order = times.argsort(-1)[..., None].expand_as(x)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        attended = self.attend(x.gather(1, order), later)
        return torch.zeros_like(attended).scatter(1, order, attended)


def test_rows_in_the_order_of_their_times() -> None:
    module = InOrder().eval()
    dims = ({0: Dim("batch"), 1: Dim("rows", max=256)},) * 2
    sample = torch.randn(2, 7, 16), torch.rand(2, 7)
    optimized = attngraph.optimize(module, sample, dynamic_shapes=dims)
    for batch, rows in ((1, 1), (3, 100)):
        given = torch.randn(batch, rows, 16), torch.rand(batch, rows)
        with torch.no_grad():
            torch.testing.assert_close(optimized(*given), module(*given))
