"""Loops over the experts that some token chose have a turn for each, where that is the model."""

from __future__ import annotations

from collections.abc import Callable

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


def _tokens(*rows: int) -> Tensor:
    return torch.randn(*rows, H, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", [Chosen, Flat, Where, Spare, Skips, Named])
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


@pytest.mark.parametrize("kind", [Shifts, Scales, All, Ends])
def test_a_turn_that_does_something_without_rows_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match="data-dependent"):
        optimize(kind().eval(), (_tokens(2, 7),), dynamic_shapes=({1: Dim("seq")},))


def test_a_side_that_counts_for_an_expert_without_rows_is_refused() -> None:
    with pytest.raises(CaptureError, match="too many ways"):
        optimize(SkipsAnAddend().eval(), (_tokens(2, 7),), dynamic_shapes=({1: Dim("seq")},))


def test_without_a_check_such_a_loop_is_refused() -> None:
    with pytest.raises(CaptureError, match="data-dependent"):
        optimize(Chosen().eval(), (_tokens(2, 7),), verify="off")
