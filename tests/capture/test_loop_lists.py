"""Lists of an open length: as states of loops, made and gone through either way, and cut apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError
from attngraph.frontend.rewording.loop_lists import Lists, Rows, Steps, Unread

OPERATIONS: tuple[Callable[[Any], Any], ...] = (
    lambda a: a,
    lambda a: a[1:],
    lambda a: a[3:],
    lambda a: a[:-1],
    lambda a: a[:-3],
    lambda a: a[1:-3],
    lambda a: a[1:-1],
    lambda a: a[::-1],
    lambda a: Lists.listed(list, a),
    lambda a: Lists.as_tuple(tuple, Lists.turned(reversed, a)),
    lambda a: a + Lists.chained([a[0]]),
    lambda a: Lists.chained([a[-1]]) + a,
    lambda a: a + a[::-1],
    lambda a: Lists.chained([a[-2]], a, [a[2]]),
)


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
@pytest.mark.parametrize("front", [0, 1, 2])
@pytest.mark.parametrize("behind", [0, 1])
def test_a_list_with_rows_is_the_list(number: int, front: int, behind: int) -> None:
    elements = [torch.full((2, 1), float(value)) for value in range(5 + front + behind)]
    rows = Rows(torch.stack(elements[front : front + 5]))
    made = Steps([*elements[:front], rows, *elements[front + 5 :]])
    found = OPERATIONS[number](made)
    expected = list(OPERATIONS[number](elements))
    assert found.count == len(expected)
    assert torch.equal(found.whole(), torch.stack(expected))
    assert torch.equal(found.joined(1, new=True), torch.stack(expected, 1))
    assert torch.equal(found.joined(-1, new=False), torch.cat(expected, -1))


def test_a_list_is_changed_in_place() -> None:
    elements = [torch.full((2,), float(value)) for value in range(4)]
    made, plain = Steps([Rows(torch.stack(elements))]), list(elements)
    for each in (made, plain):
        each.insert(0, elements[2])
        each.reverse()
        each.append(elements[1])
        each += [elements[3]]
    assert torch.equal(made.whole(), torch.stack(plain))
    asks: list[Callable[[Any], Any]] = [len, iter, list, reversed, sorted, bool]
    asks += [lambda of: of[1:4], lambda of: of[:0], lambda of: of[-2:], lambda of: of.pop()]
    asks += [lambda of: elements[0] in of, lambda of: of.index(elements[0]), lambda of: of.sort()]
    for ask in asks:
        with pytest.raises(Unread):
            ask(made)
    made.clear()
    made.append(elements[0])
    assert torch.equal(made.whole(), elements[0][None])


ASKS: list[Callable[[Callable[..., Any], Any], Any]]
ASKS = [Lists.listed, Lists.as_tuple, Lists.turned, Lists.length, Lists.total]


@pytest.mark.parametrize("ask", ASKS)
def test_names_of_the_model_s_own_are_called(ask: Callable[..., Any]) -> None:
    made = Steps([Rows(torch.ones(3, 2))])
    assert ask(lambda value: (value is made, 7), made) == (True, 7)


class Computes(nn.Module):
    def __init__(self, code: Callable[[Computes, Tensor], Any]) -> None:
        super().__init__()
        self.code = code
        self.cells = nn.ModuleList([nn.GRUCell(4, 4), nn.GRUCell(4, 4)])
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


def _last(self: Computes, x: Tensor) -> Tensor:
    """The list is the state."""
    states = [x.new_zeros(x.shape[0], 4), x.new_ones(x.shape[0], 4)]
    for t in range(x.shape[1]):
        states.append(torch.tanh(states[-1] * 0.5 - states[-2] + x[:, t]))
    return torch.stack(states[2:], 1)


def _numbered(self: Computes, x: Tensor) -> Tensor:
    states = [x.new_zeros(x.shape[0], 4)]
    for t in range(x.shape[1]):
        states.append(self.cells[0](x[:, t], states[t]))
    return torch.stack(states, 1)


def _of_tuples(self: Computes, x: Tensor) -> Tensor:
    states = [(x.new_zeros(x.shape[0], 4), x.new_ones(x.shape[0], 4))]
    for t in range(x.shape[1]):
        a, b = states[-1]
        states.append((torch.tanh(b + x[:, t]), a * 0.5))
    return torch.stack([a + b for a, b in states[1:]], 1)


def _backwards(self: Computes, x: Tensor) -> Tensor:
    state, other, found = x.new_zeros(x.shape[0], 4), torch.zeros_like(x), []
    for t in reversed(range(x.shape[1])):
        state = self.cells[0](x[:, t], state)
        found.append(state + t)
    for t in range(x.shape[1] - 1, -1, -1):
        state = state * 0.5 + x[:, t]
        other[:, t] = state
    found.reverse()
    return torch.stack(found, 1) + other


def _in_front(self: Computes, x: Tensor) -> Tensor:
    state, found = x.new_zeros(x.shape[0], 4), []
    for step in x.unbind(1)[::-1]:
        state = self.cells[0](step, state)
        found.insert(0, state)
    return torch.stack(found, 1)


def _parts(self: Computes, x: Tensor) -> Tensor:
    """Tuples that are added are longer."""
    parts = list(x.unbind(1))
    made = [self.linear(part) + at for at, part in enumerate(parts)]
    both = torch.stack(parts + [a * b for a, b in zip(made, parts, strict=True)], 1)
    return both[:, : x.shape[1]] + both[:, x.shape[1] :]


def _layers(self: Computes, x: Tensor) -> Tensor:
    """A list of states, one for each layer, which has another name as well."""
    states = [x.new_zeros(x.shape[0], 4) for _ in range(2)]
    same, found = states, []
    for t in range(x.shape[1]):
        given = x[:, t]
        for layer, cell in enumerate(self.cells):
            states[layer] = cell(given, states[layer])
            given = states[layer]
        found.append(given)
    return torch.stack(found, 1) + same[0][:, None]


def _layer_by_layer(self: Computes, x: Tensor) -> Tensor:
    steps: Any = x.unbind(1)
    for cell in self.cells:
        state, found = x.new_zeros(x.shape[0], 4), []
        for step in steps:
            state = cell(step, state)
            found.append(state)
        steps = found
    return torch.stack(steps, 1)


def _named(self: Computes, x: Tensor) -> Tensor:
    states, found = {"h": x.new_zeros(x.shape[0], 4)}, []
    for t in range(x.shape[1]):
        heads = []
        for cell in self.cells:
            heads.append(cell(x[:, t], states["h"]))
        states["h"] = sum(heads)
        found.append(states["h"])
    return torch.stack(found, 1)


def _written_twice(self: Computes, x: Tensor) -> Tensor:
    y = torch.ones_like(x)
    for t in range(x.shape[1]):
        y[:, t] += self.linear(x[:, t])
        if self.linear.in_features > 2:
            y[:, t, 1:] = y[:, t, 1:] * 2
    return y


def _pairs(self: Computes, x: Tensor) -> Tensor:
    """A loop in a loop, each over all steps."""
    scores = torch.zeros(x.shape[0], x.shape[1], x.shape[1])
    for i in range(x.shape[1]):
        for j in range(x.shape[1]):
            scores[:, i, j] = (x[:, i] * x[:, j]).sum(-1)
    return scores.softmax(-1) @ x


def _pointing(self: Computes, x: Tensor) -> Tensor:
    """Steps that read sizes by their names, and what stands elsewhere than the step."""
    batch, length, width = x.shape
    hidden, found = torch.zeros(batch, length, dtype=torch.bool), []
    state = x.new_zeros(batch, width)
    for t in range(length):
        scores = (x @ (state + x[:, length - 1 - t])[:, :, None])[..., 0]
        place = scores.masked_fill(hidden, -1e9).argmax(-1)
        hidden = hidden.scatter(1, place[:, None], True)
        state = x.gather(1, place.view(batch, 1, 1).expand(batch, 1, width))[:, 0]
        found.append(state * torch.ones(batch, 1))
    return torch.stack(found, 1)


def _repeated(self: Computes, x: Tensor) -> Tensor:
    """A step repeats its state for every place, as additive attention does."""
    state, found = x.new_zeros(x.shape[0], 4), []
    for t in range(x.shape[1]):
        rows = state.unsqueeze(1).repeat(1, x.shape[1], 1)
        weights = torch.tanh(torch.cat([rows, x], 2)).sum(-1).softmax(1)
        state = self.cells[0](x[:, t], (weights[..., None] * x).sum(1))
        found.append(state)
    return torch.stack(found, 1)


def _from_the_second(self: Computes, x: Tensor) -> Tensor:
    """There may be no such step, or one."""
    score = x[:, 0]
    for t in range(1, x.shape[1]):
        score = torch.logsumexp(score[:, :, None] + self.linear.weight + x[:, t, None], 1)
    return score


def _zipped(self: Computes, x: Tensor) -> Tensor:
    """Two lists that loops filled, joined pair by pair."""
    ahead, back, state = [], [], x.new_zeros(x.shape[0], 4)
    for t in range(x.shape[1]):
        state = self.cells[0](x[:, t], state)
        ahead.append(state)
    for t in reversed(range(x.shape[1])):
        state = self.cells[1](x[:, t], state)
        back.insert(0, state)
    pairs = [
        torch.cat([one, torch.stack([two, one], -1).sum(-1)], -1)
        for one, two in zip(ahead, back, strict=True)
    ]
    return torch.stack(pairs, 1)


def _places(self: Computes, x: Tensor) -> Tensor:
    """Lists of numbers as places and in tensors."""
    numbers = list(range(x.shape[1]))
    later = [number + 1 for number in range(x.shape[1])]
    shares = torch.tensor(later) / torch.FloatTensor(list(range(1, x.shape[1] + 1)))
    counted = torch.tensor(range(x.shape[1]), dtype=torch.float64)
    return x[:, numbers[::-1]] * (torch.as_tensor(numbers) + shares + counted).float()[:, None]


def _as_another(self: Computes, x: Tensor) -> Tensor:
    """A tensor's new_tensor of numbers has its dtype, whichever they have, and torch.Tensor the
    default one.
    """
    length, whole = x.shape[1], torch.arange(3)
    steps = range(1, 2 * length + 1, 2)
    table = [
        x.new_tensor(range(length), dtype=torch.float64),
        x.new_tensor([step // 2 for step in range(length)]),
        x[:, 0].double().new_tensor(list(range(length))) / 3,
        whole.new_tensor(range(length - 1, -1, -1)) // 2,
        whole.new_tensor([step * 0.7 for step in range(length)]),
        x.new_tensor(steps) / 3,
        torch.Tensor(range(length)) / 7,
        torch.Tensor([step + 1 for step in range(length)]) / 7,
    ]
    assert [str(each.dtype)[6:] for each in table] == [
        *("float64", "float32", "float64", "int64", "int64", "float32", "float32", "float32")
    ]
    few = x.new_tensor(range(3)) * torch.Tensor(range(3))
    return x + few.sum() + sum(each.float() for each in table)[:, None]


def _far_apart(self: Computes, x: Tensor) -> Tensor:
    """A table of two numbers' distance, made in one expression."""
    length = x.shape[1]
    table = torch.tensor([[min(abs(i - j), 3) for j in range(length)] for i in range(length)])
    return (x @ x.mT + self.linear.weight[0][table]).softmax(-1) @ x


