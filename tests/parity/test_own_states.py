"""Decoders of modules that nobody knows, which keep states: found by shape, checked over steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph import Decoder, optimize_decoder
from attngraph.errors import ParityError, UsageError

pytestmark = pytest.mark.wide

WIDTH, HEADS, VOCABULARY = 16, 2, 50
BATCH, SEQ, PAST = Dim("batch"), Dim("seq"), Dim("past")
IDS = torch.randint(VOCABULARY, (2, 3), generator=torch.Generator().manual_seed(0))
ROWS = {0: BATCH, 1: SEQ}


class Recurrent(nn.Module):
    """An LSTM; `swaps` returns the cell before the hidden state, `forgets` begins anew."""

    def __init__(self, *, swaps: bool = False, forgets: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.cells = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.swaps, self.forgets = swaps, forgets

    def forward(self, ids: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = (0 * hidden, cell) if self.forgets else (hidden, cell)
        found, (first, second) = self.cells(self.embed(ids), given)
        states = (second, first) if self.swaps else (first, second)
        return self.out(found), *states


CELLS = (IDS, torch.randn(1, 2, WIDTH), torch.randn(1, 2, WIDTH))
SHAPES: tuple[Any, ...] = (ROWS, {1: BATCH}, {1: BATCH})


class Convolution(nn.Module):
    """Over a token and three before it, of which padding is zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.taps = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH)

    def forward(self, ids: Tensor, mask: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([state, (self.embed(ids) * mask[..., None]).mT], 2)
        return self.out(nn.functional.silu(self.taps(x)).mT), x[:, :, -3:]


class Hybrid(nn.Module):
    """Retention, whose state is a matrix for each head, then causal attention with keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.retained, self.attended = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.rate = nn.Parameter(torch.tensor([-0.1, -0.4]))

    def forward(
        self, ids: Tensor, state: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, n = self.embed(ids), torch.arange(ids.shape[1])
        q, k, v = self._heads(self.retained(x))
        behind, rate = n[:, None] - n, self.rate[:, None, None]
        decay = torch.where(behind >= 0, (rate * behind.clamp_min(0)).exp(), 0.0)
        y = (q @ k.mT * decay) @ v + (q * (rate * (n[:, None] + 1)).exp()) @ state
        to_end = (rate * (ids.shape[1] - 1 - n)[:, None]).exp()
        state = state * (rate * ids.shape[1]).exp() + (k * to_end).mT @ v
        x = x + y.transpose(1, 2).flatten(2)
        q, k, v = self._heads(self.attended(x))
        before = keys.shape[2]
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        seen = torch.arange(keys.shape[2]) <= (n + before)[:, None]
        y = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return self.out(x + y.transpose(1, 2).flatten(2)), state, keys, values

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in x.chunk(3, 2))


def greedy(module: nn.Module, empty: Any, count: int) -> Tensor:
    """What the module gives of all tokens at once, behind nothing."""
    ids = IDS
    for _ in range(count):
        with torch.no_grad():
            logits = module(ids, *empty(ids))[0][:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


def test_states_that_do_not_begin_with_rows(tmp_path: Path) -> None:
    module = Recurrent().eval()
    decoder = optimize_decoder(module, CELLS, dynamic_shapes=SHAPES)
    assert decoder.layout.states == ("hidden", "cell")
    assert any("zero before the first token: hidden, cell" in n for n in decoder.report.notes)
    decoder.save(tmp_path / "model.onnx")
    expected = greedy(module, lambda _: [torch.zeros(1, 2, WIDTH)] * 2, 5)
    for each in (decoder, Decoder.load(tmp_path / "model.onnx")):
        assert torch.equal(each.generate(IDS, 5), expected)


def test_states_of_one_shape_are_paired_by_name_where_their_order_is_another() -> None:
    module = Recurrent(swaps=True).eval()
    with pytest.raises(ParityError, match="paired wrongly, name them"):
        optimize_decoder(module, CELLS, dynamic_shapes=SHAPES)
    presents = {"hidden": "output_2", "cell": "output_1"}
    decoder = optimize_decoder(module, CELLS, dynamic_shapes=SHAPES, presents=presents)
    expected = greedy(module, lambda _: [torch.zeros(1, 2, WIDTH)] * 2, 5)
    assert torch.equal(decoder.generate(IDS, 5), expected)


def test_a_module_that_does_not_go_on_from_its_states_is_refused() -> None:
    with pytest.raises(ParityError, match="go on from its states"):
        optimize_decoder(Recurrent(forgets=True).eval(), CELLS, dynamic_shapes=SHAPES)


def test_a_state_beside_a_mask_of_the_new_tokens() -> None:
    module = Convolution().eval()
    args = (IDS, torch.ones(2, 3), torch.randn(2, WIDTH, 3))
    decoder = optimize_decoder(module, args, dynamic_shapes=(ROWS, ROWS, {0: BATCH}))
    assert (decoder.layout.mask, decoder.layout.past) == ("mask", "")
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    padded = decoder.generate(IDS, 5, mask)
    assert torch.equal(padded[1:, 1:], decoder.generate(IDS[1:, 1:], 5))
    zeros = torch.zeros(2, WIDTH, 3)
    expected = greedy(module, lambda ids: [torch.ones(ids.shape), zeros], 5)
    assert torch.equal(padded[:1], expected[:1])


@pytest.mark.parametrize("room", [{}, {"cache": "static", "max_length": 12}], ids=["grows", "room"])
def test_a_state_beside_keys(room: dict[str, Any]) -> None:
    module, width = Hybrid().eval(), WIDTH // HEADS
    args = (IDS, torch.randn(2, HEADS, width, width), *torch.randn(2, 2, HEADS, 5, width))
    shapes = (ROWS, {0: BATCH}, {0: BATCH, 2: PAST}, {0: BATCH, 2: PAST})
    decoder = optimize_decoder(module, args, dynamic_shapes=shapes, **room)
    assert decoder.layout.states == ("state",)
    assert decoder.is_static == bool(room)
    nothing = torch.zeros(2, HEADS, 0, width)
    expected = greedy(module, lambda _: [torch.zeros(2, HEADS, width, width), nothing, nothing], 6)
    assert torch.equal(decoder.generate(IDS, 6), expected)
    _, cache = decoder(expected[:, :4])
    logits, _ = decoder(expected[:, 4:7], None, cache)
    assert torch.equal(logits[:, -1].argmax(-1), expected[:, 7])


class Styled(nn.Module):
    """A vector that stays the same in all steps, beside an output of its shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, style: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(ids) + style[:, None]
        keys = torch.cat([past, x], 1)
        places = torch.arange(ids.shape[1])[:, None] + past.shape[1]
        seen = torch.arange(keys.shape[1]) <= places
        x = nn.functional.scaled_dot_product_attention(x, keys, keys, attn_mask=seen)
        return self.out(x), x.mean(1), keys


def test_what_only_looks_like_a_state_is_refused() -> None:
    args = (IDS, torch.randn(2, WIDTH), torch.randn(2, 5, WIDTH))
    shapes = (ROWS, {0: BATCH}, {0: BATCH, 1: PAST})
    with pytest.raises(ParityError, match="don't begin at zero"):
        optimize_decoder(Styled().eval(), args, dynamic_shapes=shapes)


def test_what_states_begin_at_is_told_without_verification_too() -> None:
    decoder = optimize_decoder(Recurrent().eval(), CELLS, dynamic_shapes=SHAPES, verify="off")
    assert any("zero before the first token: hidden, cell" in n for n in decoder.report.notes)


def test_what_is_no_state_is_named() -> None:
    module = Recurrent().eval()
    alone = ({0: BATCH, 1: SEQ}, {1: Dim("others")}, {1: Dim("others")})
    with pytest.raises(UsageError, match="The cache of Recurrent can't be found"):
        optimize_decoder(module, CELLS, dynamic_shapes=alone)
    with pytest.raises(UsageError, match="states alone"):
        optimize_decoder(module, CELLS, dynamic_shapes=SHAPES, cache="static", max_length=12)
