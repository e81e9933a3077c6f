"""Loops over the experts that some token chose have a turn for each, where that is the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

from attngraph import optimize
from attngraph.errors import CaptureError
from tests.parity.experts import E, H, Stacked

pytestmark = pytest.mark.wide

Indices = Callable[[Tensor], Tensor]


class Chosen(Stacked):
    classes = E

    def is_left_out(self, e: int | Tensor) -> bool:
        return bool(e == E)

    def chosen(self, counts: Tensor) -> Tensor:
        return torch.greater(counts, 0).nonzero()

    def after(self, result: Tensor) -> Tensor:
        return result

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        result = torch.zeros_like(x)
        mask = functional.one_hot(experts, self.classes).permute(2, 1, 0)
        for at in self.chosen(mask.sum((-1, -2))):
            e = at[0] if at.ndim else at
            if self.is_left_out(e):
                continue
            place, row = torch.where(mask[e])
            made = self.expert(x[row], e) * weights[row, place, None]
            result.index_add_(0, row, made)
            result = self.after(result)
        return result


class Flat(Chosen):
    def chosen(self, counts: Tensor) -> Tensor:
        return counts.nonzero().flatten()


class Where(Chosen):
    def chosen(self, counts: Tensor) -> Tensor:
        return torch.where(counts > 0)[0]


class Named(Chosen):
    """Experts that are looked up by a name, behind a router that is moved to where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, H)
        for e in range(E):
            self.add_module(f"expert_{e}", nn.Linear(H, H))

    def mix(self, x: Tensor) -> Tensor:
        self.router = self.router.to(torch.float32)
        return super().mix(self.router(x))

    def expert(self, x: Tensor, e: int) -> Tensor:
        return torch.relu(self.get_submodule(f"expert_{e}")(x))


class Shifts(Chosen):
    """Each turn adds a little, that of an expert without rows too."""

    def after(self, result: Tensor) -> Tensor:
        return result + 1e-6


class All(Chosen):
    """No expert is ever left out, so that nothing shows what such a turn does."""

    count = E


class Spare(Chosen):
    """A class more than there are experts, which no token has, and no turn could look up."""

    classes = E + 1

    def is_left_out(self, e: int | Tensor) -> bool:
        return False


class Skips(Chosen):
    """An expert without rows is passed over, which the model itself never meets."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        result = torch.zeros_like(x)
        mask = functional.one_hot(experts, self.classes).permute(2, 1, 0)
        for at in self.chosen(mask.sum((-1, -2))):
            place, row = torch.where(mask[at[0]])
            if row.numel() == 0:
                continue
            result = self.joined(
                result, row, self.expert(x[row], at[0]) * weights[row, place, None]
            )
        return result

    def joined(self, result: Tensor, row: Tensor, made: Tensor) -> Tensor:
        return result.index_add(0, row, made)


class SkipsAnAddend(Skips):
    """What is passed over for an expert without rows isn't nothing."""

    def joined(self, result: Tensor, row: Tensor, made: Tensor) -> Tensor:
        return result.index_add(0, row, made) + 0.25


class Ends(Spare):
    """The turn after the last expert's looks none up, and adds to the result."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        return super().expert(x, min(e, E - 1))

    def after(self, result: Tensor) -> Tensor:
        return result + 1e-6


class Scales(Stacked):
    def mix(self, x: Tensor) -> Tensor:
        _, experts = self.route(x)
        for _ in functional.one_hot(experts, E).sum((0, 1)).nonzero():
            x = x * 2
        return x


class Unique(Stacked):
    """The experts that some row chose, once each, in tokens by choices (LLMs-from-scratch)."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        result = torch.zeros_like(x)
        for at in self.each(experts):
            e = int(at)
            mask = experts == e
            if not mask.any():
                continue
            row = mask.any(-1).nonzero().squeeze(-1)
            if self.is_passed(row):
                result = self.passed(result, row)
                continue
            place = mask[row].int().argmax(-1, keepdim=True)
            weight = weights.index_select(0, row).gather(-1, place)
            made = self.expert(x.index_select(0, row), e) * weight
            result = self.after(result.index_add(0, row, made))
        return result

    def each(self, experts: Tensor) -> Iterable[Tensor | int]:
        return torch.unique(experts)

    def is_passed(self, row: Tensor) -> bool:
        return row.numel() == 0

    def passed(self, result: Tensor, row: Tensor) -> Tensor:
        return result

    def after(self, result: Tensor) -> Tensor:
        return result


class UniqueNumbers(Unique):
    def each(self, experts: Tensor) -> Iterable[Tensor | int]:
        numbers: list[int] = experts.T.flatten().unique(sorted=True).cpu().tolist()
        return numbers


