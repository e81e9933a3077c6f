"""A tie of rounded scores that a file settles otherwise is told apart from an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.checks import chosen
from attngraph.checks.chosen import Choices, choices_of
from attngraph.checks.rounded import Run
from attngraph.errors import ParityError
from attngraph.export.parity.budget import compare
from attngraph.export.parity.reference import Reference
from tests.parity import experts


class Picked(nn.Module):
    """The larger two of four numbers of a row, weighted."""

    def forward(self, x: Tensor) -> Tensor:
        values, places = x.softmax(-1).topk(2, -1)
        return values * (places + 1)


def _tied(rows: Sequence[Sequence[float]], places: Sequence[Sequence[int]]) -> bool:
    """Whether rounding to bf16 explains these places."""
    choices = Choices((torch.tensor(places),))
    with choices.imposed():
        Reference(Picked(), precision="bf16")((torch.tensor(rows, dtype=torch.bfloat16),))
    return choices.are_ties()


def test_scores_that_are_equal_may_be_taken_in_any_order() -> None:
    assert _tied([[1.0, 1.0, 0.0, 1.0]], [[3, 0]])


def test_scores_within_rounding_may_be_taken() -> None:
    assert _tied([[1.0, 0.0, 0.5, 0.49805]], [[0, 3]])


@pytest.mark.parametrize("places", [[[0, 1]], [[3, 0]], [[0, 0]], [[0, 4]], [[0, 2], [0, 2]]])
def test_what_rounding_does_not_explain_is_no_tie(places: list[list[int]]) -> None:
    """A lower one, another order, one twice, none that there is, too many rows."""
    assert not _tied([[1.0, -1.0, 0.75, 0.25]], places)


def test_a_row_of_nan_hides_no_wrong_choice_in_another() -> None:
    rows = [[float("nan")] * 4, [1.0, -1.0, 0.75, 0.25]]
    assert _tied(rows, [[3, 0], [0, 2]])
    assert not _tied(rows, [[3, 0], [0, 1]])


def test_other_calls_than_the_file_has_are_no_tie() -> None:
    choices = Choices((torch.tensor([[0, 2]]), torch.tensor([[0, 2]])))
    with choices.imposed():
        Picked()(torch.tensor([[1.0, -1.0, 0.75, 0.25]]))
    assert not choices.are_ties()


@pytest.mark.parametrize(("places", "is_tie"), [([[0, 2]], True), ([[0, 3]], False)])
def test_no_parity_is_asked_where_a_choice_is_none_of_the_model_s(
    places: list[list[int]], is_tie: bool
) -> None:
    """[0, 3] takes the score that is least but one."""
    x = torch.tensor([[1.0, -1.0, 0.75, 0.25]]).bfloat16()
    reference = Reference(Picked(), precision="bf16")

    @contextlib.contextmanager
    def apart(names: Sequence[str]) -> Iterator[Run]:
        yield lambda _: [x, torch.tensor(places)]

    found, note = chosen.held_as_chosen(
        chosen.Chosen(("places",), apart),
        {"case": (x,)},
        {"case": (x,)},
        lambda tensors: reference(tensors),
        lambda given, *_: compare(given, given.eager, "bf16"),
    )
    assert list(found) == ["case"] * is_tie
    assert bool(note) == is_tie


class Router(experts.Stacked):
    """Two experts of each pair tie in every row, and give different numbers."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.gate.weight[1::2] = self.gate.weight[::2] * (1 + 2**-9)
        self.to(torch.bfloat16)

    count = 1


def _compiled() -> attngraph.Optimized:
    x = torch.randn(2, 21, experts.H, generator=torch.Generator().manual_seed(1)).bfloat16()
    dims = {0: Dim("batch", max=8), 1: Dim("seq", max=64)}
    return attngraph.optimize(Router().eval(), (x,), dynamic_shapes=(dims,))


def test_a_near_tie_of_a_router_is_told() -> None:
    found = _compiled()
    assert found.report.parity is not None
    assert found.report.parity.passed
    assert len(choices_of(found.model)) == 1
    (told,) = (note for note in found.report.notes if "with the file's choices" in note)
    assert int(told.split()[1]) > 0  # rows
    assert "nearer to each other than rounding" in told


@pytest.mark.wide
@pytest.mark.parametrize("size", [4, 7, 400], ids="of {}".format)
def test_the_largest_in_any_order_come_in_order(size: int) -> None:
    """torch sorts a few of many by itself, and of others gives them as it finds them."""

    class Unsorted(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return tuple(x.topk(3, -1, sorted=False))

    torch.manual_seed(0)
    x = torch.randn(16, size)
    found = attngraph.optimize(Unsorted(), (x,))
    expected = x.topk(3, -1)
    assert all(map(torch.equal, found(x), expected))
    is_another = not torch.equal(x.topk(3, -1, sorted=False).indices, expected.indices)
    notes = [note for note in found.report.notes if "in another order" in note]
    assert len(notes) == is_another == (size < 400)


def test_an_error_beside_a_near_tie_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ties, and an expert that a kernel gets wrong."""
    whole = attngraph.Optimized.evaluate

    def wrong(self: attngraph.Optimized, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (found,) = whole(self, tensors)
        return (found * 1.25,)

    monkeypatch.setattr(attngraph.Optimized, "evaluate", wrong)
    monkeypatch.setattr(chosen, "_is_same", lambda *_: True)
    with pytest.raises(ParityError, match="out of its error budget"):
        _compiled()
