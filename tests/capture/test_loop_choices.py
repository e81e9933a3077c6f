"""Steps of loops that choose by their number or by values, and other spellings of such loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph.frontend.capture import capture
from attngraph.ir import interpret

pytestmark = pytest.mark.wide


class Spelled(nn.Module):
    """A range that is kept, a loop that counts, a list that waits for its elements."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = x.size(1)
        steps = range(n)
        n = 3
        state, sums = torch.zeros_like(x[:, 0]), []
        for t in steps:
            if t == 2:
                continue
            state = 0.5 * state + x[:, t] - n
        t = 0
        while t < x.size(1):
            sums.append(state + x[:, t] * t)
            t += 1
        ends = [None] * x.size(1)
        ends[0] = state
        for at in range(1, x.size(1)):
            state = 0.5 * state + x[:, at]
            ends[at] = state
        back = [0] * x.size(1)
        for at in reversed(range(x.size(1))):
            state = 0.5 * state + x[:, at]
            back[at] = state
        return (
            torch.stack(sums, 1) + t,
            torch.stack(ends, 1),
            torch.stack(back, 1) + back[-1][:, None],
        )


class First(nn.Module):
    """What the first step does otherwise, and numbers that become tensors there."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        best, is_first, total = None, True, 0
        later, cells = [], [None, None]
        for t in range(x.shape[1]):
            now = x[:, t].masked_fill(x[:, t] < -1, float("-inf"))
            best = now if best is None else torch.maximum(best, now)
            total = total + x[:, t].sum()
            if t == 0:
                mean = x[:, t]
            if t >= 1:
                mean = 0.5 * mean + 0.5 * x[:, t]
            if is_first:
                mean, is_first = mean * 3, False
            given = mean
            for layer in range(2):
                cells[layer] = given if cells[layer] is None else torch.tanh(cells[layer] + given)
                given = cells[layer]
            if t > 0:
                later.append(given)
        later.append(mean)
        return best, total, mean, torch.stack(later, 1)


class Chosen(nn.Module):
    """Sides by the number of a step, its neighbours and a state's values; some of the steps."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        state, count = torch.zeros_like(x[:, 0]), torch.ones_like(x[:, 0])
        thirds, all_steps, out = [state], [], torch.zeros_like(x)
        for t in range(x.shape[1]):
            if t % 3 == 0:
                state = state + x[:, t]
            elif t % 3 == 1 and count.mean() > 0.9:
                state = state * 0.5 - x[:, t]
                count *= 0.9
            else:
                count = count + 0.1 if t % 2 else count - 0.1
            if (t + 1) % 3 == 0:
                thirds.append(state)
            if state.sum() > 0:
                all_steps.append(state)
            else:
                all_steps.append(-count)
            near = x[:, t]
            if t > 0:
                near = near + x[:, t - 1]
            if t < x.shape[1] - 1:
                near = near + x[:, t + 1]
            if not t % 2:
                out[:, t] = near
        return torch.stack(thirds, 1), torch.stack(all_steps, 1), out, count


class Alone(nn.Module):
    """Chooses by its number and carries nothing, within a loop that does as well."""

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for i in range(x.shape[1]):
            row = []
            for j in range(x.shape[1]):
                if i >= j:
                    row.append((x[:, i] * x[:, j]).sum(-1))
                else:
                    row.append(torch.full((x.shape[0],), -1e9))
            rows.append(torch.stack(row, -1))
        return torch.stack(rows, 1).softmax(-1) @ x


class Read(nn.Module):
    """Both sides append to a list that they read before; a list of pairs; numbers that widen."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        states, pairs, state = [torch.zeros_like(x[:, 0])], [], torch.zeros(())
        for t in range(x.shape[1]):
            if t % 2 == 0:
                states.append(torch.tanh(states[-1] + x[:, t]))
            elif x[:, t].sum() > 0:
                states.append(states[-1] * 0.5)
            else:
                states.append(x[:, t])
            pairs.append((x[:, t] * 2, x[:, t].exp()))
        made = []
        for t in range(x.shape[1]):
            one, other = pairs[t]
            state = torch.tanh(state + one * other)
            made.append(state)
        return torch.stack(states, 1), torch.stack(made, 1)


class Layered(nn.Module):
    """A whole recurrent layer in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        state = (torch.zeros(1, x.shape[0], 4), torch.zeros(1, x.shape[0], 4))
        made = []
        for t in range(x.shape[1]):
            one, state = self.layer(x[:, t : t + 1], state)
            made.append(one)
        return torch.cat(made, 1)


@pytest.mark.parametrize("module", [Spelled, First, Chosen, Alone, Read, Layered])
def test_every_length_is_taken(module: Callable[[], nn.Module]) -> None:
    model = module().eval()
    shapes = ({0: Dim("batch"), 1: Dim("length")},)
    graph = capture(model, (torch.randn(2, 6, 4),), dynamic_shapes=shapes).graph
    for batch, length in ((2, 6), (3, 17), (1, 5), (1, 2), (2, 1)):
        x = torch.randn(batch, length, 4)
        with torch.no_grad():
            expected = model(x)
        expected = expected if isinstance(expected, tuple) else (expected,)
        torch.testing.assert_close(interpret(graph, (x,)), tuple(expected))


class Twice(nn.Module):
    """Gives each place of a list two elements."""

    def forward(self, x: Tensor) -> Tensor:
        made = [None] * x.shape[1]
        for t in range(x.shape[1]):
            made[t] = x[:, t]
        for t in range(x.shape[1]):
            made[t] = x[:, t] * 2
        return torch.stack(made, 1)


class Changing(nn.Module):
    """Changes a tensor in place in some steps."""

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            if t % 2:
                _ = state.add_(x[:, t])
            state = state * 0.5 + x[:, t]
        return state


class Queue(nn.Module):
    """Counts to the end of a list that grows."""

    def forward(self, x: Tensor) -> Tensor:
        made, at = [x[:, 0]], 0
        while at < len(made):
            if len(made) < x.shape[1]:
                made.append(x[:, len(made)] + at)
            at += 1
        return torch.stack(made, 1)


@pytest.mark.slow
@pytest.mark.parametrize("module", [Twice, Changing, Queue])
def test_what_no_scan_says_stays_of_one_length(module: Callable[[], nn.Module]) -> None:
    model, shapes = module().eval(), ({0: Dim.AUTO, 1: Dim.AUTO},)
    captured = capture(model, (torch.randn(2, 6, 4),), dynamic_shapes=shapes)
    assert any("stays 6" in note for note in captured.notes)
    x = torch.randn(3, 6, 4)
    torch.testing.assert_close(interpret(captured.graph, (x,)), (model(x),))
