"""Loops that take a block of a tensor in each step: the length of all blocks is open."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import attngraph
from attngraph.errors import CaptureError
from attngraph.frontend.rewording.loop_lists import Unread
from attngraph.frontend.rewording.loop_steps import Helpers

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


def test_a_length_of_no_whole_blocks_is_no_scan() -> None:
    """Of numbers, as of sizes: the last block would be shorter."""
    with pytest.raises(Unread, match=r"multiple"):
        Helpers.run((0, 10, SIZE), lambda *_: ([], []), [], [], [])
