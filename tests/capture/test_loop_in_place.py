"""Steps of loops that change in place what they have made, and what the step before has left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph.frontend.capture import capture
from attngraph.ir import interpret

pytestmark = pytest.mark.wide


class Aligned(nn.Module):
    """Location-sensitive attention: scores are filled through `data`, and alignments summed up."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.energy, self.location = (
            nn.Linear(8, 4),
            nn.Linear(4, 1),
            nn.Conv1d(2, 4, 3),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        memory, hidden = x[:, :3], x.new_zeros(x.shape[0], 3)
        weights, total, context = hidden, hidden.clone(), x.new_zeros(x.shape[0], 4)
        is_hidden, made = memory[..., 0] > 1.5, []
        for t in range(x.size(1)):
            seen = self.location(nn.functional.pad(torch.stack((weights, total), 1), (1, 1)))
            query = self.query(torch.cat((x[:, t], context), -1)).unsqueeze(1)
            scores = self.energy(torch.tanh(query + seen.mT + memory)).squeeze(-1)
            scores.data.masked_fill_(is_hidden, -float("inf"))
            scores.mul_(0.5).sub_(1)
            weights = scores.softmax(-1)
            context = (weights.unsqueeze(1) @ memory).squeeze(1)
            total += weights
            made.append(context)
        return torch.stack(made, 1), total


class Renamed(nn.Module):
    """What the loop changes has another name, which is read behind it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state, most = torch.zeros_like(x[:, 0]), torch.zeros(x.shape[0], 1)
        same = state
        for t in range(x.shape[1]):
            state.lerp_(x[:, t], 0.1).clamp_(-0.2, 0.2)
            state *= 1 + most
            most = most + x[:, t].amax(-1, keepdim=True)
        return same, most


class Sums(nn.Module):
    """Numbers to which tensors are added, and states that keep their dtypes."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        total, half = 0, torch.zeros_like(x[:, 0], dtype=torch.float16)
        count = torch.zeros(x.shape[0], dtype=torch.int32)
        for t in range(x.shape[1]):
            total += torch.tanh(x[:, t])
            half += x[:, t].sign()
            count <<= 1
            count += x[:, t, 0] > 0
            count %= 1000
        return total, half, count


class Pairs(nn.Module):
    """Each place sums something up over all others."""

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for i in range(x.shape[1]):
            total = torch.zeros_like(x[:, 0])
            for j in range(x.shape[1]):
                total += torch.tanh(x[:, i] * x[:, j])
            made.append(total * 0.5)
        return torch.stack(made, 1)


@pytest.mark.parametrize("module", [Aligned, Renamed, Sums, Pairs])
def test_every_length_is_taken(module: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = module().eval()
    least = 4 if module is Aligned else 1
    shapes = ({0: Dim("batch"), 1: Dim("length", min=least)},)
    graph = capture(model, (torch.randn(2, 6, 4),), dynamic_shapes=shapes).graph
    for batch, length in ((2, 6), (3, 17), (1, 5), (2, least)):
        x = torch.randn(batch, length, 4)
        with torch.no_grad():
            expected = model(x)
        expected = expected if isinstance(expected, tuple) else (expected,)
        torch.testing.assert_close(interpret(graph, (x,)), tuple(expected))


class OneForAll(nn.Module):
    """All elements of the list are one tensor, which the last step leaves."""

    def forward(self, x: Tensor) -> Tensor:
        state, made = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state += torch.tanh(x[:, t])
            made.append(state)
        return torch.stack(made, 1)


class Before(nn.Module):
    """What a step takes for the state before it is the state."""

    def forward(self, x: Tensor) -> Tensor:
        state, made = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            before = state
            state += torch.tanh(x[:, t])
            made.append(state - before + x[:, t])
        return torch.stack(made, 1)


class Part(nn.Module):
    """A step changes the state through a part of it."""

    def forward(self, x: Tensor) -> Tensor:
        state, made = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            part = state[:, :2]
            part += torch.tanh(x[:, t, :2])
            made.append(state * 2)
        return torch.stack(made, 1)


class Given(nn.Module):
    """The first step alone changes what has another name."""

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        first = state
        for t in range(x.shape[1]):
            state += torch.tanh(x[:, t] + state)
            state = state * 0.5
        return state + first


class _Count:
    def __init__(self) -> None:
        self.count = 0

    def add_(self) -> None:
        self.count += 1


class Counted(nn.Module):
    """Another thing than a tensor has a method of such a name."""

    def forward(self, x: Tensor) -> Tensor:
        state, steps = torch.zeros_like(x[:, 0]), _Count()
        for t in range(x.shape[1]):
            steps.add_()
            state = torch.tanh(state + x[:, t])
        return state * steps.count


@pytest.mark.parametrize("module", [OneForAll, Before, Part, Given, Counted])
def test_what_has_two_names_stays_of_one_length(module: Callable[[], nn.Module]) -> None:
    model, shapes = module().eval(), ({0: Dim.AUTO, 1: Dim.AUTO},)
    captured = capture(model, (torch.randn(2, 6, 4),), dynamic_shapes=shapes)
    assert any("stays 6" in note for note in captured.notes)
    x = torch.randn(3, 6, 4)
    torch.testing.assert_close(interpret(captured.graph, (x,)), (model(x),))
