"""Attention block by block: loops over blocks of keys in loops over blocks of queries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._C._functorch import get_interpreter_stack
from torch.export import Dim
from torch.nn import functional as F

import attngraph
from attngraph.errors import CaptureError

pytestmark = pytest.mark.wide

SIZE = 4


class Attends(nn.Module):
    def __init__(self, code: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(2, (2, 4)).transpose(1, 2)
        return self.code(q, q.cos(), q.flip(2)).transpose(1, 2).flatten(2)


def _one_size(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Online softmax (Milakov and Gimelshein): a running maximum and sum."""
    found = torch.zeros_like(q)
    for start in range(0, q.shape[2], SIZE):
        query = q[:, :, start : start + SIZE]
        given, total = torch.zeros_like(query), torch.zeros_like(query[..., :1])
        most = torch.full_like(total, -torch.inf)
        for at in range(0, k.shape[2], SIZE):
            scores = query @ k[:, :, at : at + SIZE].mT
            larger = torch.maximum(most, scores.amax(-1, keepdim=True))
            weights, before = (scores - larger).exp(), (most - larger).exp()
            total = total * before + weights.sum(-1, keepdim=True)
            given = given * before + weights @ v[:, :, at : at + SIZE]
            most = larger
        found[:, :, start : start + SIZE] = given / total
    return found


