"""Loops that take a block of a tensor in each step: the length of all blocks is open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import attngraph
from attngraph.errors import CaptureError

pytestmark = pytest.mark.wide

SIZE = 4


class Blocks(nn.Module):
    """Each block sees what was before it, by a state; the length is padded to whole blocks."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, -x.shape[1] % SIZE))
        return self.code(padded)[:, : x.shape[1]]


def _mixed(state: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    seen = (block @ block.mT).softmax(-1) @ block + state
    return state * 0.5 + block.sum(1, keepdim=True), seen


def _by_start(x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, :1]), []
    for start in range(0, x.shape[1], SIZE):
        state, seen = _mixed(state, x[:, start : start + SIZE])
        found.append(seen + start)
    return torch.cat(found, 1)


def _by_number(x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, :1]), []
    for i in range(x.shape[1] // SIZE):
        start, scale = i * SIZE, 2.0
        block = x[:, i * SIZE : (i + 1) * SIZE] * scale
        state, seen = _mixed(state, block)
        found.append(seen + start)
    return torch.cat(found, dim=1)


def _by_names(x: Tensor) -> Tensor:
    """Ends that can't be beyond the tensor, and an axis that is counted from the end."""
    state, given, length = torch.zeros_like(x[:, :1]), torch.zeros_like(x), x.shape[1]
    for i in range((length + SIZE - 1) // SIZE):
        start = i * SIZE
        end = min(start + SIZE, length)
        state, seen = _mixed(state, x[..., start:end, :])
        given[:, start:end] = seen
    return given


def _by_two(x: Tensor) -> Tensor:
    """Blocks of some of the features, beside one place for each block."""
    sums = x.unflatten(1, (-1, SIZE)).sum(2)
    state, found = torch.zeros_like(x[:, :1]), []
    for i in range(x.shape[1] // SIZE):
        block = x[:, SIZE * i : SIZE * i + SIZE, 2:]
        state, seen = _mixed(state, torch.cat([block, block], -1) * sums[:, i, None])
        found.append(seen)
    return torch.cat(found, 1)


def _with_new_axes(x: Tensor) -> Tensor:
    """Axes that the tensor lacks, before a place and behind it; and a list that is added to."""
    state, found = torch.zeros_like(x[:, :1]), []
    sums = x.unflatten(1, (-1, SIZE)).sum(2)
    for i in range(x.shape[1] // SIZE):
        block = x[:, None, i * SIZE : (i + 1) * SIZE]
        state, seen = _mixed(state, block.sum(1) + sums[..., i, None, :] * sums[:, None, i])
        found += [seen]
    return torch.cat(found, 1)


def _listed(x: Tensor) -> Tensor:
    return torch.cat([x[:, at : at + SIZE].cumsum(1) for at in range(0, x.shape[1], SIZE)], 1)


def _sliding(x: Tensor) -> Tensor:
    """Blocks that overlap, each of the places around its own."""
    wider, found = F.pad(x, (0, 0, 2, 1)), []
    for t in range(x.shape[1]):
        found.append((wider[:, t : t + 4] * x[:, t : t + 1]).softmax(1).sum(1) * x[:, t])
    return torch.stack(found, 1)


def _sliding_states(x: Tensor) -> Tensor:
    """The same beside a state, two places of three."""
    wider, state = F.pad(x, (0, 0, 1, 1)), torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        state = torch.tanh(state + wider[:, t + 1 : t + 3].sum(1))
    return x + state[:, None]


CODE = (
    *(_by_start, _by_number, _by_names, _by_two, _with_new_axes, _listed),
    *(_sliding, _sliding_states),
)


def _compiled(code: Callable[[Tensor], Tensor]) -> tuple[nn.Module, attngraph.Optimized]:
    torch.manual_seed(0)
    model = Blocks(code).eval()
    dims = {0: Dim("batch", max=8), 1: Dim("length", max=64)}
    return model, attngraph.optimize(model, (torch.randn(2, 11, 4),), dynamic_shapes=(dims,))


@pytest.mark.parametrize("code", CODE, ids=lambda code: code.__name__)
def test_any_number_of_blocks_is_taken(code: Callable[[Tensor], Tensor]) -> None:
    model, found = _compiled(code)
    for batch, length in ((1, 1), (2, 4), (3, 5), (1, 31)):
        x = torch.randn(batch, length, 4)
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)


def _overlapping(x: Tensor) -> Tensor:
    state = torch.zeros_like(x[:, :1])
    for start in range(0, x.shape[1], SIZE):
        state = state + x[:, start : start + 2 * SIZE].amax(1, keepdim=True)
    return x + state


def _ending_before(x: Tensor) -> Tensor:
    """The last block has one place fewer."""
    state, length = torch.zeros_like(x[:, :1]), x.shape[1] - 1
    for start in range(0, x.shape[1], SIZE):
        state = state + x[:, start : min(start + SIZE, length)].mean(1, keepdim=True)
    return x + state


def _renamed(x: Tensor) -> Tensor:
    """The name of the start is another number in every step."""
    state, start = torch.zeros_like(x[:, :1]), 0
    for i in range(x.shape[1] // SIZE):
        state = state + x[:, start : start + SIZE].mean(1, keepdim=True)
        start = start + (SIZE if i < 1 else 0)
    return x + state


def _squared(x: Tensor) -> Tensor:
    """The first two blocks are one behind the other."""
    state = torch.zeros_like(x[:, :1])
    for i in range(x.shape[1] // SIZE):
        state = state + x[:, i * i * SIZE : i * i * SIZE + SIZE].sum(1, keepdim=True)
    return x + state


def _growing(x: Tensor) -> Tensor:
    state = torch.zeros_like(x[:, :1])
    for i in range(x.shape[1] // SIZE):
        state = state + x[:, i * SIZE : (i + 1) * SIZE + i].sum(1, keepdim=True)
    return x + state


def _late(x: Tensor) -> Tensor:
    """The start is that of the step before."""
    state, start = torch.zeros_like(x[:, :1]), 0
    for i in range(x.shape[1] // SIZE):
        state = state * 0.5 + x[:, start : start + SIZE].sum(1, keepdim=True)
        start = i * SIZE
    return x + state


def _before(x: Tensor) -> Tensor:
    """The first block begins before the tensor, which Python counts from the end."""
    state = torch.zeros_like(x[:, :1])
    for i in range(x.shape[1] // SIZE):
        state = state + x[:, (i - 1) * SIZE : i * SIZE].sum(1, keepdim=True)
    return x + state


def _sliding_beyond(x: Tensor) -> Tensor:
    """The last block has one place fewer."""
    state = torch.zeros_like(x[:, :1])
    for t in range(x.shape[1]):
        state = state + x[:, t : t + 2].mean(1, keepdim=True)
    return x + state


NEAR_MISSES = (
    _sliding_beyond,
    _before,
    _overlapping,
    _ending_before,
    _growing,
)


@pytest.mark.parametrize("code", NEAR_MISSES, ids=lambda code: code.__name__)
def test_other_blocks_are_refused(code: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"the model (fixes it|demands)"):
        _compiled(code)


@pytest.mark.parametrize("code", [_renamed, _squared, _late], ids=lambda code: code.__name__)
def test_a_start_that_steps_compute_is_theirs(code: Callable[[Tensor], Tensor]) -> None:
    """A trial of a step reads it first, and what was read there is no other step's."""
    model, found = _compiled(code)
    for batch, length in ((2, 5), (3, 8), (2, 31), (2, 64)):
        x = torch.randn(batch, length, 4)
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)


class Cut(Blocks):
    """The last block is as long as the length leaves it."""

    def forward(self, x: Tensor) -> Any:
        return self.code(x)


def _by_number_of_blocks(x: Tensor) -> Tensor:
    """Decays of a table, by a size that all blocks have but the last."""
    state, found, length = x.new_zeros(len(x), 4, 4), [], x.shape[1]
    decay, back = torch.arange(1.0, SIZE + 1)[:, None], torch.arange(SIZE, 0.0, -1)[:, None]
    for i in range((length + SIZE - 1) // SIZE):
        start, end = i * SIZE, min(i * SIZE + SIZE, length)
        size = end - start
        block = x[:, start:end]
        found.append((block @ block.mT).tril() @ block + block * decay[:size] @ state)
        state = state * 0.5**size + (block * back[-size:]).mT @ block
    return torch.cat(found, 1)


def _online(x: Tensor) -> Tensor:
    """Softmax over blocks of keys: a padded key would count."""
    given, total = torch.zeros_like(x), x.new_zeros(*x.shape[:2], 1)
    most = torch.full_like(total, -torch.inf)
    for start in range(0, x.size(1), SIZE):
        keys = x[:, start : start + SIZE]
        scores = x @ keys.mT
        larger = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights, before = (scores - larger).exp(), (most - larger).exp()
        total = total * before + weights.sum(-1, keepdim=True)
        given, most = given * before + weights @ keys, larger
    return given / total


def _attended(x: Tensor) -> Tensor:
    """Blocks of queries; no state."""
    found, q = [], x.unflatten(2, (2, 2)).transpose(1, 2)
    for start in range(0, x.shape[1], SIZE):
        found.append(F.scaled_dot_product_attention(q[:, :, start : start + SIZE], q, q))
    return torch.cat(found, 2).transpose(1, 2).flatten(2)


def _attended_under_masks(x: Tensor) -> Tensor:
    """A mask that is cut with the queries, of which the first sees no key."""
    found, q = [], x.unflatten(2, (2, 2)).transpose(1, 2)
    place = torch.arange(x.shape[1])
    seen = place[None] < place[:, None]
    for start in range(0, x.shape[1], SIZE):
        block, mask = q[:, :, start : start + SIZE], seen[start : start + SIZE]
        found.append(F.scaled_dot_product_attention(block, q, q, attn_mask=mask))
    return torch.cat(found, 2).transpose(1, 2).flatten(2)


def _by_the_third(x: Tensor) -> Tensor:
    """Single places, a step apart that needn't divide the length."""
    state = x[:, 0]
    for t in range(0, x.shape[1], 3):
        state = torch.tanh(state + x[:, t])
    return x + state[:, None]


def _written(x: Tensor) -> Tensor:
    given = torch.empty_like(x)
    for start in range(0, x.shape[1], SIZE):
        end = start + SIZE
        given[:, start:end] = x[:, start:end].softmax(1)
    return given


def _centred(x: Tensor) -> Tensor:
    """Each block less its own largest, in one expression."""

    def centred(block: Tensor) -> Tensor:
        return block - block.amax(1, keepdim=True)

    return torch.cat([centred(x[:, at : at + SIZE]) for at in range(0, x.shape[1], SIZE)], 1)


def _state_of_all(x: Tensor) -> tuple[Tensor, Tensor]:
    """The state behind the last block, and two tensors in step."""
    state, other, found = torch.zeros_like(x[:, :1]), x.flip(1), []
    for start in range(0, x.shape[1], SIZE):
        one, two = x[:, start : start + SIZE], other[:, start : start + SIZE]
        state = state * 0.9 + (one * two).mean(1, keepdim=True)
        found.append(one + state)
    return torch.cat(found, 1), state


LAST_IS_SHORTER = (
    *(_by_number_of_blocks, _online, _attended, _attended_under_masks),
    *(_by_the_third, _written, _centred, _state_of_all),
)


@pytest.mark.parametrize("code", LAST_IS_SHORTER, ids=lambda code: code.__name__)
def test_the_last_block_may_be_shorter(code: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    model = Cut(code).eval()
    dims = {0: Dim("batch", max=8), 1: Dim("length", max=64)}
    found = attngraph.optimize(model, (torch.randn(2, 11, 4),), dynamic_shapes=(dims,))
    for batch, length in ((1, 1), (2, 4), (3, 5), (2, 8), (2, 9), (2, 12), (1, 31), (2, 64)):
        x = torch.randn(batch, length, 4)
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)


def _short_of_the_end(x: Tensor) -> Tensor:
    """One block more than are whole, which may have no rows."""
    state = torch.zeros_like(x[:, :1])
    for i in range(x.shape[1] // SIZE + 1):
        state = state + x[:, i * SIZE : i * SIZE + SIZE].sum(1, keepdim=True)
    return x + state


def _behind_the_first(x: Tensor) -> Tensor:
    """Of one row there is no block."""
    state, rest = x[:, :1], x[:, 1:]
    for start in range(0, rest.shape[1], SIZE):
        state = state + rest[:, start : start + SIZE].mean(1, keepdim=True)
    return x + state


def _from_the_second(x: Tensor) -> Tensor:
    state = x[:, :1]
    for start in range(1, x.shape[1], SIZE):
        state = state + x[:, start : start + SIZE].mean(1, keepdim=True)
    return x + state


def _other_axis(x: Tensor) -> Tensor:
    """Blocks of rows as of the length, of which there are fewer."""
    state = torch.zeros_like(x[:, :1])
    for start in range(0, x.shape[1], SIZE):
        state = state + x[start : start + SIZE].sum((0, 1))
    return x + state


ELSEWHERE = (_short_of_the_end, _behind_the_first, _from_the_second, _other_axis)


@pytest.mark.parametrize("code", ELSEWHERE, ids=lambda code: code.__name__)
def test_blocks_that_end_elsewhere_are_refused_or_right(code: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Cut(code).eval()
    dims = {0: Dim("batch", max=8), 1: Dim("length", max=64)}
    try:
        found = attngraph.optimize(model, (torch.randn(2, 11, 4),), dynamic_shapes=(dims,))
    except CaptureError:
        return
    for batch, length in ((1, 1), (2, 4), (3, 5), (2, 8), (5, 31)):
        x = torch.randn(batch, length, 4)
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)
