"""Linear attention block by block, as MiniMax has it: one operator, whatever the last block's size.

What only looks like it stays a loop, and is right as one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph

pytestmark = pytest.mark.wide
SIZE, HEADS, WIDTH = 8, 2, 4


class Lightning(nn.Module):
    """S_i = λ^m S_{i−1} + Σ λ^{m−t} k_t ⊗ v_t over blocks of m rows, m less in the last one."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        q, k, v = (part.unflatten(2, (HEADS, WIDTH)).transpose(1, 2) for part in x.chunk(3, dim=2))
        slope = torch.tensor([0.5, 0.25]).view(HEADS, 1, 1)
        place = torch.arange(SIZE) + 1
        ahead = torch.exp(-slope * place[:, None])
        behind = torch.exp(-slope * (SIZE - place[:, None]))
        apart = place[:, None] - place[None]
        decay = torch.exp(torch.where(apart >= 0, -slope * apart, -torch.inf))
        state, found = x.new_zeros(batch, HEADS, WIDTH, WIDTH), []
        for i in range((length + SIZE - 1) // SIZE):
            start, end = i * SIZE, min(i * SIZE + SIZE, length)
            rows = end - start
            qi, ki, vi = q[:, :, start:end], k[:, :, start:end], v[:, :, start:end]
            within = (qi @ ki.transpose(-1, -2) * decay[:, :rows, :rows]) @ vi
            found.append(within + self.seen(qi * ahead[:, :rows] @ state, i))
            state = torch.exp(-slope * rows) * state
            state = state + (ki * behind[:, -rows:]).transpose(-1, -2) @ vi
        return torch.cat(found, 2).transpose(1, 2).flatten(2)

    def seen(self, before: Tensor, number: Any) -> Tensor:
        """What a block reads of the state before it."""
        return before


class Numbered(Lightning):
    """Later blocks read more of the state."""

    def seen(self, before: Tensor, number: Any) -> Tensor:
        return before * (1 + 0.01 * number)


class Squashed(Lightning):
    """No linear function of the state."""

    def seen(self, before: Tensor, number: Any) -> Tensor:
        return torch.tanh(before)


class Chunks(nn.Module):
    """Causal linear attention over whole chunks, of a length that is so many."""

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1] // WIDTH
        q, k, v = (part.unflatten(1, (count, WIDTH)) for part in x.chunk(3, dim=2))
        state, found = x.new_zeros(x.shape[0], 8, 8), []
        for i in range(count):
            within = (q[:, i] @ k[:, i].transpose(1, 2)).tril() @ v[:, i]
            found.append(within + q[:, i] @ state)
            state = state + k[:, i].transpose(1, 2) @ v[:, i]
        return torch.cat(found, 1)


def _fused(optimized: attngraph.Optimized) -> list[str]:
    return [site.code for site in optimized.report.sites if site.status == "fused"]


def _assert_right(model: nn.Module, optimized: attngraph.Optimized, *lengths: int) -> None:
    for length in lengths:
        x = torch.randn(3, length, 3 * HEADS * WIDTH)
        expected = model(x)
        rounding = torch.finfo(torch.float32).eps * float(expected.abs().max())  # sums cancel
        torch.testing.assert_close(optimized(x), expected, rtol=0, atol=16 * rounding)


@pytest.mark.parametrize(
    ("kind", "fused"), [(Lightning, ["recurrence"]), (Numbered, []), (Squashed, [])]
)
def test_blocks_of_any_length(kind: type[nn.Module], fused: list[str]) -> None:
    torch.manual_seed(0)
    model, dims = kind().eval(), {0: Dim("batch", max=8), 1: Dim("length", max=128)}
    optimized = attngraph.optimize(model, (torch.randn(2, 20, 24),), dynamic_shapes=(dims,))
    assert _fused(optimized) == fused
    _assert_right(model, optimized, 1, 7, 8, 9, 16, 17, 40, 100)


def test_a_length_of_so_many_chunks_stays_open() -> None:
    """torch calls a derived dim open of which a trace has unrolled the loop."""
    torch.manual_seed(0)
    model, dims = Chunks().eval(), {0: Dim("batch", max=8), 1: 4 * Dim("chunks", max=32)}
    optimized = attngraph.optimize(model, (torch.randn(2, 12, 24),), dynamic_shapes=(dims,))
    assert _fused(optimized) == ["recurrence"]
    _assert_right(model, optimized, 4, 8, 12, 40, 128)
