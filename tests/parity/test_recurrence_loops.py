"""Loops over a cell, unrolled in other forms: one op for each that is in order and of one cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.parity.cells import (
    HIDDEN,
    STEPS,
    WIDTH,
    Cell,
    Loop,
    gru_blend,
    gru_packed,
    gru_reset_first,
    loops,
    lstm_by_gate,
    lstm_packed,
    operators,
    rnn,
)

pytestmark = pytest.mark.wide


class Variant(Loop):
    """Loops over static steps that are written in other ways."""

    how: str

    def forward(self, x: Tensor) -> Any:
        return getattr(self, self.how)(x)

    def last_only(self, x: Tensor) -> Tensor:
        state = self.start(x)
        for t in range(x.shape[1]):
            state = self.cell(self, x[:, t], state)
        return state[0]

    def first_step_apart(self, x: Tensor) -> Tensor:
        """The first step has no state to read."""
        states = [torch.tanh(self.x[0](x[:, 0]))]
        for t in range(1, x.shape[1]):
            states.append(self.cell(self, x[:, t], (states[-1],))[0])
        return torch.stack(states, 1)

    def kept_axes(self, x: Tensor) -> Tensor:
        state, given = self.start(x), []
        for x_t in torch.tensor_split(x, STEPS, dim=1):
            state = self.cell(self, x_t.squeeze(1), state)
            given.append(state[0][:, None])
        return torch.cat(given, 1)

    def on_features(self, x: Tensor) -> Tensor:
        state, given = self.start(x), []
        for t in range(x.shape[1]):
            state = self.cell(self, x[:, t : t + 1].squeeze(1), state)
            given.append(state[0])
        return torch.cat(given, -1)

    def both_ways(self, x: Tensor) -> Tensor:
        given: list[list[Tensor]] = [[], []]
        for way, steps in enumerate((range(STEPS), reversed(range(STEPS)))):
            state = self.start(x)
            for t in steps:
                state = self.cell(self, x[:, t], state)
                given[way].append(state[0])
        return torch.cat([torch.stack(given[0], 1), torch.stack(given[1][::-1], 1)], -1)

    def a_middle_state(self, x: Tensor) -> Tensor:
        state, given = self.start(x), []
        for x_t in x.unbind(1):
            state = self.cell(self, x_t, state)
            given.append(state[0])
        return given[2] * given[-1]

    def out_of_order(self, x: Tensor) -> Tensor:
        state = self.start(x)
        for t in (0, 2, 1, 3, 4):
            state = self.cell(self, x[:, t], state)
        return state[0]

    def other_weights(self, x: Tensor) -> Tensor:
        h = self.start(x)[0]
        for t in range(STEPS):
            h = torch.tanh(self.gate(t % 4, x[:, t], h))
        return h

    def memory_between(self, x: Tensor) -> Tensor:
        """An LSTM's memory is given at each step, which no operator does."""
        state, given = self.start(x), []
        for x_t in x.unbind(1):
            state = self.cell(self, x_t, state)
            given.append(state[1])
        return torch.stack(given, 1)


VARIANTS: list[tuple[str, Cell, dict[str, int]]] = [
    ("last_only", lstm_by_gate, {"LSTM": 1}),
    ("last_only", gru_blend, {"GRU": 1}),
    ("first_step_apart", rnn, {"RNN": 1}),
    ("kept_axes", gru_packed, {"GRU": 1}),
    ("on_features", lstm_packed, {"LSTM": 1}),
    ("both_ways", lstm_by_gate, {"LSTM": 2}),
    ("a_middle_state", gru_reset_first, {"GRU": 1}),
    ("out_of_order", gru_blend, {}),
    ("other_weights", rnn, {}),
    ("memory_between", lstm_by_gate, {}),
]


@pytest.mark.parametrize(("how", "cell", "expected"), VARIANTS, ids=lambda value: str(value)[:20])
def test_loops_in_other_forms(how: str, cell: Cell, expected: dict[str, int]) -> None:
    module = Variant(cell)
    module.how = how
    assert loops(operators(module)) == expected


