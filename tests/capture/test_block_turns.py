"""Loops over blocks in the words in which people write them: splits, zips, numbers, both ways."""

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
LENGTHS = ((1, 1), (2, 4), (3, 5), (2, 8), (2, 9), (2, 12), (1, 31), (2, 64))


class Computes(nn.Module):
    def __init__(self, code: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor) -> Any:
        return self.code(x)


class Padded(Computes):
    """To whole blocks."""

    def forward(self, x: Tensor) -> Any:
        found: Tensor = self.code(F.pad(x, (0, 0, 0, -x.shape[1] % SIZE)))
        return found[:, : x.shape[1]]


def _compiled(model: nn.Module, length: int = 11) -> attngraph.Optimized:
    dims = {0: Dim("batch", max=8), 1: Dim("length", max=64)}
    return attngraph.optimize(model.eval(), (torch.randn(2, length, 4),), dynamic_shapes=(dims,))


def _is_right(model: nn.Module, found: attngraph.Optimized) -> None:
    for batch, length in LENGTHS:
        x = torch.randn(batch, length, 4)
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)


def _next(state: Tensor, block: Tensor) -> Tensor:
    return state * 0.5 + block.mean(1, keepdim=True)


def _numbered(x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, :1]), []
    for i, start in enumerate(range(0, x.shape[1], SIZE)):
        block = x[:, start : start + SIZE]
        found.append(block + state * (i + 1))
        state = _next(state, block)
    return torch.cat(found, 1)


def _numbered_from_one(x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, :1]), []
    for i, block in enumerate(x.split(SIZE, 1), start=1):
        found.append(block + state * i)
        state = _next(state, block)
    return torch.cat(found, 1)


def _starts_and_ends(x: Tensor) -> Tensor:
    state, found, length = torch.zeros_like(x[:, :1]), [], x.shape[1]
    for start, end in zip(range(0, length, SIZE), range(SIZE, length + SIZE, SIZE), strict=True):
        found.append(x[:, start:end] + state)
        state = _next(state, x[:, start:end])
    return torch.cat(found, 1)


def _placed(x: Tensor) -> Tensor:
    """Places of a block's rows among all, by where it ends and by how many it has."""
    found, length = [], x.shape[1]
    for start in range(0, length, SIZE):
        end = min(start + SIZE, length)
        block, place = x[:, start:end], torch.arange(start, end, dtype=x.dtype)
        hidden = torch.arange(length) > torch.arange(start, start + block.shape[1])[:, None]
        seen = (block @ x.mT).masked_fill(hidden, -torch.inf).softmax(-1)
        found.append(seen @ x + place[:, None] * torch.arange(start, start + 4))
    return torch.cat(found, 1)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """A retention of three tensors in step; decays have as many numbers as the block has rows."""
    state, found = x.new_zeros(len(x), 4, 4), []
    q, k, v = x, x.flip(1), x.cos()
    for query, key, value in zip(
        q.split(SIZE, 1), torch.split(k, SIZE, dim=1), v.split(SIZE, 1), strict=True
    ):
        size = query.shape[1]
        place = torch.arange(size)
        seen = (query @ key.mT).tril() * 0.9 ** (place[:, None] - place).clamp(min=0)
        found.append(seen @ value + query * 0.9 ** (place[:, None] + 1) @ state)
        state = state * 0.9**size + (key * 0.9 ** (size - 1 - place[:, None])).mT @ value
    return torch.cat(found, 1), state


def _from_the_list(x: Tensor) -> Tensor:
    """A list with a name, and one expression that needs no state."""
    blocks, state = x.split(SIZE, dim=-2), torch.zeros_like(x[:, :1])
    for at in range(len(blocks)):
        state = _next(state, blocks[at])
    return torch.cat([block.softmax(1) for block in blocks], 1) + state


def _backwards(x: Tensor) -> Tensor:
    """The first step has the shorter block."""
    state, found = torch.zeros_like(x[:, :1]), []
    for start in reversed(range(0, x.shape[1], SIZE)):
        block = x[:, start : start + SIZE]
        found.insert(0, block + state)
        state = _next(state, block)
    return torch.cat(found, 1)


def _backwards_as_appended(x: Tensor) -> Tensor:
    """The shorter block comes first."""
    state, found = torch.zeros_like(x[:, :1]), []
    for start in range(0, x.shape[1], SIZE)[::-1]:
        found.append(x[:, start : start + SIZE] + state)
        state = _next(state, x[:, start : start + SIZE])
    return torch.cat(found, 1)


def _written_backwards(x: Tensor) -> Tensor:
    state, given = torch.zeros_like(x[:, :1]), torch.empty_like(x)
    for start in reversed(range(0, x.shape[1], SIZE)):
        given[:, start : start + SIZE] = x[:, start : start + SIZE] + state
        state = _next(state, x[:, start : start + SIZE])
    return given


CUT = (
    *(_placed, _starts_and_ends, _split, _from_the_list),
    *(_backwards, _backwards_as_appended, _written_backwards),
)


@pytest.mark.parametrize("code", CUT, ids=lambda code: code.__name__)
def test_blocks_of_any_length_are_taken(code: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    model = Computes(code)
    _is_right(model, _compiled(model))


def _chunked(x: Tensor) -> Tensor:
    """As many chunks as there are blocks."""
    state, found = torch.zeros_like(x[:, :1]), []
    for block in x.chunk(x.shape[1] // SIZE, 1):
        found.append(block + state)
        state = _next(state, block)
    return torch.cat(found, 1)


WHOLE = (_backwards, _chunked)


@pytest.mark.parametrize("code", WHOLE, ids=lambda code: code.__name__)
def test_padded_blocks_are_taken(code: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Padded(code)
    _is_right(model, _compiled(model))


@pytest.mark.parametrize("code", [_numbered, _numbered_from_one], ids=lambda code: code.__name__)
def test_a_sample_of_one_block_is_one_of_any_number(code: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Computes(code)
    _is_right(model, _compiled(model, length=3))


def _fewer_chunks(x: Tensor) -> Tensor:
    """Chunks of a length that their number doesn't divide are smaller than SIZE."""
    state, found = torch.zeros_like(x[:, :1]), []
    for block in x.chunk(-(-x.shape[1] // SIZE), 1):
        found.append(block + state)
        state = _next(state, block)
    return torch.cat(found, 1)


def _unequal(x: Tensor) -> Tensor:
    """zip leaves out the part that is no whole block."""
    state, length = torch.zeros_like(x[:, :1]), x.shape[1]
    for start, end in zip(range(0, length, SIZE), range(SIZE, length + 1, SIZE), strict=False):
        state = _next(state, x[:, start:end])
    return x + state


def _changed(x: Tensor) -> Tensor:
    """The name of the list is that of another one from the second step on."""
    blocks, state = x.split(SIZE, 1), torch.zeros_like(x[:, :1])
    for block in blocks:
        state = _next(state, block)
        blocks = (state,)
    return x + state + blocks[0]


def _from_behind(x: Tensor) -> Tensor:
    """A block is the list's at the place counted from its end."""
    blocks, state = x.split(SIZE, 1), torch.zeros_like(x[:, :1])
    for i, _ in enumerate(blocks):
        state = _next(state, blocks[-1 - i])
    return x + state


NEAR_MISSES = (_fewer_chunks, _unequal, _changed, _from_behind)


@pytest.mark.parametrize("code", NEAR_MISSES, ids=lambda code: code.__name__)
def test_other_turns_are_refused_or_right(code: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Computes(code)
    try:
        found = _compiled(model)
    except CaptureError:
        return
    _is_right(model, found)
