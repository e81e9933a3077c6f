"""Loops of Python over an open size are scans, or computed for all steps at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph import optimize
from attngraph.errors import CaptureError
from attngraph.frontend.capture import Captured, capture
from attngraph.ir import interpret
from attngraph.ir.ranges import Ranges

pytestmark = pytest.mark.wide


class Recurrence(nn.Module):
    """A scan with a list that is stacked, one that begins before it, and a state read after it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        decay, state = torch.sigmoid(x), torch.zeros(x.size(0), x.size(2))
        states, sums = [], [state.unsqueeze(1)]
        for t in range(x.shape[1]):
            state = decay[:, t] * state + x[:, t, :]
            states.append(state)
            sums.append(state.unsqueeze(1) + t)
        return torch.stack(states, dim=1), torch.cat(sums, 1), states[-1]


class Windows(nn.Module):
    """A mask that is filled row by row, within limits that depend on the row."""

    def __init__(self) -> None:
        super().__init__()
        self.window = 3

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        mask = torch.full((n, n), float("-inf"))
        for i in range(n):
            start = max(0, i - self.window + 1)
            mask[i, start : i + 1] = 0.0
        return (x @ x.mT + mask).softmax(-1) @ x


class Dotted(nn.Module):
    """Fills, and reads, parts of slices whose axes are counted from the end."""

    def forward(self, x: Tensor) -> Tensor:
        y, z = x[..., None] + torch.zeros(4), torch.zeros_like(x)[..., None] + torch.zeros(4)
        for t in range(x.shape[1]):
            z[..., t, :2, :] = y[..., t, 2:, :] * (t + 1)
        return z


class Cells(nn.Module):
    """States in a tuple, in a cell with weights, and results that are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state = (torch.zeros(x.shape[0], 4), torch.zeros(x.shape[0], 4))
        out = torch.zeros_like(x)
        for t in range(x.size(1)):
            hidden, memory = self.cell(x[:, t], state)
            state = (hidden, memory)
            out[:, t] = hidden * (t + 1)
        return out, memory


class Later(nn.Module):
    """Begins behind the first step."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x[:, 0]
        means = [mean]
        for t in range(1, x.shape[1]):
            mean = 0.5 * mean + 0.5 * x[:, t]
            means.append(mean)
        return torch.stack(means).transpose(0, 1)


class Alias(nn.Module):
    """Reads under another name what it writes: no step is alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        same = y
        for t in range(x.shape[1]):
            y[:, t] = same.sum(1) / 8
        return y


class Earlier(nn.Module):
    """Reads what an earlier step wrote."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        for t in range(1, x.shape[1]):
            y[:, t] = y[:, t - 1] * 0.5 + x[:, t]
        return y


class Chunks(nn.Module):
    """A state from chunk to chunk of a padded length."""

    def forward(self, x: Tensor) -> Tensor:
        padded = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4)).unflatten(1, (-1, 4))
        state, given = torch.zeros_like(x[:, 0]), []
        for c in range(padded.shape[1]):
            state = 0.5 * state + padded[:, c].sum(1)
            given.append(padded[:, c] + state[:, None])
        return torch.stack(given, 1).flatten(1, 2)[:, : x.shape[1]]


class OneChunk(Chunks):
    """Does something else where there is one chunk."""

    def forward(self, x: Tensor) -> Tensor:
        given = super().forward(x)
        return given if (x.shape[1] + 3) // 4 >= 2 else 2 * given


class Prefixes(nn.Module):
    """What the refusal of a slice that grows with the step advises: causal attention."""

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for t in range(x.shape[1]):
            scores = (x * x[:, t : t + 1]).sum(-1)
            scores = scores.masked_fill(torch.arange(x.shape[1]) > t, -torch.inf)
            rows.append((scores.softmax(-1)[..., None] * x).sum(1))
        return torch.stack(rows, 1)