class TwoLayers(nn.Module):
    """Two cells in one loop over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.LSTMCell(WIDTH, HIDDEN), nn.GRUCell(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        zero = x.new_zeros(x.shape[0], HIDDEN)
        low, high, given = (zero, zero), zero, []
        for x_t in x.unbind(1):
            low = self.low(x_t, low)
            high = self.high(low[0], high)
            given.append(high)
        return torch.stack(given, 1), low[1]


def test_layers_in_one_loop_are_raised_one_by_one() -> None:
    assert loops(operators(TwoLayers())) == {"LSTM": 1, "GRU": 1}


def test_a_loop_that_stays_unrolled_is_told_once_and_at_its_own_line() -> None:
    class Steps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.zeros_like(x[:, 0])
            for step, gate in zip(x.unbind(1), x.exp().unbind(1), strict=True):
                h = torch.tanh(step + h) * gate
            return h.cos()

    optimized = attngraph.optimize(Steps(), (torch.randn(2, 6, 4),))
    (note,) = optimized.report.notes
    assert f"{Path(__file__).name}:{Steps.forward.__code__.co_firstlineno + 3}" in note
    assert "unrolled into 6 steps" in note


class _Matrix(nn.Module):
    """A state of keys and values (B, K, V), over steps of x (B, T, D)."""

    def forward(self, x: Tensor) -> Tensor:
        state, given = x.new_zeros(x.shape[0], x.shape[2], x.shape[2]), []
        for t in range(x.shape[1]):
            state = self.step(state, x[:, t : t + 1])
            given.append(x[:, t : t + 1] @ state)
        return torch.cat(given, 1)

    def step(self, state: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError


class _DecayOfValues(_Matrix):
    def step(self, state: Tensor, x: Tensor) -> Tensor:
        return state * x.sigmoid() + x.mT @ x


class _OtherKey(_Matrix):
    """Takes off what another key reads, by a constant rate."""

    def step(self, state: Tensor, x: Tensor) -> Tensor:
        return state - 0.1 * x.mT @ (x.flip(2) @ state - x)


@pytest.mark.parametrize("kind", [_DecayOfValues, _OtherKey])
def test_a_linear_recurrence_that_stays_unrolled_is_told(kind: type[nn.Module]) -> None:
    optimized = attngraph.optimize(kind(), (torch.randn(2, 9, 4),))
    notes = [note for note in optimized.report.notes if "unrolled into 9 steps" in note]
    assert len(notes) == 1
    assert optimized.report.fused == 0


def test_heads_that_are_added_up_are_no_steps() -> None:
    class Heads(nn.Module):
        def forward(self, x: Tensor, gates: Tensor) -> Tensor:
            found = torch.zeros_like(x[:, 0])
            for head in range(x.shape[1]):
                found = found + x[:, head] * gates[:, head]
            return found.cos()

    optimized = attngraph.optimize(Heads(), (torch.randn(2, 9, 4), torch.randn(2, 9, 4)))
    assert not [note for note in optimized.report.notes if "unrolled" in note]


@pytest.mark.parametrize(("steps", "numbers"), [(24, 4), (16, 16)])
def test_a_recurrence_is_told_once(steps: int, numbers: int) -> None:
    """24 steps are tokens along the axis of tokens and along that of the loop, whose size is 24;
    16 numbers of a state are none of 16 tokens."""
    from transformers import MambaConfig, MambaModel

    config = MambaConfig(vocab_size=32, hidden_size=16, state_size=numbers, num_hidden_layers=2)
    torch.manual_seed(0)
    module, ids = MambaModel(config).eval(), torch.randint(32, (1, steps))
    report = attngraph.optimize(module, (ids,), kwargs={"use_cache": False}).report
    assert [site.module for site in report.sites] == ["layers.0.mixer", "layers.1.mixer"]
    assert {site.code for site in report.sites} == {"recurrence"}
