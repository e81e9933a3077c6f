"""What a decoder is called with is right, or one sentence before anything is computed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph import Decoder
from attngraph.decoding.sampling import Sampling
from attngraph.errors import UsageError
from examples import cached_gpt
from tests.models.kit import VOCABULARY, peaked
from tests.parity.test_decode import PROMPT, compiled, prompts

pytestmark = pytest.mark.wide

ROWS = 2


def asked(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as raised:
        call()
    return str(raised.value)


IDS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "list": (Tensor.tolist, "must be a torch.Tensor, not list"),
    "numpy": (Tensor.numpy, "must be a torch.Tensor, not ndarray"),
    "none": (lambda ids: None, "not NoneType"),
    "float": (Tensor.float, "ids is float32; token ids must be int64 or int32"),
    "uint8": (Tensor.byte, "ids is uint8"),
    "int16": (Tensor.short, "ids is int16"),
    "bool": (Tensor.bool, "ids is bool"),
    "vector": (lambda ids: ids[0], r"(7,); it must be (batch, length)"),
    "no row": (lambda ids: ids[:0], "(0, 7)"),
    "no token": (lambda ids: ids[:, :0], "(2, 0)"),
    "minus one": (lambda ids: ids.index_fill(1, torch.tensor(3), -1), "-1 at row 0, place 3"),
    "one too many": (lambda ids: ids * 0 + VOCABULARY, "knows the ids 0 to 119"),
    "the largest": (lambda ids: ids * 0 + (2**63 - 1), "9223372036854775807"),
    "meta": (lambda ids: ids.to("meta"), "that holds numbers"),
    "sparse": (Tensor.to_sparse, "must be a dense tensor"),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", IDS)
def test_ids_that_are_none(case: str, masked: bool) -> None:
    decoder = compiled("llama")[1]
    ids, mask = prompts(ROWS)
    change, message = IDS[case]
    given = mask if masked else None
    assert message in asked(lambda: decoder(change(ids), given))
    assert message in asked(lambda: decoder.generate(change(ids), 2, given))


MASKS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "list": (Tensor.tolist, "must be a torch.Tensor, not list"),
    "float": (Tensor.float, "attention_mask is float32; a mask must be bool, int64 or int32"),
    "uint8": (Tensor.byte, "attention_mask is uint8"),
    "nan": (lambda mask: mask * math.nan, "is float32"),
    "one row": (lambda mask: mask[:1], "(1, 7); for 0 tokens in the cache and 7 new ones"),
    "vector": (lambda mask: mask[0], "it must be (2, 7)"),
    "number": (lambda mask: mask[0, 0], "it must be (2, 7)"),
    "long": (lambda mask: torch.cat([mask, mask], 1), "it must be (2, 7)"),
    "twos": (lambda mask: mask * 2, "2 at row 0, place 0; it must be 1 where"),
    "negative": (lambda mask: -mask, "-1 at row 0, place 0"),
}


@pytest.mark.parametrize("case", MASKS)
def test_masks_that_are_none(case: str) -> None:
    decoder = compiled("llama")[1]
    ids, mask = prompts(ROWS)
    change, message = MASKS[case]
    assert message in asked(lambda: decoder(ids, change(mask)))
    assert message in asked(lambda: decoder.generate(ids, 2, change(mask)))


def test_as_many_tokens_as_anyone_may_ask_for_end_at_the_first_end() -> None:
    """The check of the sizes of all steps doesn't go through each of 10¹² of them."""
    decoder = compiled("llama")[1]
    ids, _ = prompts(1)
    end = int(decoder.generate(ids, max_new_tokens=1)[0, -1])
    assert decoder.generate(ids, max_new_tokens=10**12, eos_token_id=end).shape == (1, PROMPT + 1)


def test_integers_and_bools_that_mean_the_same_give_the_same() -> None:
    decoder = compiled("llama")[1]
    ids, mask = prompts(ROWS)
    expected = decoder.generate(ids, 4, mask)
    for given in (mask.bool(), mask.int()):
        assert torch.equal(decoder.generate(ids, 4, given), expected)
    narrow = decoder.generate(ids.int(), 4, mask)
    assert narrow.dtype is torch.int32
    assert torch.equal(narrow.long(), expected)
    assert torch.equal(decoder.generate(ids, 0, mask), ids)


