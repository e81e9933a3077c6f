"""Branches on a tensor's values: followed on the side that is right on both, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError
from tests.parity.data_branches import (
    ASKED,
    Additive,
    AllVisible,
    Asks,
    Asserts,
    AssertsNot,
    Attends,
    ByInt,
    Catches,
    Clamped,
    Differs,
    DiffersBelow,
    DiffersByComparison,
    DiffersByItem,
    EndedByCount,
    Endless,
    EndlessBroken,
    EndlessByNumber,
    EndlessUntil,
    Energetic,
    LeftByCount,
    LooksUp,
    NoneAreThere,
    OfIds,
    OnePlace,
    Raises,
    RaisesAndChooses,
    RaisesElse,
    Rare,
    RareTurned,
    Signed,
    Warns,
    WithoutPadding,
)

pytestmark = pytest.mark.wide

X = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))
OPEN = torch.zeros(3, 7, dtype=torch.bool)
PADDED = torch.arange(7).expand(3, 7) > 4
AUTO = {0: Dim.AUTO, 1: Dim.AUTO}


def _optimized(module: nn.Module, args: tuple[Any, ...], **options: Any) -> Any:
    torch.manual_seed(0)
    return attngraph.optimize(module.eval(), args, **options)


@pytest.mark.parametrize("kind", [WithoutPadding, AllVisible])
@pytest.mark.parametrize("sample", [OPEN, PADDED], ids=["open", "padded"])
@pytest.mark.parametrize("shapes", [None, (AUTO, AUTO)], ids=["static", "dynamic"])
def test_a_shortcut_is_left_out(kind: type[Attends], sample: Tensor, shapes: Any) -> None:
    module = kind()
    optimized = _optimized(module, (X, sample), dynamic_shapes=shapes)
    assert [site.status for site in optimized.report.sites] == ["fused"]
    (note,) = (note for note in optimized.report.notes if "chooses by a tensor's values" in note)
    assert "data_branches.py" in note
    with torch.no_grad():
        for hidden in (OPEN, PADDED, PADDED.flip(1)):
            torch.testing.assert_close(optimized(X, hidden), module(X, hidden))


@pytest.mark.parametrize("way", ASKED)
def test_numbers_of_tensors_are_asked_as_tensors_are(way: str) -> None:
    module = Asks(ASKED[way])
    optimized = _optimized(module, (X, PADDED), dynamic_shapes=(AUTO, AUTO))
    assert [site.status for site in optimized.report.sites] == ["fused"]
    with torch.no_grad():
        for hidden in (OPEN, PADDED, PADDED.flip(1)):
            torch.testing.assert_close(optimized(X, hidden), module(X, hidden))


def test_a_model_that_needs_its_numbers_runs_with_these() -> None:
    module = LooksUp()
    optimized = _optimized(module, (X, PADDED))
    with torch.no_grad():
        for hidden in (OPEN, PADDED):
            torch.testing.assert_close(optimized(X, hidden), module(X, hidden))


@pytest.mark.parametrize("hidden", [[], [0], [5, 6]], ids=["open", "left", "right"])
def test_a_mask_of_zeros_and_lowest_numbers_is_hidden_by_these(hidden: list[int]) -> None:
    lowest = torch.finfo(torch.float32).min
    sample = torch.zeros(3, 7)
    sample[:, hidden] = lowest
    optimized = _optimized(Additive(), (X, sample))
    with torch.no_grad():
        for mask in (OPEN, PADDED, PADDED.flip(1), torch.arange(7).expand(3, 7) == 5):
            added = mask * lowest
            torch.testing.assert_close(optimized(X, added), Additive()(X, added))


@pytest.mark.parametrize("sample", [OPEN, PADDED], ids=["open", "padded"])
def test_sides_that_are_equal_on_every_usual_mask_are_told_apart(sample: Tensor) -> None:
    optimized = _optimized(OnePlace(), (X, sample))
    for place in range(7):
        hidden = (torch.arange(7) == place).expand(3, 7)
        torch.testing.assert_close(optimized(X, hidden), OnePlace()(X, hidden))


@pytest.mark.parametrize("pads", [0, 2])
def test_a_mask_that_is_read_off_ids(pads: int) -> None:
    ids = torch.randint(4, 24, (2, 9), generator=torch.Generator().manual_seed(0))
    ids[0, 9 - pads :] = 1
    module = OfIds().eval()
    optimized = _optimized(module, (ids,), dynamic_shapes=(AUTO,))
    other = ids.roll(3, 1)
    with torch.no_grad():
        for given in (ids, other, ids.masked_fill(ids == 1, 5)):
            torch.testing.assert_close(optimized(given), module(given))


def test_the_causal_mask_that_torch_looks_for() -> None:
    module = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    optimized = _optimized(module, (X, X[:, :5]), kwargs={"tgt_mask": causal})
    other = causal.clone()
    other[3, 1] = -torch.inf  # of the same size, and not causal
    with torch.no_grad():
        for mask in (causal, other):
            expected = module(X, X[:, :5], tgt_mask=mask)
            torch.testing.assert_close(optimized(X, X[:, :5], tgt_mask=mask), expected)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_frames_of_zeros_are_hidden_wherever_they_are(start: int) -> None:
    """The sample has leading ones, as rows that are padded on the left."""
    module, padded = Energetic().eval(), X.clone()
    padded[1, :start] = 0
    optimized = _optimized(module, (padded,))
    for place in range(7):
        x = X.clone()
        x[:, place] = 0
        torch.testing.assert_close(optimized(x), module(x))
    torch.testing.assert_close(optimized(X), module(X))


def test_a_clamp_that_is_only_made_where_it_does_something() -> None:
    optimized = _optimized(Clamped(), (X,))
    for x in (X, X * 100):
        torch.testing.assert_close(optimized(x), Clamped()(x))


@pytest.mark.parametrize(
    ("module", "args"),
    [
        (Differs(), (X, OPEN)),
        (Differs(), (X, PADDED)),
        (DiffersByItem(), (X, PADDED)),
        (DiffersByComparison(), (X, OPEN)),
        (ByInt(), (X, PADDED)),
        (Rare(), (X,)),
        (RareTurned(), (X,)),
        (Signed(), (X.abs(),)),
        (Signed(), (-X.abs(),)),
        (Signed(), (X * 0,)),
        (Signed(), (X,)),
        (DiffersBelow(), (X,)),
        (RaisesAndChooses(), (X,)),
        (Catches(), (X,)),
    ],
    ids=[
        "open",
        "padded",
        "item",
        "comparison",
        "int",
        "rare",
        "rare, turned",
        "positive",
        "negative",
        "zero",
        "mixed",
        "none below",
        "raises and chooses",
        "catches",
    ],
)
def test_sides_that_differ_are_both_computed(module: nn.Module, args: Any) -> None:
    optimized = _optimized(module, args)
    (note,) = (note for note in optimized.report.notes if "computes both sides" in note)
    assert "data_branches.py" in note
    for times in (1.0, -1.0, 0.0, 1e7):
        for masks in [(OPEN,), (PADDED,)] if len(args) > 1 else [()]:
            for x in (X, X.abs()):
                if isinstance(module, RaisesAndChooses) and times == 1e7:
                    continue
                given = (x * times, *masks)
                torch.testing.assert_close(optimized(*given), module(*given))


@pytest.mark.parametrize("kind", [Endless, EndlessUntil, EndlessBroken, EndlessByNumber])
def test_a_loop_without_an_end_is_refused(kind: type[Endless]) -> None:
    """Before it has gone on for long."""
    kind.turns = 0
    with pytest.raises(CaptureError, match="loop by a data-dependent condition") as refused:
        _optimized(kind(), (X,))
    assert "data_branches.py" in str(refused.value)
    assert kind.turns < 150, kind.turns


@pytest.mark.parametrize("module", [EndedByCount(), LeftByCount()])
def test_a_loop_that_python_ends_is_followed(module: nn.Module) -> None:
    optimized = _optimized(module, (X,))
    for x in (X, 8 * X, X + 9, -X):
        torch.testing.assert_close(optimized(x), module(x))


def test_a_trace_alone_follows_nothing() -> None:
    with pytest.raises(CaptureError, match="data-dependent condition"):
        attngraph.capture(WithoutPadding().eval(), (X, OPEN))


def test_without_verification_both_sides_are_computed() -> None:
    module = WithoutPadding()
    optimized = _optimized(module, (X, OPEN), verify="off")
    assert any("computes both sides" in note for note in optimized.report.notes)
    with torch.no_grad():
        for hidden in (OPEN, PADDED):
            torch.testing.assert_close(optimized(X, hidden), module(X, hidden))


@pytest.mark.parametrize("module", [Asserts(), AssertsNot(), Raises(), RaisesElse()])
def test_an_assertion_is_told(module: nn.Module) -> None:
    optimized = _optimized(module, (X,))
    assert any("raises an error for some values" in note for note in optimized.report.notes)
    torch.testing.assert_close(optimized(-X), module(-X))


def test_what_is_only_said_is_no_choice() -> None:
    optimized = _optimized(Warns(), (X,))
    assert not any("data_branches.py" in note for note in optimized.report.notes)


def test_zeros_are_compared_where_several_inputs_give_them() -> None:
    module = NoneAreThere()
    optimized = _optimized(module, (X,))
    for x in (X, -X.abs(), X.abs()):
        torch.testing.assert_close(optimized(x), module(x))
