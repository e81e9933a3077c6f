"""The delta rule in whole chunks: one operator and its state, of fixed lengths and open ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import attngraph

pytestmark = pytest.mark.wide
CHUNK, KEYS, WIDTH, VALUES = 8, 4, 4, 6


class Delta(nn.Module):
    """S = (I − β k kᵀ) D S + β k vᵀ, D of each key feature, over chunks of which each is solved.

    `groups` values' heads share the queries and keys of one.
    """

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups, heads = groups, 2 * groups
        self.q, self.k = nn.Linear(8, 2 * WIDTH), nn.Linear(8, 2 * WIDTH)
        self.v, self.g = nn.Linear(8, heads * VALUES), nn.Linear(8, heads * WIDTH)
        self.beta = nn.Linear(8, heads)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, length = x.shape[:2]
        count = length // CHUNK

        def rows(each: nn.Module, heads: int) -> Tensor:
            made: Tensor = each(x)
            return made.unflatten(2, (heads, -1))

        def chunks(y: Tensor) -> Tensor:
            return y.unflatten(1, (count, CHUNK)).permute(0, 3, 1, 2, 4)

        heads = 2 * self.groups
        k = functional.normalize(rows(self.k, 2), dim=-1)
        q, k = (chunks(y).repeat_interleave(self.groups, 1) for y in (rows(self.q, 2), k))
        v, beta = chunks(rows(self.v, heads)), chunks(torch.sigmoid(rows(self.beta, heads)))
        g = chunks(functional.logsigmoid(rows(self.g, heads))).cumsum(-2)
        ahead, behind = k * g.exp(), k * (-g).exp()
        solved = torch.linalg.solve_triangular(
            torch.eye(CHUNK) + (beta * ahead @ behind.transpose(-1, -2)).tril(-1),
            torch.eye(CHUNK).expand(*k.shape[:3], CHUNK, CHUNK),
            upper=False,
        )
        w, u = solved @ (beta * ahead), solved @ (beta * v)
        state, found = x.new_zeros(batch, heads, WIDTH, VALUES), []
        for i in range(count):
            last = g[:, :, i, -1:]
            new = u[:, :, i] - self.taken(w[:, :, i]) @ state
            near = ((q[:, :, i] * g[:, :, i].exp()) @ behind[:, :, i].transpose(-1, -2)).tril()
            found.append((q[:, :, i] * g[:, :, i].exp()) @ self.seen(state) + near @ new)
            state = state * last.exp().transpose(-1, -2)
            state = state + (k[:, :, i] * (last - g[:, :, i]).exp()).transpose(-1, -2) @ new
        return torch.cat(found, 2).transpose(1, 2).flatten(2), state

    def taken(self, w: Tensor) -> Tensor:
        return w

    def seen(self, state: Tensor) -> Tensor:
        return state


class Halved(Delta):
    """Takes half of what it should off its state: no delta rule across chunks."""

    def taken(self, w: Tensor) -> Tensor:
        return w * 0.5


class Leaking(Delta):
    """A state shows in the head of the same queries and keys, by less than a trial tells."""

    def seen(self, state: Tensor) -> Tensor:
        return state + 1e-12 * state.unflatten(1, (2, self.groups)).flip(2).flatten(1, 2)


def _compiled(module: nn.Module, *, is_open: bool) -> attngraph.Optimized:
    shapes: Any = ({1: CHUNK * Dim("chunks", max=32)},) if is_open else None
    return attngraph.optimize(module, (torch.randn(2, 3 * CHUNK, 8),), dynamic_shapes=shapes)


def _is_right(optimized: attngraph.Optimized, module: nn.Module, length: int) -> None:
    x = torch.randn(2, length, 8)
    with torch.no_grad():
        expected = module(x)
    for one, other in zip(optimized(x), expected, strict=True):
        assert (one - other).abs().max() <= 2e-5 * other.abs().max()


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_chunks_are_one_operator_with_its_state(groups: int, is_open: bool) -> None:
    module = Delta(groups).eval()
    optimized = _compiled(module, is_open=is_open)
    ops = [node.op_type for node in optimized.model.graph.all_nodes()]
    assert ops.count("LinearAttention") == 1
    assert "Scan" not in ops
    for length in (8, 24, 80) if is_open else (24,):
        _is_right(optimized, module, length)


def test_a_state_that_shows_in_another_head_is_no_recurrence() -> None:
    module = Leaking(2).eval()
    optimized = _compiled(module, is_open=False)
    assert "attn.linear_attention" not in [node.op for node in optimized.graph]
    _is_right(optimized, module, 24)


@pytest.mark.parametrize("is_open", [False, True])
def test_what_is_no_delta_rule_across_chunks_stays(is_open: bool) -> None:
    module = Halved(2).eval()
    optimized = _compiled(module, is_open=is_open)
    ops = [node.op_type for node in optimized.model.graph.all_nodes()]
    if is_open:  # within a chunk there is one
        assert ops.count("Scan") == 1
    else:
        assert "LinearAttention" not in ops
    for length in (8, 24, 80) if is_open else (24,):
        _is_right(optimized, module, length)
