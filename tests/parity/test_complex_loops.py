"""Loops over time whose state is complex (LRU, S4D, S5): a Scan over its parts, as eager is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import LoweringError

pytestmark = pytest.mark.wide
WIDTH, STATES = 6, 5


class Recurrent(nn.Module):
    """Orvieto et al., 2023: h_t = λ h_{t−1} + B x_t, of which the real part of C h_t is read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rate, self.angle = (nn.Parameter(torch.rand(STATES)) for _ in range(2))
        self.b = nn.Parameter(torch.randn(STATES, WIDTH, dtype=torch.complex64))
        self.c = nn.Parameter(torch.randn(WIDTH, STATES, dtype=torch.complex64))

    def step(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        decay = torch.exp(-self.rate.exp() + 1j * self.angle)
        state = decay * state + x.to(self.b.dtype) @ self.b.T
        return state, (state @ self.c.T).real

    def run(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        given = []
        for t in range(x.shape[1]):
            state, y = self.step(state, x[:, t])
            given.append(y)
        return torch.stack(given, 1), state

    def forward(self, x: Tensor) -> Any:
        return self.run(x, torch.zeros(x.shape[0], STATES, dtype=self.b.dtype))[0]


class GivenState(Recurrent):
    """The states, stacked, and the last one; the first is an input."""

    def step(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        state, _ = super().step(state, x)
        return state, state

    def forward(self, x: Tensor, state: Tensor) -> Any:  # type: ignore[override]
        states, last = self.run(x, state)
        return (states @ self.c.T).real, last


class Turned(Recurrent):
    """Numbers in the code, a conjugate, a quotient, and a state that is cut by its size."""

    def step(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        state, _ = super().step(state.conj() * 0.5j, x)
        state = state / (2 + 1j)
        size = state.abs()
        state = state / (size + 1e-3) * torch.relu(size - 0.1)
        return state, torch.view_as_real(state).flatten(-2)


class Squashed(Recurrent):
    """tanh of complex numbers."""

    def step(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        state, _ = super().step(state, x)
        state = torch.tanh(state)
        return state, state.real


def _optimised(kind: type[Recurrent], *more: Tensor) -> tuple[nn.Module, Any]:
    module = kind().eval()
    batch = Dim("batch", max=8)
    shapes = ({0: batch, 1: Dim("seq", max=256)}, *({0: batch} for _ in more))
    return module, attngraph.optimize(
        module, (torch.randn(2, 7, WIDTH), *more), dynamic_shapes=shapes
    )


def _assert_as_eager(module: nn.Module, optimised: Any, *args: Tensor) -> None:
    torch.testing.assert_close(optimised(*args), module(*args), rtol=1e-5, atol=1e-5)


def _ops(optimised: Any) -> list[str]:
    return [node.op_type for node in optimised.model.graph.all_nodes()]


@pytest.mark.parametrize("kind", [Recurrent, Turned])
def test_a_complex_state_is_carried_as_a_pair(kind: type[Recurrent]) -> None:
    module, optimised = _optimised(kind)
    assert _ops(optimised).count("Scan") == 1
    for batch, length in ((1, 1), (3, 2), (2, 65)):
        _assert_as_eager(module, optimised, torch.randn(batch, length, WIDTH))


def test_a_complex_state_goes_in_and_out() -> None:
    module, optimised = _optimised(GivenState, torch.randn(2, STATES, dtype=torch.complex64))
    for batch, length in ((1, 1), (3, 33)):
        state = torch.randn(batch, STATES, dtype=torch.complex64)
        _assert_as_eager(module, optimised, torch.randn(batch, length, WIDTH), state)


def test_why_it_stays_a_loop_is_told_once() -> None:
    _, optimised = _optimised(Recurrent)
    report = str(optimised.report)
    assert report.count("stays a loop") == report.count("made of complex numbers") == 1
    assert "unknown whether" not in report


def test_the_op_without_a_form_on_parts_is_named() -> None:
    with pytest.raises(LoweringError, match=r"aten\.tanh at .* has no form on the real") as error:
        _optimised(Squashed)
    assert "register_lowering" not in str(error.value)


def test_steps_of_a_static_length_are_as_many() -> None:
    """What they are made of is longer than what is looked at above any other rewrite."""
    model, x = Recurrent().eval(), torch.randn(2, 24, WIDTH)
    torch.testing.assert_close(attngraph.optimize(model, (x,))(x), model(x), rtol=1e-4, atol=1e-5)