def test_a_mask_may_have_holes_and_must_not_end_in_padding() -> None:
    module, decoder = compiled("llama")
    ids, mask = prompts(ROWS)
    mask[:, 4] = 0
    expected = module.generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(decoder.generate(ids, 8, mask), expected)
    mask[1, -1] = 0
    assert "Row 1 of attention_mask ends in padding" in asked(
        lambda: decoder.generate(ids, 2, mask)
    )


def test_what_a_cache_holds_stays_hidden_or_shown() -> None:
    decoder = compiled("llama")[1]
    ids, mask = prompts(ROWS)
    _, padded = decoder(ids, mask)
    _, plain = decoder(ids)
    new, more = ids[:, :1], torch.cat([mask, mask.new_ones(ROWS, 1)], 1)
    assert "cache holds padding" in asked(lambda: decoder(new, None, padded))
    assert "cache holds padding" in asked(lambda: decoder(new, torch.ones_like(more), padded))
    assert "0 at row 1, place 0, and was 1" in asked(lambda: decoder(new, more, plain))
    more[1, 1] = 1
    assert "1 at row 1, place 1, and was 0" in asked(lambda: decoder(new, more, padded))


BAD_NUMBERS: tuple[Any, ...] = (
    *(True, False, "2", b"2", math.nan, math.inf, -math.inf, [1, 2], {}, 1j, object()),
    *(-(10**30), numpy.bool_(True), torch.tensor([1, 2]), torch.tensor(True)),
)
NUMBERS: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (2.5, 2.0, -1, None, torch.tensor(2.0)),
    "temperature": (-1, -1e-300, None, "nan"),
    "top_k": (2.5, 0, -1, numpy.float32(2)),
    "top_p": (0, 1.5, -0.0, 2**70),
    "seed": (2.5, 2**64, -(2**63) - 1, 10**5000),
    "eos_token_id": (2.5, -1, VOCABULARY, [1, 2.5], [-1], [[1]], 10**5000),
    "pad_token_id": (2.5, -1, VOCABULARY, [1]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_none(name: str) -> None:
    decoder = compiled("llama")[1]
    ids, mask = prompts(ROWS)
    bad = list(BAD_NUMBERS)
    if name == "eos_token_id":  # which may be several
        bad = [value for value in bad if not isinstance(value, list | Tensor)]
    for value in (*bad, *NUMBERS[name]):
        given = {"max_new_tokens": 2, "temperature": 1.0, name: value}
        count = given.pop("max_new_tokens")
        message = asked(lambda: decoder.generate(ids, count, mask, **given))  # noqa: B023
        assert message.startswith(name), (value, message)


def test_numbers_of_any_kind_that_fit() -> None:
    decoder = compiled("llama")[1]
    ids, mask = prompts(ROWS)
    expected = decoder.generate(ids, 4, mask)
    for count in (numpy.int64(4), torch.tensor(4)):
        assert torch.equal(decoder.generate(ids, count, mask), expected)
    for least in ({"temperature": 5e-324}, {"temperature": 1.0, "top_p": 5e-324}):
        assert torch.equal(decoder.generate(ids, 4, mask, **least), expected)
    for most in ({"temperature": 1e308}, {"temperature": 1.0, "top_k": 10**30}):
        drawn = decoder.generate(ids, 4, mask, seed=-1, **most)
        assert drawn.shape == expected.shape
    for ends in ([], torch.tensor([3, 4]), (3, 4), {3, 4}):
        decoder.generate(ids, 4, mask, eos_token_id=ends)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_chosen_from_logits_that_are_no_numbers(temperature: float) -> None:
    sampling = Sampling(temperature)
    logits = torch.zeros(3, 5)
    logits[2, 1] = math.inf
    assert int(sampling.choose(logits, sampling.generator())[2]) == 1
    for lost in (math.nan, -math.inf):
        logits[1] = lost
        assert "for row 1" in asked(lambda: sampling.choose(logits, sampling.generator()))
    logits[1] = torch.tensor([0.0, math.nan, 1.0, 0.0, 0.0])
    assert "for row 1" in asked(lambda: sampling.choose(logits, sampling.generator()))


@pytest.mark.parametrize("value", [object(), (), [], 0, False, "cache", torch.ones(2)])
def test_a_cache_that_is_none(value: Any) -> None:
    decoder = compiled("llama")[1]
    assert "it must be one that this decoder returned" in asked(
        lambda: decoder(prompts(1)[0], None, value)
    )


class Placed(cached_gpt.CachedGPT):
    """The positions are the caller's, in one of three shapes; a mask may come with them."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, position_ids: Tensor, past: cached_gpt.Past
    ) -> tuple[Tensor, cached_gpt.Past]:
        x: Tensor = self.tokens(input_ids) + self.places(position_ids)
        present = []
        for block, layer in zip(self.blocks, past, strict=True):
            x, grown = block(x, layer)
            present.append(grown)
        return self.head(self.norm(x)), present


def placed(rank: str, **options: Any) -> tuple[nn.Module, Decoder]:
    """A decoder whose positions are (batch, seq), (1, seq) or (seq,), and the plain module."""
    plain, (ids, past), ((dims), layers) = cached_gpt.build()
    peaked(plain)
    module = Placed(plain.config)
    module.load_state_dict(plain.state_dict())
    places = torch.arange(5, 5 + ids.shape[1])
    given = {"batch": places.expand(2, -1).clone(), "one": places[None], "vector": places}[rank]
    axes = {"batch": {0: dims[0], 1: dims[1]}, "one": {1: dims[1]}, "vector": {0: dims[1]}}[rank]
    decoder = attngraph.optimize_decoder(
        module.eval(), (ids, given, past), dynamic_shapes=(dims, axes, layers), **options
    )
    return plain, decoder


@pytest.mark.parametrize("rank", ["batch", "one", "vector"])
def test_positions_of_a_module_without_a_mask(rank: str) -> None:
    plain, decoder = placed(rank)
    assert decoder.layout.positions == "position_ids"
    assert decoder.report.parity is not None
    assert decoder.report.parity.passed
    ids, mask = prompts(3)
    assert torch.equal(decoder.generate(ids, 16), cached_gpt.generate(plain, ids, 16))
    assert torch.equal(
        decoder.generate(ids, 4, torch.ones_like(mask)), cached_gpt.generate(plain, ids, 4)
    )
    assert "no row can be padded" in asked(lambda: decoder.generate(ids, 1, mask))


class Masked(nn.Module):
    """One row of positions and a mask: rows may be padded, if they are padded alike."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.project, self.head = nn.Linear(16, 48), nn.Linear(16, VOCABULARY)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        positions: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = self.tokens(input_ids) + self.places(positions)
        query, new_key, new_value = self.project(x).chunk(3, -1)
        key, value = torch.cat([key, new_key], 1), torch.cat([value, new_value], 1)
        total, before = key.shape[1], key.shape[1] - input_ids.shape[1]
        causal = torch.arange(total) <= torch.arange(before, total)[:, None]
        visible = causal & (attention_mask != 0)[:, None]
        scores = (query @ key.mT / 4).masked_fill(~visible, torch.finfo(x.dtype).min)
        return self.head(x + scores.softmax(-1) @ value), key, value


def test_one_row_of_positions_with_a_mask() -> None:
    module = peaked(Masked())
    batch, seq, past = Dim("batch", max=64), Dim("seq", max=64), Dim("past", max=64)
    kept, rows = torch.randn(2, 5, 16), {0: batch, 1: past}
    ids, _ = prompts(2)
    args = (ids[:, :3], torch.ones(2, 8, dtype=torch.long), torch.arange(5, 8), kept, kept + 1)
    shapes = ({0: batch, 1: seq}, {0: batch, 1: Dim.AUTO}, {0: seq}, rows, rows)
    decoder = attngraph.optimize_decoder(module, args, dynamic_shapes=shapes)
    mask = torch.ones_like(ids)
    mask[:, :2] = 0  # alike, so one row of positions serves both
    found = decoder.generate(ids, 4, mask)
    assert torch.equal(found[:, 2:], decoder.generate(ids[:, 2:], 4))
    mask[0, 1] = 1
    assert "can't be padded differently" in asked(lambda: decoder.generate(ids, 1, mask))


class Typed(Placed):
    """Takes token types, which are of the shape of positions and none."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, token_types: Tensor, past: cached_gpt.Past
    ) -> tuple[Tensor, cached_gpt.Past]:
        return super().forward(input_ids, token_types, past)


def test_what_has_the_shape_of_positions_is_not_taken_for_them() -> None:
    module, (ids, past), (dims, layers) = cached_gpt.build()
    shapes = (dims, dims, layers)
    args = (ids, torch.zeros_like(ids), past)
    call = functools.partial(attngraph.optimize_decoder, dynamic_shapes=shapes, verify="off")
    message = asked(lambda: call(Typed(module.config).eval(), args))
    assert "input_ids and token_types are all (batch, seq)" in message


class Chosen(nn.Module):
    """(B, S) ids, a mask (B, T) and a past (B, P, 16); nothing but `told` says that T is P + S."""

    def __init__(self, told: bool) -> None:
        super().__init__()
        self.tokens, self.head, self.told = nn.Embedding(20, 16), nn.Linear(16, 20), told

    def forward(self, ids: Tensor, mask: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        if self.told:
            torch._check(mask.shape[1] == past.shape[1] + ids.shape[1])
        x = self.tokens(ids)
        keys = torch.cat([past, x], 1)
        places = torch.arange(keys.shape[1])
        hidden = mask.index_select(1, places)[:, None] == 0
        hidden = hidden | (places > torch.arange(past.shape[1], keys.shape[1])[:, None])
        weights = (x @ keys.mT).masked_fill(hidden, -torch.inf).softmax(-1)
        return self.head(weights @ keys), keys


def test_a_mask_whose_length_nothing_tells_is_refused_with_the_line_that_does() -> None:
    sizes = {name: Dim(name, max=64) for name in ("batch", "seq", "past")}
    batch, seq, past = sizes.values()
    total = Dim("total", max=128)
    args = (torch.arange(6).view(2, 3), torch.ones(2, 8, dtype=torch.long), torch.randn(2, 5, 16))
    shapes = ({0: batch, 1: seq}, {0: batch, 1: total}, {0: batch, 1: past})
    call = functools.partial(attngraph.optimize_decoder, dynamic_shapes=shapes, verify="off")
    message = asked(lambda: call(Chosen(False), args))
    assert "torch._check(mask.shape[1] == past.shape[1] + ids.shape[1])" in message
    layout = call(Chosen(True), args).layout
    assert (layout.ids, layout.mask) == ("ids", "mask")


def test_a_cache_is_for_the_decoder_that_made_it(tmp_path: Path) -> None:
    """Another of the same model and file too: its buffers are bound to the other's session."""
    options = {"cache": "static", "max_length": 16, "verify": "off"}
    first = placed("batch", **options)[1]
    first.save(tmp_path / "model.onnx")
    second, third = (Decoder.load(tmp_path / "model.onnx") for _ in range(2))
    ids, _ = prompts(1)
    _, cache = second(ids)
    for other in (first, third):
        assert "of another decoder" in asked(lambda: other(ids[:, :1], None, cache))  # noqa: B023
    second(ids[:, :1], None, cache)
    growing, more = placed("batch", verify="off")[1], placed("batch", verify="off")[1]
    assert "of another decoder" in asked(lambda: more(ids[:, :1], None, growing(ids)[1]))


@pytest.mark.parametrize("length", [2.5, "8", True, math.nan, 1, -3, torch.tensor([2, 3])])
def test_a_room_that_is_none(length: Any) -> None:
    module, args, shapes = cached_gpt.build()
    message = asked(
        lambda: attngraph.optimize_decoder(
            module, args, dynamic_shapes=shapes, cache="static", max_length=length
        )
    )
    assert message.startswith("max_length is")
    assert PROMPT > 1