CODE = (
    *(_last, _numbered, _of_tuples, _backwards, _in_front, _parts, _layers, _layer_by_layer),
    *(_named, _written_twice, _pairs, _pointing, _repeated),
    *(_from_the_second, _zipped, _places, _as_another, _far_apart),
)


def _compiled(code: Callable[[Computes, Tensor], Any]) -> tuple[nn.Module, attngraph.Optimized]:
    torch.manual_seed(0)
    model = Computes(code).eval().requires_grad_(False)
    dims = {0: Dim("batch", max=8), 1: Dim("length", max=64)}
    return model, attngraph.optimize(model, (torch.randn(2, 6, 4),), dynamic_shapes=(dims,))


@pytest.mark.wide
@pytest.mark.parametrize("code", CODE, ids=lambda code: code.__name__)
def test_any_number_of_steps_is_taken(code: Callable[[Computes, Tensor], Any]) -> None:
    model, found = _compiled(code)
    for batch, length in ((1, 1), (2, 2), (3, 11)):
        x = torch.randn(batch, length, 4)
        torch.testing.assert_close(found(x), model(x))


def _first(self: Computes, x: Tensor) -> Tensor:
    """Each step reads the first element, too."""
    states = [x[:, 0]]
    for t in range(x.shape[1]):
        states.append(torch.tanh(states[-1] + states[0] + x[:, t]))
    return torch.stack(states, 1)