class Numbered(nn.Module):
    """Two rows of each step, by numbers that have names; a loop within it has places of its own."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([x, x.flip(-1)], 2).view(x.shape[0], 2 * x.shape[1], -1)
        state, given = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            first = t * 2
            for j in range(2):
                place = first + j
                state = 0.5 * torch.tanh(state + rows[:, place]) + rows[:, j]
            given.append(state)
        return torch.stack(given, 1)


class FromScalars(nn.Module):
    """States that begin as less than a step makes of them: numbers, one row, whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(4.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c, d, count = 0.0, torch.zeros(()), self.first, torch.tensor([[1]]), 0
        given = []
        for t in range(x.shape[1]):
            count = count + 1
            a, b = a + x[:, t], 0.5 * b + a
            c, d = 0.5 * c + x[:, t], d - x[:, t, :2].double()
            given.append((a + b + c) / count + d.float().sum(-1, keepdim=True))
        return torch.stack(given, 1), d


class SumOfFirst(nn.Module):
    """Another function of a row than of as many as the batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        state, given = self.first, []
        for t in range(x.shape[1]):
            given.append(state.sum() * x[:, t])
            state = 0.5 * state + x[:, t]
        return torch.stack(given, 1)


class Sides(nn.Module):
    """Each side of a branch appends, in another order."""

    kind = "last"

    def forward(self, x: Tensor) -> Tensor:
        state, given, others = torch.zeros_like(x[:, 0]), [], []
        for t in range(x.shape[1]):
            if self.kind == "first":
                given.append(state)
                others.append(state + 1)
            elif self.kind == "second":
                state = state + x[:, t]
                given.append(state)
                others.append(state)
            else:
                state = 0.5 * state + x[:, t]
                others.append(state * 2)
                state = state + 1
                given.append(state)
        return torch.stack(given, 1) + torch.stack(others, 1)


def _scan(
    step: Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, Tensor]],
    state: Tensor,
    given: dict[str, Tensor],
    found: Tensor,
) -> tuple[Tensor, Tensor]:
    """As jax.lax.scan, over the first axis of what is given, in a function that is made anew."""

    def turn(state: Tensor, start: int, end: int) -> Tensor:
        for i in range(start, end):
            now = {name: each[i] for name, each in given.items()}
            state, found[i] = step(state, now)
        return state

    return turn(state, 0, len(next(iter(given.values())))), found


class Called(nn.Module):
    """A step calls a method that makes numbers, in a module where sizes become some."""

    def scores(self, state: Tensor, x: Tensor, scale: float) -> Tensor:
        assert isinstance(scale, float)
        scores = (x @ state[..., None]).squeeze(-1) * scale / float(int(x.shape[1] / 2) + 1)
        return scores.masked_fill_(x[..., 0] > 1, -float("inf"))

    def forward(self, x: Tensor) -> Tensor:
        state, given = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            weights = self.scores(state, x, 0.5).exp()
            state = (state + x[:, t] + torch.einsum("bs,bsd->bd", weights, x)).tanh()
            given.append(state)
        return torch.stack(given, 1)


class Within(nn.Module):
    """Its loop is in a function that a function makes when it is called."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.transpose(0, 1)

        def step(state: Tensor, now: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            state = torch.tanh(state * now["rate"]) + now["row"]
            return state, state * 2

        given = {"row": rows, "rate": torch.sigmoid(rows)}
        return _scan(step, torch.zeros_like(rows[0]), given, torch.empty_like(rows))


def _captured(module: nn.Module) -> Captured:
    shapes = ({0: Dim.AUTO, 1: Dim.AUTO},)
    return capture(module, (torch.randn(2, 6, 4),), dynamic_shapes=shapes)


@pytest.mark.slow
def test_one_chunk_is_a_number_of_chunks_like_any() -> None:
    """Which torch.export takes for two or more; what the model does with one is looked at."""
    shapes = ({0: Dim("batch", min=1, max=8), 1: Dim("seq", min=1, max=64)},)
    model, x = Chunks().eval(), torch.randn(2, 6, 4)
    optimized = attngraph.optimize(model, (x,), dynamic_shapes=shapes)
    for batch, length in ((1, 1), (2, 3), (3, 4), (1, 5), (2, 17)):
        x = torch.randn(batch, length, 4)
        torch.testing.assert_close(optimized(x), model(x))
    with pytest.raises(CaptureError, match=r"the model demands \(3 \+ seq\) // 4 ≥ 2 at"):
        attngraph.optimize(OneChunk().eval(), (torch.randn(2, 6, 4),), dynamic_shapes=shapes)


_SLOW = [pytest.param(module, marks=pytest.mark.slow) for module in (Recurrence, Cells, Later)]


@pytest.mark.parametrize(
    "module", [Windows, Dotted, Prefixes, Numbered, FromScalars, Sides, Called, Within, *_SLOW]
)
def test_a_loop_takes_every_length(module: Callable[[], nn.Module]) -> None:
    model = module().eval()
    graph = _captured(model).graph
    for batch, length in ((2, 6), (3, 9), (1, 3), (2, 1)):
        assert not Ranges.of(graph).broken({"x_0": batch, "x_1": length})
        x = torch.randn(batch, length, 4)
        with torch.no_grad():
            expected = model(x)
        expected = expected if isinstance(expected, tuple) else (expected,)
        torch.testing.assert_close(interpret(graph, (x,)), tuple(expected))


@pytest.mark.parametrize(
    "module",
    [Alias, *(pytest.param(each, marks=pytest.mark.slow) for each in (Earlier, SumOfFirst))],
)
def test_steps_that_read_each_other_stay_as_many(module: Callable[[], nn.Module]) -> None:
    model = module().eval()
    captured = _captured(model)
    assert any("stays 6" in note for note in captured.notes)
    x = torch.randn(3, 6, 4)
    torch.testing.assert_close(interpret(captured.graph, (x,)), (model(x),))


class Counted(nn.Module):
    """What Python makes of the number of a step: quotients and rests of negative ones, powers."""

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for t in range(x.shape[1]):
            whole = (t - 3) // 2 + (2 - t) % 3 + max(t - 4, 1)
            rows.append(x[:, t] * 0.9999**t + whole + t / 4)
        return torch.stack(rows, 1)


def test_numbers_of_a_step_are_those_of_python() -> None:
    """A power of 3,000 steps is rounded once: in float32 it would be 2e-5 off."""
    model = Counted()
    found = capture(model, (torch.randn(2, 5, 4),), dynamic_shapes=({1: Dim("n", max=4096)},))
    for length in (5, 2, 3000):
        x = torch.randn(2, length, 4)
        (given,) = interpret(found.graph, (x,))
        torch.testing.assert_close(given, model(x), rtol=1e-6, atol=1e-6)


class Corrected(nn.Module):
    """Divides by what is left of 1 by a power, and by a quotient, of the number of a step."""

    def forward(self, x: Tensor) -> Tensor:
        state, rows, n = torch.zeros_like(x[:, 0]), [], x.shape[1]
        for t in range(n):
            state = 0.999 * state + 0.001 * x[:, t]
            rows.append(state / (1 - 0.999 ** (t + 1)) + x[:, t] / (1 - t / n))
        return torch.stack(rows, 1)


def test_what_numbers_of_a_step_leave_of_one_has_all_digits() -> None:
    """In float32 1 - 0.999 is 2e-5 off, and 1 - 1,999 / 2,000 as much."""
    model = Corrected()
    found = capture(model, (torch.randn(2, 5, 4),), dynamic_shapes=({1: Dim("n", max=4096)},))
    for length in (5, 2, 2000):
        x = torch.randn(2, length, 4)
        (given,) = interpret(found.graph, (x,))
        torch.testing.assert_close(given, model(x), rtol=2e-6, atol=1e-6)


class Growing(nn.Module):
    """Each step attends to what all steps before it made, which no scan carries."""

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for t in range(x.shape[1]):
            step = x[:, t]
            if t > 0:
                before = torch.stack(made, 1)
                weights = (before @ step[..., None]).softmax(1)
                step = step - (weights * before).sum(1)
            made.append(step)
        return torch.stack(made, 1)


class GrowingBelow(Growing):
    """The same where there are few steps; more have a formula."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < 12:
            return torch.stack([x[:, : t + 1].sum(1) for t in range(x.shape[1])], 1)
        return x.cumsum(1)


def test_a_loop_that_no_scan_runs_is_refused_without_traces_of_more_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table of an earlier call has no turns, and at twice the size there are twice as many."""
    traces = 0
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal traces
        traces += 1
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    shapes = ({1: Dim("length")},)
    with pytest.raises(CaptureError, match=r"for t in range\(x\.shape\[1\]\):"):
        optimize(Growing().eval(), (torch.randn(2, 6, 4),), dynamic_shapes=shapes)
    assert traces <= 5
    model = GrowingBelow().eval()
    optimized = optimize(model, (torch.randn(2, 6, 4),), dynamic_shapes=shapes)
    for length in (1, 5, 12, 30):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)
