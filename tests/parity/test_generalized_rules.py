"""A block of RWKV-7, and loops like it, in a session of onnxruntime beside eager's float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from tests.parity.rwkv7 import HEADS, SIZE, WIDTH, Block
from tests.passes import generalized_rules as written

_BATCH, _SEQ = Dim("batch", min=1, max=64), Dim("seq", min=1, max=4096)
_ROUNDINGS = 64  # of the largest number, which 4096 tokens sum up


def _near(module: nn.Module, optimized: attngraph.Optimized, inputs: Sequence[Tensor]) -> None:
    given = [x.double() if x.dtype.is_floating_point else x for x in inputs]
    with torch.no_grad():
        wanted = copy.deepcopy(module).double()(*given)
    found = optimized(*inputs)
    pairs = (
        [(found, wanted)] if isinstance(wanted, Tensor) else list(zip(found, wanted, strict=True))
    )
    for x, y in pairs:
        least = _ROUNDINGS * torch.finfo(torch.float32).eps * float(y.abs().max())
        torch.testing.assert_close(torch.as_tensor(x).double(), y, rtol=0, atol=least)


def _given(rows: int, length: int) -> tuple[Tensor, ...]:
    last = torch.randn(2, rows, WIDTH)
    state = torch.randn(rows, HEADS, SIZE, SIZE)
    return torch.randn(rows, length, WIDTH), last[0], last[1], state


@pytest.fixture(scope="module")
def block() -> tuple[nn.Module, attngraph.Optimized]:
    module = Block().eval()
    shapes = ({0: _BATCH, 1: _SEQ}, *({0: _BATCH} for _ in range(3)))
    return module, attngraph.optimize(module, _given(2, 7), dynamic_shapes=shapes)


def test_a_block_of_rwkv7_is_read(block: tuple[nn.Module, attngraph.Optimized]) -> None:
    _, optimized = block
    ops = [node.op for node in optimized.graph]
    assert "attn.generalized_delta_rule" in ops
    assert "attn.scan" not in ops
    (site,) = [each for each in optimized.report.sites if each.code == "recurrence"]
    assert "in a Scan over chunks of 16 tokens" in site.reason


@pytest.mark.parametrize("length", [1, 8, 9, 16, 40, 1000, 4096])
def test_it_is_eagers_at_each_length(
    block: tuple[nn.Module, attngraph.Optimized], length: int
) -> None:
    torch.manual_seed(length)
    _near(*block, _given(1 if length > 40 else 3, length))


def test_tokens_may_come_in_pieces(block: tuple[nn.Module, attngraph.Optimized]) -> None:
    """What a piece hands on is what the next one starts from: prompts, then single tokens."""
    module, optimized = block
    torch.manual_seed(1)
    x, *states = _given(2, 48)
    with torch.no_grad():
        exact = copy.deepcopy(module).double()
        wanted = exact(x.double(), *(each.double() for each in states))[0]
    pieces = []
    for piece in x.split([17, 20, 1, 1, 9], 1):
        made, *states = optimized(piece, *states)
        pieces.append(torch.as_tensor(made))
    least = _ROUNDINGS * torch.finfo(torch.float32).eps * float(wanted.abs().max())
    torch.testing.assert_close(torch.cat(pieces, 1).double(), wanted, rtol=0, atol=least)


@pytest.mark.parametrize("length", [1, 24])
def test_a_block_of_a_fixed_length(length: int) -> None:
    module = Block().eval()
    torch.manual_seed(2)
    inputs = _given(2, length)
    optimized = attngraph.optimize(module, inputs)
    _near(module, optimized, inputs)
    assert "attn.scan" not in [node.op for node in optimized.graph]


class Hidden(written.Rule):
    """A token that isn't shown leaves the state as it is, whatever stands there."""

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:  # type: ignore[override]
        r, k, v, w, a, b = self.tokens(x)
        state, given = self.zeros(x), []
        for t in range(x.shape[1]):
            now = written.Now(r[:, t], k[:, t], v[:, t], w[:, t], a[:, t], b[:, t])
            new, _ = self.step(state, now)
            state = torch.where(shown[:, t, None, None, None], new, state)
            given.append(written.read(now.r, state))
        return self.o(torch.stack(given, 1).flatten(2))


@pytest.mark.parametrize("length", [1, 9, 33])
def test_hidden_tokens_leave_the_state(length: int) -> None:
    torch.manual_seed(3)
    module, rows = Hidden().eval(), {0: _BATCH, 1: _SEQ}

    def given(length: int) -> tuple[Tensor, Tensor]:
        return torch.randn(2, length, written.WIDTH), torch.rand(2, length) > 0.4

    optimized = attngraph.optimize(module, given(7), dynamic_shapes=(rows, rows))
    assert "attn.generalized_delta_rule" in [node.op for node in optimized.graph]
    _near(module, optimized, given(length))


class Repeated(written.Rule):
    """One key for all tokens, which each of them exchanges what is kept of."""

    def tokens(self, x: Tensor) -> written.Now:
        now = super().tokens(x)
        key = now.a[:, :1].expand_as(now.a)
        return now._replace(a=key, b=-key, k=-key, w=torch.ones_like(now.w))

    def step(self, state: Tensor, now: written.Now) -> written.Pair:
        known = written.read(now.a, state)
        state = state + written.outer(now.b, known) + written.outer(now.k, now.v)
        return state, written.read(now.r, state)


def test_keys_that_repeat_keep_their_digits() -> None:
    """Powers of a chunk's matrix are 10⁴ times as large as its inverse there."""
    module = Repeated().eval()
    rows = {0: _BATCH, 1: _SEQ}
    optimized = attngraph.optimize(
        module, (torch.randn(2, 7, written.WIDTH),), dynamic_shapes=(rows,)
    )
    assert "attn.generalized_delta_rule" in [node.op for node in optimized.graph]
    _near(module, optimized, [torch.randn(2, 64, written.WIDTH)])


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_targets_without_recurrences_keep_the_loop(provider: str) -> None:
    options = {"target": "cuda"} if provider == "cuda" else {"portable": True}
    optimized = attngraph.optimize(
        written.Rule().eval(),
        (torch.randn(2, 7, written.WIDTH),),
        dynamic_shapes=({1: Dim("seq", min=2, max=4096)},),
        verify="off",
        **options,
    )
    assert "attn.scan" in [node.op for node in optimized.graph]