def _two_for_each(self: Computes, x: Tensor) -> Tensor:
    states = [x[:, 0]]
    for t in range(x.shape[1]):
        states.append(torch.tanh(states[-1] + x[:, t]))
        states.append(states[-1] * 2)
    return torch.stack(states, 1)


def _behind(self: Computes, x: Tensor) -> Tensor:
    """The element that a step reads by its number is not the last one."""
    states = [x[:, 0], x[:, 0] * 2]
    for t in range(x.shape[1]):
        states.append(torch.tanh(states[t] + x[:, t]))
    return torch.stack(states, 1)


def _shared(self: Computes, x: Tensor) -> Tensor:
    """Two elements are one tensor, which is written to."""
    zero = x.new_zeros(x.shape[0], 4)
    states = [zero, zero]
    for t in range(x.shape[1]):
        states[0] += x[:, t]
    return states[1]


def _from_behind(self: Computes, x: Tensor) -> Tensor:
    """A step reads what the one before it has written."""
    y = x.clone()
    for t in range(x.shape[1] - 2, -1, -1):
        y[:, t] = y[:, t] + torch.tanh(y[:, t + 1])
    return y


class _Own:
    @staticmethod
    def new_tensor(numbers: Any) -> Tensor:
        return torch.ones(3) * sum(1 for _ in numbers)


def _of_its_own(self: Computes, x: Tensor) -> Tensor:
    """A method of that name which is no tensor's."""
    return x + _Own.new_tensor(range(x.shape[1]))[0]


NEAR_MISSES = (_first, _two_for_each, _behind, _shared, _from_behind, _of_its_own)


@pytest.mark.wide
@pytest.mark.parametrize("code", NEAR_MISSES, ids=lambda code: code.__name__)
def test_other_lists_are_refused(code: Callable[[Computes, Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"the model fixes it.*compute all steps at once"):
        _compiled(code)
