"""Loops over a fixed number of steps: as loops from some steps on, and right either way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import ParityError, UsageError
from attngraph.export.parity.budget import FACTOR

pytestmark = pytest.mark.wide
WIDTH = 4


class Erasing(nn.Module):
    """S = S − k sin((b ⊙ k)ᵀ S) + k vᵀ, which no operator computes: it isn't linear in S."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.maps = nn.Linear(width, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, b = self.maps(self.placed(x)).chunk(4, dim=-1)
        k, b = nn.functional.normalize(k, dim=-1), torch.sigmoid(b)
        state = x.new_zeros(x.shape[0], WIDTH, WIDTH)
        found = []
        for t in range(x.shape[1]):
            erased = torch.einsum("bk,bkv->bv", b[:, t] * k[:, t], state)
            written = v[:, t] - torch.sin(erased) * self.share(t, x)
            state = state + k[:, t, :, None] * written[:, None]
            found.append(torch.einsum("bk,bkv->bv", q[:, t], state))
        return torch.stack(found, 1)

    def placed(self, x: Tensor) -> Tensor:
        return x

    def share(self, t: int, x: Tensor) -> float:
        return 1.0


class Numbered(Erasing):
    """Reads the number of its step."""

    def share(self, t: int, x: Tensor) -> float:
        return 1 / (t + 1)


class Counted(Erasing):
    """Reads how many steps there are."""

    def share(self, t: int, x: Tensor) -> float:
        return (t + 1) / x.shape[1]


class Tabled(Erasing):
    """Has places for so many steps, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(24, WIDTH))

    def placed(self, x: Tensor) -> Tensor:
        return x + self.table


class Asking(Erasing):
    """Asks a tensor for its value, which no scan can."""

    def share(self, t: int, x: Tensor) -> float:
        return 0.5 if float(torch.tensor([1.0, 2.0, 3.0])[t % 3]) > 1.5 else 0.25


class Smoothed(nn.Module):
    """One number of state for each feature."""

    def forward(self, x: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        state, found = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for t in range(x.shape[1]):
            state = torch.sigmoid(rate[:, t]) * state + torch.tanh(x[:, t] * state + x[:, t])
            found[:, t] = state
        return found, state


def _ops(optimized: attngraph.Optimized) -> list[str]:
    return [node.op_type for node in optimized.model.graph.all_nodes()]


def _is_right(optimized: attngraph.Optimized, module: nn.Module, *args: Tensor) -> None:
    with torch.no_grad():
        expected = module(*args)
    found = optimized(*args)
    pairs = (
        zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    )
    for one, other in pairs:
        assert (one - other).abs().max() <= 2e-5 * other.abs().max()


@pytest.mark.parametrize("kind", [Erasing, Numbered, Counted, Tabled])
def test_many_steps_are_one_scan(kind: type[Erasing]) -> None:
    module, x = kind().eval(), torch.randn(2, 24, WIDTH)
    optimized = attngraph.optimize(module, (x,))
    ops = _ops(optimized)
    assert ops.count("Scan") == 1
    assert len(ops) < 60
    _is_right(optimized, module, x)
    _is_right(optimized, module, 3 * torch.randn(2, 24, WIDTH))


def test_the_length_stays_fixed_and_is_said_to_be() -> None:
    optimized = attngraph.optimize(Erasing().eval(), (torch.randn(2, 24, WIDTH),))
    (site,) = optimized.report.sites
    assert site.code == "recurrence-kept"
    assert "of the sample's length" in str(site)
    with pytest.raises(UsageError, match="24"):
        optimized(torch.randn(2, 25, WIDTH))


def test_other_dims_stay_open() -> None:
    module = Erasing().eval()
    optimized = attngraph.optimize(
        module, (torch.randn(2, 24, WIDTH),), dynamic_shapes=({0: Dim("batch", max=8)},)
    )
    assert _ops(optimized).count("Scan") == 1
    for batch in (1, 2, 5):
        _is_right(optimized, module, torch.randn(batch, 24, WIDTH))


def test_several_inputs_and_states_that_are_returned() -> None:
    module, sample = Smoothed().eval(), (torch.randn(2, 32, 5), torch.randn(2, 32, 5))
    optimized = attngraph.optimize(module, sample)
    assert _ops(optimized).count("Scan") == 1
    _is_right(optimized, module, *sample)


def test_as_many_features_as_steps() -> None:
    module, x = Erasing(24).eval(), torch.randn(2, 24, 24)
    optimized = attngraph.optimize(module, (x,))
    assert _ops(optimized).count("Scan") == 1
    _is_right(optimized, module, x)


@pytest.mark.parametrize(("kind", "steps"), [(Erasing, 8), (Asking, 24)])
def test_few_steps_and_steps_that_no_scan_takes_are_unrolled(
    kind: type[Erasing], steps: int
) -> None:
    module, x = kind().eval(), torch.randn(2, steps, WIDTH)
    optimized = attngraph.optimize(module, (x,))
    assert "Scan" not in _ops(optimized)
    assert any(f"unrolled into {steps} steps" in note for note in optimized.report.notes)
    _is_right(optimized, module, x)


class Patches(nn.Module):
    """Steps through the patches of an image, forwards and backwards, item by item."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, 4, 4)
        self.rates = nn.Linear(WIDTH, WIDTH)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.cut(image).flatten(2).transpose(1, 2)
        ahead: list[Tensor] = []
        behind: list[Tensor] = []
        state = torch.zeros_like(patches[:, 0])
        for patch, rate in zip(
            patches.unbind(1), torch.sigmoid(self.rates(patches)).unbind(1), strict=True
        ):
            state = rate * state + (1 - rate) * torch.tanh(patch + state)
            ahead.append(state)
        before = torch.stack(ahead, 1)
        for t in reversed(range(patches.shape[1])):
            state = torch.tanh(state) * patches[:, t] + before[:, t]
            behind.insert(0, state)
        return before + torch.stack(behind, 1)


