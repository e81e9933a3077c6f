"""A router whose experts, or whose block, choose their rows is told apart from one of each row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import attngraph
from attngraph.passes import make, run

WIDTH, EXPERTS, COUNT = 16, 4, 3


class ExpertChoice(nn.Module):
    """Zhou et al., 2022: what experts give comes back by one-hot products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights, places = self.router(x).softmax(-1).mT.topk(COUNT, -1)
        spread = places[..., None].expand(-1, -1, -1, WIDTH)
        taken = x[:, None].expand(-1, EXPERTS, -1, -1).gather(2, spread)
        made = torch.stack([each(taken[:, at]) for at, each in enumerate(self.experts)], 1)
        back = F.one_hot(places, x.shape[1]).to(x.dtype)
        return torch.einsum("becd,bect->btd", made * weights[..., None], back)


class OfDepths(nn.Module):
    """Raposo et al., 2024: a block that a few rows go through, in their order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.block = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights, places = self.router(x)[..., 0].topk(COUNT, 1)
        places, order = places.sort(1)
        spread = places[..., None].expand(-1, -1, WIDTH)
        made = self.block(self.norm(x.gather(1, spread)))
        return x.scatter_add(1, spread, made * weights.gather(1, order)[..., None])


class OfEachRow(ExpertChoice):
    """The other way round: each row takes some experts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, places = self.router(x).topk(COUNT, -1)
        made = torch.stack([each(x) for each in self.experts], 2)
        taken = made.gather(2, places[..., None].expand(-1, -1, -1, WIDTH))
        return (taken * weights.softmax(-1)[..., None]).sum(2)


class Pruned(OfDepths):
    """Rows are left out for good: nothing is put back."""

    def forward(self, x: Tensor) -> Tensor:
        places = self.router(x)[..., 0].topk(COUNT, 1).indices
        return self.block(x.gather(1, places[..., None].expand(-1, -1, WIDTH)))


def _said(kind: type[nn.Module]) -> list[str]:
    dims = {0: Dim("batch", max=16), 1: Dim("seq", min=COUNT, max=64)}
    graph = attngraph.capture(kind().eval(), (torch.randn(2, 7, WIDTH),), dynamic_shapes=(dims,))
    results = run(graph, make(["canonicalize", "cse", "dce", "fuse-experts"]))
    return [r.reason for each in results for r in each.remarks if r.code == "experts-kept"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (ExpertChoice, "A mixture of 4 experts, each of which takes 3 rows of its choice, "),
        (OfDepths, "A block that 3 rows of a sequence go through "),
    ],
)
def test_rows_that_are_chosen_are_told(kind: type[nn.Module], said: str) -> None:
    (reason,) = _said(kind)
    assert reason.startswith(said)


@pytest.mark.parametrize("kind", [OfEachRow, Pruned])
def test_other_choices_are_no_such_block(kind: type[nn.Module]) -> None:
    assert not [reason for reason in _said(kind) if "rows" in reason]


class Grouped(nn.Module):
    """DeepSeek-V3: scores of groups that aren't chosen are filled; a bias corrects the others."""

    fill, least = 0.0, -1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.bias = nn.Parameter(torch.full((EXPERTS,), self.least))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid() + self.bias
        kept = scores.masked_fill(scores < scores.mean(-1, keepdim=True), self.fill)
        places = kept.topk(COUNT, -1).indices
        return scores.gather(-1, places)


class WithoutTies(Grouped):
    fill = -torch.inf


class Above(Grouped):
    """No score is below the fill."""

    least = 0.0


def test_a_choice_among_equal_fills_is_told() -> None:
    for kind, is_told in ((Grouped, True), (WithoutTies, False), (Above, False)):
        graph = attngraph.capture(kind().eval(), (torch.randn(2, 7, WIDTH),))
        results = run(graph, make(["canonicalize", "cse", "dce", "fuse-experts"]))
        codes = [remark.code for each in results for remark in each.remarks]
        assert ("tied-choice" in codes) == is_told, kind