class UniqueOfSorted(Unique):
    """Places that a sort gives, of which the first are taken."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = self.gate(x).softmax(-1).sort(descending=True)
        return weights[:, : self.count], experts[:, : self.count]


class UniqueOfLargest(Unique):
    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        experts = self.gate(x).argmax(-1, keepdim=True)
        return self.gate(x).softmax(-1).gather(-1, experts), experts


class UniqueShifts(Unique):
    """Each turn adds a little where no row is, before anything is asked."""

    def each(self, experts: Tensor) -> Iterable[Tensor | int]:
        self.turns = 0
        for e in super().each(experts):
            self.turns += 1
            yield e

    def mix(self, x: Tensor) -> Tensor:
        result = super().mix(x)
        return result + 1e-6 * self.turns


class UniqueOfAll(Unique):
    """No expert is ever left out."""

    count = E


class UniqueCounted(Unique):
    def each(self, experts: Tensor) -> Iterable[Tensor | int]:
        found, counts = experts.unique(return_counts=True)
        return (e for e, count in zip(found, counts, strict=True) if count > 0)


class UniqueOfNumbers(Unique):
    """Numbers that count no places."""

    def each(self, experts: Tensor) -> Iterable[Tensor | int]:
        return torch.unique(experts + 1) - 1


class UniqueWritten(Unique):
    """Places of which some may be written over, by -1 where the sample has none."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = super().route(x)
        return weights, experts.masked_fill_(x[:, :1] > 1000, -1)


class UniqueOfRows(Unique):
    """Rows that are alone count twice."""

    def is_passed(self, row: Tensor) -> bool:
        return row.numel() < 2

    def passed(self, result: Tensor, row: Tensor) -> Tensor:
        return result.index_add(0, row, torch.ones_like(result)[row])


class UniqueAdds(Unique):
    """What is done where no row is left isn't nothing; no run shows it."""

    def passed(self, result: Tensor, row: Tensor) -> Tensor:
        return result + 0.25


def _tokens(*rows: int) -> Tensor:
    return torch.randn(*rows, H, generator=torch.Generator().manual_seed(1))


class AddsAnInput(Unique):
    """Each turn adds what the sample has zeros of."""

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        self.more = more
        return super().forward(x)

    def mix(self, x: Tensor) -> Tensor:
        _, experts = self.route(x)
        result = torch.zeros_like(x)
        for at in torch.unique(experts):
            row = (experts == at).any(-1).nonzero().squeeze(-1)
            result = result.index_add(0, row, self.expert(x[row], int(at))) + self.more
        return result


UNIQUE = [Unique, UniqueNumbers, UniqueOfSorted, UniqueOfLargest]
UNLIKE = [UniqueShifts, UniqueOfAll, UniqueCounted, UniqueOfNumbers, UniqueWritten]


@pytest.mark.parametrize("kind", [Chosen, Flat, Where, Spare, Skips, Named, *UNIQUE])
@pytest.mark.parametrize("dynamic", [True, False])
def test_an_expert_that_no_token_chose_has_a_turn_without_rows(
    kind: type[nn.Module], dynamic: bool
) -> None:
    model = kind().eval()
    shapes = ({1: Dim("seq")},) if dynamic else None
    optimized = optimize(model, (_tokens(2, 7),), dynamic_shapes=shapes)
    assert any("a turn for each place" in note for note in optimized.report.notes)
    alike = _tokens(1, 1).expand(2, 7, H).contiguous()
    with torch.no_grad():
        for x in (_tokens(2, 7), alike, *([_tokens(2, 1)] if dynamic else [])):
            torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [Shifts, Scales, All, Ends, *UNLIKE])
def test_a_turn_that_does_something_without_rows_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match="data-dependent"):
        optimize(kind().eval(), (_tokens(2, 7),), dynamic_shapes=({1: Dim("seq")},))


@pytest.mark.parametrize("kind", [SkipsAnAddend, UniqueOfRows, UniqueAdds])
def test_a_side_that_counts_for_an_expert_without_rows_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match="too many ways"):
        optimize(kind().eval(), (_tokens(2, 7),), dynamic_shapes=({1: Dim("seq")},))


@pytest.mark.parametrize("more", [torch.zeros(1), torch.tensor([False])])
def test_a_turn_that_adds_an_input_is_refused(more: Tensor) -> None:
    with pytest.raises(CaptureError, match="data-dependent"):
        optimize(AddsAnInput().eval(), (_tokens(2, 7), more))


def test_without_a_check_such_a_loop_is_refused() -> None:
    with pytest.raises(CaptureError, match="data-dependent"):
        optimize(Chosen().eval(), (_tokens(2, 7),), verify="off")


class Breaks(Chosen):
    """Ends by what the experts with rows made, and not by whether one has any."""

    def mix(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        result = torch.zeros_like(x)
        mask = functional.one_hot(experts, self.classes).permute(2, 1, 0)
        for at in self.chosen(mask.sum((-1, -2))):
            place, row = torch.where(mask[at[0]])
            made = self.expert(x[row], at[0]) * weights[row, place, None]
            result = result.index_add(0, row, made)
            if result.abs().max() > 3:
                break
        return result


def test_to_leave_behind_the_last_expert_says_nothing_of_leaving_before_it() -> None:
    torch.manual_seed(0)
    model, x = Breaks().eval(), _tokens(2, 7)
    optimized = optimize(model, (x,), dynamic_shapes=({1: Dim("seq")},))
    for given in (x, 4 * x, 16 * x, x / 16, 4 * _tokens(2, 3)):
        with torch.no_grad():
            torch.testing.assert_close(optimized(given), model(given), atol=1e-5, rtol=1e-4)