def _cut_by_min(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Ends that are cut in both loops, and a scale of the length, which is open."""
    length, found, root = q.shape[2], torch.zeros_like(q), q.shape[2] ** -0.5
    for start in range(0, length, SIZE):
        end = min(start + SIZE, length)
        query = q[:, :, start:end]
        most = torch.full((*query.shape[:3], 1), -torch.inf)
        given, total = torch.zeros_like(query), torch.zeros_like(most)
        for at in range(0, length, SIZE):
            last = min(at + SIZE, length)
            scores = query @ k[:, :, at:last].mT * root
            larger = torch.maximum(most, scores.amax(-1, keepdim=True))
            weights, before = (scores - larger).exp(), (most - larger).exp()
            total = total * before + weights.sum(-1, keepdim=True)
            given = given * before + weights @ v[:, :, at:last]
            most = larger
        found[:, :, start:end] = given / total
    return found


def _by_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """States that are made of how many rows a block has."""
    length, found = q.shape[2], torch.zeros_like(q)
    count = (length + SIZE - 1) // SIZE
    for i in range(count):
        start, end = i * SIZE, min((i + 1) * SIZE, length)
        query, rows = q[:, :, start:end], q.shape[:2]
        given = torch.zeros(*rows, end - start, q.shape[3])
        total = torch.zeros((*rows, end - start, 1))
        for j in range(count):
            first, last = j * SIZE, min((j + 1) * SIZE, length)
            weights = torch.sigmoid(query @ k[:, :, first:last].mT) / (last - first)
            total = 0.5 * total + weights.sum(-1, keepdim=True)
            given = given + weights @ v[:, :, first:last]
        found[:, :, start:end] = given / total
    return found


State = tuple[Tensor, Tensor, Tensor]


def _begun(query: Tensor) -> State:
    none = torch.full_like(query[..., :1], -torch.inf)
    return torch.zeros_like(query), torch.zeros_like(none), none


def _seen(state: State, scores: Tensor, value: Tensor) -> State:
    given, total, most = state
    larger = torch.maximum(most, scores.amax(-1, keepdim=True))
    weights, before = (scores - larger).exp(), (most - larger).exp()
    return given * before + weights @ value, total * before + weights.sum(-1, keepdim=True), larger


def _over_keys(query: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state = _begun(query)
    for at in range(0, k.shape[2], SIZE):
        state = _seen(state, query @ k[:, :, at : at + SIZE].mT, v[:, :, at : at + SIZE])
    return state[0] / state[1]


def _in_a_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    blocks = range(0, q.shape[2], SIZE)
    return torch.cat([_over_keys(q[:, :, at : at + SIZE], k, v) for at in blocks], 2)


class Padded(nn.Module):
    """Of queries that were padded to whole blocks: the code of all blocks, and none of it masks."""

    def __init__(self, code: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attends = Attends(code)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        found: Tensor = self.attends(F.pad(x, (0, 0, 0, -length % SIZE)))
        return found[:, :length]


def _block(x: Tensor, at: int) -> Tensor:
    return x[:, :, at * SIZE : (at + 1) * SIZE]


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of the places that both loops read."""
    place, found = torch.arange(q.shape[2]), []
    for start in range(0, q.shape[2], SIZE):
        query = q[:, :, start : start + SIZE]
        state = _begun(query)
        for at in range(0, k.shape[2], SIZE):
            scores = query @ k[:, :, at : at + SIZE].mT
            later = place[start : start + SIZE, None] < place[None, at : at + SIZE]
            state = _seen(state, scores.masked_fill(later, -torch.inf), v[:, :, at : at + SIZE])
        found.append(state[0] / state[1])
    return torch.cat(found, 2)


def _up_to_the_diagonal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = []
    for i in range(q.shape[2] // SIZE):
        query = q[:, :, i * SIZE : (i + 1) * SIZE]
        state = _begun(query)
        for j in range(i + 1):
            scores = query @ k[:, :, j * SIZE : (j + 1) * SIZE].mT
            if j == i:
                later = torch.ones(SIZE, SIZE, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later, -torch.inf)
            state = _seen(state, scores, v[:, :, j * SIZE : (j + 1) * SIZE])
        found.append(state[0] / state[1])
    return torch.cat(found, 2)


def _up_to_a_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place, found = torch.arange(q.shape[2]), []
    for start in range(0, q.shape[2], SIZE):
        query = q[:, :, start : start + SIZE]
        state = _begun(query)
        for at in range(0, start + SIZE, SIZE):
            scores = query @ k[:, :, at : at + SIZE].mT
            later = place[start : start + SIZE, None] < place[None, at : at + SIZE]
            state = _seen(state, scores.masked_fill(later, -torch.inf), v[:, :, at : at + SIZE])
        found.append(state[0] / state[1])
    return torch.cat(found, 2)


def _of_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Single places, and powers that would grow beyond the diagonal."""
    found = []
    for t in range(q.shape[2]):
        given = torch.zeros_like(q[:, :, 0])
        for s in range(t + 1):
            given = given + v[:, :, s] * torch.tanh(k[:, :, t]) * 0.9 ** (t - s)
        found.append(given)
    return torch.stack(found, 2)


def _below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first has none, of which there is no scan: one more counts for nothing."""
    found = []
    for i in range(q.shape[2] // SIZE):
        state = torch.zeros_like(_block(q, 0))
        for j in range(i):
            state = state * 0.5 + k[:, :, j * SIZE : (j + 1) * SIZE]
        found.append(state)
    return torch.cat(found, 2)


def _of_earlier_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A number that would be infinite in the step that counts for nothing."""
    found = []
    for t in range(q.shape[2]):
        given = v[:, :, t]
        for s in range(t):
            given = given + v[:, :, s] * torch.tanh(k[:, :, t]) / (t - s)
        found.append(given)
    return torch.stack(found, 2)


def _check(model: nn.Module, sizes: tuple[tuple[int, int], ...]) -> None:
    torch.manual_seed(0)
    dims = {0: Dim("batch", max=8), 1: Dim("length", max=100)}
    found = attngraph.optimize(model.eval(), (torch.randn(2, 11, 8),), dynamic_shapes=(dims,))
    for batch, length in sizes:
        x = torch.randn(batch, length, 8)
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)


SIZES = ((1, 1), (2, 4), (3, 5), (2, 8), (2, 9), (2, 12), (1, 31), (2, 88))


@pytest.mark.parametrize(
    "code", [_one_size, _cut_by_min, _by_number, _in_a_function], ids=lambda code: code.__name__
)
def test_blocks_of_queries_go_through_blocks_of_keys(
    code: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    _check(Attends(code), SIZES)


@pytest.mark.parametrize(
    "code",
    [_in_a_function, _masked, _up_to_the_diagonal, _up_to_a_place, _below],
    ids=lambda code: code.__name__,
)
def test_whole_blocks_of_queries_go_through_blocks_of_keys(
    code: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    _check(Padded(code), SIZES)


@pytest.mark.parametrize("code", [_of_rows, _of_earlier_rows], ids=lambda code: code.__name__)
def test_a_loop_up_to_the_step_around_it(
    code: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    _check(Attends(code), SIZES)


def _beyond(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One more than there are, whose block is empty."""
    found = []
    for i in range(q.shape[2] // SIZE):
        state = torch.zeros_like(_block(q, 0))
        for j in range(i + 2):
            state = state * 0.5 + 1 + k[:, :, j * SIZE : (j + 1) * SIZE].sum(2, keepdim=True)
        found.append(state)
    return torch.cat(found, 2)


def _fewer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """From the longest one down."""
    count, found = q.shape[2] // SIZE, []
    for i in range(count):
        state = torch.zeros_like(_block(q, 0))
        for j in range(count - i):
            state = state * 0.5 + k[:, :, j * SIZE : (j + 1) * SIZE]
        found.append(state)
    return torch.cat(found, 2)


def _left_by_the_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the last step leaves is read behind them."""
    found = []
    for i in range(q.shape[2] // SIZE):
        state = torch.zeros_like(_block(q, 0))
        for j in range(i + 1):
            key = k[:, :, j * SIZE : (j + 1) * SIZE]
            state = state * 0.5 + key
        found.append(state + key)
    return torch.cat(found, 2)


def _listed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A list of another length in each step."""
    found = []
    for i in range(q.shape[2] // SIZE):
        parts = []
        for j in range(i + 1):
            parts.append(k[:, :, j * SIZE : (j + 1) * SIZE])
        found.append(torch.stack(parts).mean(0))
    return torch.cat(found, 2)


def _begun_by_none(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is there after steps of which the first block has none."""
    found = []
    for i in range(q.shape[2] // SIZE):
        state = None
        for j in range(i):
            key = k[:, :, j * SIZE : (j + 1) * SIZE]
            state = key if state is None else state * 0.5 + key
        found.append(_block(q, 0) if state is None else state)
    return torch.cat(found, 2)


@pytest.mark.parametrize(
    "code",
    [_begun_by_none, _beyond, _fewer, _left_by_the_last, _listed],
    ids=lambda code: code.__name__,
)
def test_other_loops_up_to_a_step_are_refused(
    code: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    with pytest.raises(CaptureError, match="length"):
        _check(Padded(code), SIZES)


def _makes_a_constant(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = []
    for i in range(q.shape[2] // SIZE):
        state = torch.zeros_like(_block(q, 0))
        for j in range(i + 1):
            root = torch.sqrt(torch.tensor(1.0) * (i - j))
            state = state + root * k[:, :, j * SIZE : (j + 1) * SIZE]
        found.append(state)
    return torch.cat(found, 2)


def test_what_fails_within_steps_at_once_leaves_nothing_behind() -> None:
    with pytest.raises(CaptureError):
        _check(Padded(_makes_a_constant), SIZES)
    assert get_interpreter_stack() is None
