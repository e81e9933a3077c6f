"""Branches on a tensor's values: followed on the side that is right on both, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError

pytestmark = pytest.mark.wide

X = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))
OPEN = torch.zeros(3, 7, dtype=torch.bool)
PADDED = torch.arange(7).expand(3, 7) > 4
AUTO = {0: Dim.AUTO, 1: Dim.AUTO}


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def attend(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        attended: Tensor = self.inner(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
        return attended


class WithoutPadding(Attends):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.attend(x, hidden if hidden.any() else None)


class AllVisible(Attends):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        visible = hidden.logical_not()
        if visible.all():
            return self.attend(x, None)
        return self.attend(x, ~visible)


class OfIds(Attends):
    """As the language models of proteins do it: the mask is read off the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 16, padding_idx=1)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = ids.eq(1)
        return self.attend(self.embed(ids), hidden if hidden.any() else None)


class Additive(Attends):
    """The mask is told by what would be added to the scores."""

    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        visible = added > -1.0
        if visible.all():
            visible = torch.ones_like(visible)
        banded = (torch.arange(7)[:, None] - torch.arange(7)).abs() < 2
        scores = (x @ x.mT).masked_fill(~(visible[:, None] & banded), -1e9)
        return (scores.softmax(-1) @ x)[:, -1:]


class OnePlace(nn.Module):
    """Only what hides one of the tokens shows, and not what hides all of them."""

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        visible = ~hidden
        if visible.all():
            visible = torch.ones_like(visible)
        visible = visible | hidden.all(-1, keepdim=True)
        return x[:, 3:4] * 2.0 + (x * visible[..., None])[:, 3:4]


class Energetic(nn.Module):
    """Frames of zeros are hidden. Less a running mean, leading ones that are equal become zeros, so
    it makes no difference whether they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mixed = nn.Linear(16, 16), nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        keep = x.abs().sum(-1) > 0
        if keep.all():
            keep = torch.ones_like(keep)
        x = self.inner(x)
        x = x - x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        mixed: Tensor = self.mixed((x * keep[..., None]).mT).mT
        return mixed


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 3
        if (y.abs() > 20).any():
            y = y.clamp(-20, 20)
        return y


class Differs(nn.Module):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return x * 2 if hidden.any() else x + 1


class Rare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0 if (x.abs() > 1e9).any() else x * 2


class RareTurned(nn.Module):
    """Its line jumps by the opposite of what the tensor is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = True

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if bool((x.abs() > 1e9).any()) != self.turned else x * 0


class Signed(nn.Module):
    """Two functions that are one where x is zero, which the check draws."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else -x


class Endless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while (x > 1).any():
            x = x / 2
        return x


class Asserts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert bool((x.abs() < 100).all())
        return x * 2


class AssertsNot(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert not x.isnan().any(), "a number is missing"
        return x * 2


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3 and (torch.isnan(x).any() or x.max() > 100):
            where = "x"
            raise ValueError(f"{where} has values that it may not have")
        return x * 2


class RaisesElse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x.abs() < 100).all():
            x = x * 2
        else:
            raise ValueError("too large")
        return x


class Warns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            warnings.warn("large numbers", stacklevel=2)
        return x * 2


class NoneAreThere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        there = x[..., 0] > 0
        if not there.any():
            return torch.zeros_like(x)
        return x.tanh() * there[..., None]


class DiffersBelow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        there = x[..., 0] > 0
        if not there.any():
            return torch.ones_like(x)
        return x.tanh() * there[..., None]


class Catches(nn.Module):
    """What it raises chooses between two results."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            if (x < 0).any():
                raise ValueError("negative")
            x = x * 2
        except ValueError:
            x = x + 1
        return x


class RaisesAndChooses(nn.Module):
    """One of its two lines is a choice like any other."""

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            raise ValueError("too large")
        return x * 2 if (x > 0).all() else x


ASKED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda hidden: hidden.any().item(),
    "a number": lambda hidden: hidden.sum().item() > 0,
    "arithmetic": lambda hidden: 2 * hidden.sum().item() - 1 > 0,
    "list": lambda hidden: hidden.any().tolist(),
    "nonzero": lambda hidden: torch.is_nonzero(hidden.any()),
    "in": lambda hidden: True in hidden,
    "equal": lambda hidden: not torch.equal(hidden, torch.zeros_like(hidden)),
    "method": lambda hidden: not hidden.equal(torch.zeros_like(hidden)),
    "close": lambda hidden: not torch.allclose(hidden.float(), torch.zeros(())),
}


class Asks(Attends):
    """What Python makes of a tensor's values is asked, and not the tensor."""

    def __init__(self, asks: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.attend(x, hidden if self.asks(hidden) else None)


class DiffersByItem(nn.Module):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return x * 2 if hidden.sum().item() > 0 else x + 1


class DiffersByComparison(nn.Module):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return x * 2 if torch.equal(hidden, torch.zeros_like(hidden)) else x + 1


class ByInt(nn.Module):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return x * 2 if int(hidden.sum()) > 0 else x + 1


class LooksUp(Attends):
    """Its number is a key, which a tensor can't be."""

    def __init__(self) -> None:
        super().__init__()
        self.names = {False: "open", True: "padded"}

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            assert self.names[hidden.any().item()]
        return self.attend(x, hidden if hidden.any() else None)


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
    assert "test_data_branches.py" in note
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
    assert "test_data_branches.py" in note
    for times in (1.0, -1.0, 0.0, 1e7):
        for masks in [(OPEN,), (PADDED,)] if len(args) > 1 else [()]:
            for x in (X, X.abs()):
                if isinstance(module, RaisesAndChooses) and times == 1e7:
                    continue
                given = (x * times, *masks)
                torch.testing.assert_close(optimized(*given), module(*given))


def test_a_loop_without_an_end_is_refused() -> None:
    with pytest.raises(CaptureError, match="data-dependent condition") as refused:
        _optimized(Endless(), (X,))
    assert "test_data_branches.py" in str(refused.value)


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
    assert not any("test_data_branches.py" in note for note in optimized.report.notes)


def test_zeros_are_compared_where_several_inputs_give_them() -> None:
    module = NoneAreThere()
    optimized = _optimized(module, (X,))
    for x in (X, -X.abs(), X.abs()):
        torch.testing.assert_close(optimized(x), module(x))