def test_patches_of_an_image() -> None:
    module, image = Patches().eval(), torch.randn(1, 3, 20, 20)
    optimized = attngraph.optimize(module, (image,))
    assert _ops(optimized).count("Scan") == 2
    _is_right(optimized, module, image)
    _is_right(optimized, module, 3 * torch.randn(1, 3, 20, 20))


class Layers(nn.Module):
    """As many layers as there are rows, which is no loop over time, beside one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(16)])
        self.loop = Erasing()

    def forward(self, x: Tensor) -> Tensor:
        for at in range(16):
            x = x + torch.tanh(self.layers[at](x)) * x[:, at : at + 1]
        return self.loop(x)


def test_layers_stay_apart_from_the_steps_beside_them() -> None:
    torch.manual_seed(0)  # of others, products of 16 layers may be off by more than one is
    module, x = Layers().eval(), torch.randn(2, 16, WIDTH) / 4
    optimized = attngraph.optimize(module, (x,))
    assert len([op for op in _ops(optimized) if op == "Tanh"]) == 16
    _is_right(optimized, module, x)


class Lists(nn.Module):
    """Lists with a place for each step, filled from both ends and read afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        steps, state = x.shape[1], torch.zeros_like(x[:, 0])
        ahead: list[Tensor] = []
        for t in range(steps):
            state = torch.tanh(state * x[:, t] + x[:, t])
            ahead.append(state)
        behind: list[Any] = [None] * steps
        for t in range(steps - 1, -1, -1):
            state = torch.cos(state) * x[:, t]
            behind[t] = state
        return torch.stack([ahead[t] + behind[t] for t in range(steps)], 1)


class Whilst(nn.Module):
    """Counts by itself."""

    def forward(self, x: Tensor) -> Tensor:
        t, state, found = 0, torch.zeros_like(x[:, 0]), []
        while t < x.shape[1]:
            state = torch.tanh(state * x[:, t]) + x[:, t]
            found.append(state)
            t += 1
        return torch.stack(found, 1)


class FromTheSecond(nn.Module):
    """Begins with the second row, beside the first."""

    def forward(self, x: Tensor) -> Tensor:
        state, found = x[:, 0], []
        for t in range(1, x.shape[1]):
            state = torch.tanh(state * (x[:, t] - x[:, t - 1]))
            found.append(state)
        return torch.stack(found, 1)


@pytest.mark.parametrize("kind", [Lists, Whilst, FromTheSecond])
def test_spellings_of_loops(kind: type[nn.Module]) -> None:
    module, x = kind().eval(), torch.randn(2, 20, WIDTH)
    optimized = attngraph.optimize(module, (x,))
    ops = _ops(optimized)
    assert "Scan" in ops
    assert len(ops) < 40
    _is_right(optimized, module, x)
    _is_right(optimized, module, torch.randn(2, 20, WIDTH))


class Creeping(nn.Module):
    """A state that hardly moves, of which the error of each tanh is left to the next."""

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.tanh(state + x[:, t] / 64)
            found.append(state)
        return torch.stack(found, 1)


def test_errors_of_a_kernel_that_add_up_over_the_steps_are_no_fault() -> None:
    module, x = Creeping().eval(), torch.randn(2, 128, WIDTH)
    _is_right(attngraph.optimize(module, (x,)), module, x)


class Settling(nn.Module):
    """Goes through a loop of as many steps in each of its own."""

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            for _ in range(16):
                state = state + torch.tanh(x[:, t] - state) / 16
            found.append(state)
        return torch.stack(found, 1)


def test_a_loop_within_a_step_is_unrolled_there() -> None:
    module, x = Settling().eval(), torch.randn(2, 16, WIDTH)
    optimized = attngraph.optimize(module, (x,))
    ops = _ops(optimized)
    assert (ops.count("Scan"), ops.count("Tanh")) == (1, 16)
    _is_right(optimized, module, x)


class Resetting(nn.Module):
    """Each step chooses by the values of its state: of few steps, too, there are many ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = self.map(state) + x[:, t]
            if state.norm() > 3:
                state = -state * 0.5
            found.append(state)
        return torch.stack(found, 1)


def test_few_steps_that_choose_by_values_are_a_loop() -> None:
    module, x = Resetting().eval(), torch.randn(2, 12, WIDTH)
    optimized = attngraph.optimize(module, (x,))
    assert _ops(optimized).count("Scan") == 1
    for times in (0.0, 0.5, 1.0, -2.0):
        _is_right(optimized, module, x * times)


class Remaining(nn.Module):
    """Divides by how much of its loop remains, a size that no input of a step has."""

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.tanh(state + x[:, t])
            found.append(state / (1 - (t + 1) / (x.shape[1] + 1)))
        return torch.stack(found, 1)


@pytest.mark.defect  # a budget that nothing meets
def test_what_is_out_of_budget_is_told_with_what_becomes_of_its_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FACTOR, "fp32", 1e-9)
    with pytest.raises(ParityError, match=r"out of its error budget.*No value loses half"):
        attngraph.optimize(
            Remaining().eval(), (torch.randn(2, 20, WIDTH),), dynamic_shapes=({1: Dim("t")},)
        )
