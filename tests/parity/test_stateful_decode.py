"""Decoders that keep states give the tokens of the model without a cache, padded and in pieces."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph import Decoder
from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.families.kept import find_kept
from attngraph.frontend.families.stateful_lm import WithoutCache
from attngraph.frontend.families.tried_forms import forms_of
from attngraph.runtimes.genai import Generation, genai_config
from tests.models.stateful import CHUNK, FAMILIES, PAGE, REFUSED, VOCABULARY, built
from tests.passes.linear_attentions import HEADS, KEYS, VALUES, WIDTH, GatedDeltaLoop

pytestmark = pytest.mark.wide

# On both sides of the convolutions' width of 4 and of one and two chunks.
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 17)
WORKING = [name for name in FAMILIES if name not in REFUSED]
IN_PIECES = {*WORKING} - {"MiniMax"}
UNPADDED = {"MiniMax", "RecurrentGemma"}
STEPS_DIFFER = {"Zamba2", "NemotronH"}
LOOPS = {"Mamba", "MiniMax", "RecurrentGemma"}  # over tokens, or chunks that are not padded
CHEAP = ("Lfm2", "Mamba")
STATES_ALONE = ("Mamba", "FalconMamba", "Mamba2")
ONE_OPERATOR = {"Mamba2": 1, "Qwen3Next": 1, "Qwen3_5": 1, "OlmoHybrid": 1, "FalconH1": 2}
ONE_OPERATOR |= {"Bamba": 1, "GraniteMoeHybrid": 1, "KimiLinear": 1, "Zamba2": 2, "NemotronH": 1}


def _named(names: Iterable[str], cheap: Collection[str]) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in cheap else pytest.mark.slow, id=name)
        for name in names
    ]


NAMES = _named(WORKING, CHEAP)


@functools.cache
def compiled(name: str) -> tuple[nn.Module, Decoder]:
    module = built(name)
    return module, attngraph.optimize_decoder(module)


def greedy(module: nn.Module, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    """What the model gives without a cache."""
    whole = WithoutCache(module)
    for _ in range(count):
        with torch.no_grad():
            logits = whole(ids, mask, {})["logits"][:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=mask.dtype)], 1)
    return ids


def prompt(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids and a mask that hides half of the second row."""
    random = torch.Generator().manual_seed(length)
    ids = torch.randint(VOCABULARY, (batch, length), generator=random)
    mask = torch.ones_like(ids)
    mask[1:, : length // 2] = 0
    return ids, mask


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_without_a_cache(name: str, tmp_path: Path) -> None:
    module, decoder = compiled(name)
    assert decoder.layout.states
    assert (decoder.layout.piece is None) == (name in IN_PIECES)
    decoder.save(tmp_path / "model.onnx")
    loaded = Decoder.load(tmp_path / "model.onnx")
    for length in LENGTHS:
        for batch in (1, 2):
            ids, mask = prompt(batch, length)
            shown = torch.ones_like(ids)
            found = decoder.generate(ids, 3)
            assert torch.equal(found, greedy(module, ids, shown, 3)), (length, batch)
            assert torch.equal(found, loaded.generate(ids, 3))
            if batch > 1 and name not in UNPADDED:
                padded = decoder.generate(ids, 3, mask)
                assert torch.equal(padded, greedy(module, ids, mask, 3)), length
                assert torch.equal(padded, loaded.generate(ids, 3, mask))


@pytest.mark.parametrize("name", _named(ONE_OPERATOR, ("Mamba2", "Qwen3Next")))
def test_a_recurrence_of_outer_products_is_one_operator(name: str) -> None:
    """However a layer is traced: whole, in chunks, or as a loop over its steps."""
    _, decoder = compiled(name)
    assert decoder.optimized is not None
    read = [node.op for node in decoder.optimized.graph if node.op == "attn.linear_attention"]
    assert len(read) == ONE_OPERATOR[name]
    ops = [node.op_type for node in decoder.optimized.model.graph.all_nodes()]
    # A few tokens have a branch of their own where values are filled up for many.
    assert ops.count("LinearAttention") in (len(read), 2 * len(read))
    assert "Scan" not in ops


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_pieces_and_many_steps(name: str) -> None:
    module, decoder = compiled(name)
    ids, _ = prompt(2, 5)
    found = decoder.generate(ids, 70)
    assert torch.equal(found, greedy(module, ids, torch.ones_like(ids), 70))
    first, cache = decoder(found[:, :7])
    rest, _ = decoder(found[:, 7:20], None, cache)
    again, _ = decoder(found[:, 7:20], None, cache)  # a growing cache is left as it is
    whole, _ = decoder(found[:, :20])
    assert torch.equal(rest, again)
    torch.testing.assert_close(rest[:, -1], whole[:, -1], rtol=1e-4, atol=1e-4)
    assert torch.equal(first[:, -1].argmax(-1), found[:, 7])


@pytest.mark.parametrize("name", [name for name in NAMES if name.id not in STATES_ALONE])
def test_keys_lie_in_buffers_beside_states(name: str, tmp_path: Path) -> None:
    module = built(name)
    decoder = attngraph.optimize_decoder(module, cache="static", max_length=24)
    assert decoder.layout.states
    assert decoder.layout.max_length == 24
    decoder.save(tmp_path / "model.onnx")
    for each in (decoder, Decoder.load(tmp_path / "model.onnx")):
        for length in (1, 4, 9):
            for batch in (1, 2):
                ids, mask = prompt(batch, length)
                shown = torch.ones_like(ids)
                assert torch.equal(each.generate(ids, 4), greedy(module, ids, shown, 4))
                if batch > 1 and name not in UNPADDED:
                    padded = each.generate(ids, 4, mask)
                    assert torch.equal(padded, greedy(module, ids, mask, 4)), length


@pytest.mark.parametrize("name", [name for name in NAMES if name.id not in STATES_ALONE])
def test_a_static_cache_goes_back_to_the_states_of_that_time(name: str) -> None:
    decoder = attngraph.optimize_decoder(built(name), cache="static", max_length=24)
    ids, _ = prompt(2, 20)
    whole, _ = decoder(ids[:, :12])
    _, early = decoder(ids[:, :7])
    once, late = decoder(ids[:, 7:12], None, early)
    decoder(ids[:, 12:20], None, late)
    again, _ = decoder(ids[:, 7:12], None, early)
    assert torch.equal(once, again)
    torch.testing.assert_close(once[:, -1], whole[:, -1], rtol=1e-4, atol=1e-4)
    with pytest.raises(UsageError, match="overwritten"):
        decoder(ids[:, 12:13], None, late)
    with pytest.raises(UsageError, match="24"):
        decoder(ids[:, 7:12].repeat(1, 4), None, early)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKING)
def test_transformers_generates_the_same(name: str) -> None:
    module, decoder = compiled(name)
    generate: Callable[..., Tensor] = module.generate  # type: ignore[assignment]
    ids, mask = prompt(2, 9)
    for shown in [torch.ones_like(ids)] + [mask] * (name not in UNPADDED):
        given = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = generate(ids, attention_mask=shown, **given)
        assert torch.equal(decoder.generate(ids, 12, shown), expected)


def test_what_each_part_is() -> None:
    kept = find_kept(built("FalconH1"))
    assert kept.argument in ("past_key_values", "cache")  # the latter from transformers 5.24 on
    assert [(part.name, part.shape, part.rows, part.tokens) for part in kept.parts[:4]] == [
        ("0_key", (None, 2, None, 8), 0, 2),
        ("0_value", (None, 2, None, 8), 0, 2),
        ("0_conv_state", (None, 48, 4), 0, None),
        ("0_recurrent_state", (None, 4, 8, 8), 0, None),
    ]
    assert find_kept(built("Mamba")).argument in ("cache_params", "cache")
    names = [part.name for part in find_kept(built("MiniMax")).parts]
    assert names == ["1_key", "1_value", "0_linear_cache"]


def test_states_in_modules_are_those_that_a_later_call_reads() -> None:
    module = built("RecurrentGemma")
    kept = find_kept(module)
    states = [part for part in kept.parts if part.tokens is None]
    assert [(part.name, part.shape) for part in states] == [
        (f"{layer}_{state}", shape)
        for layer in (0, 1)
        for state, shape in (("conv1d_state", (None, 32, 3)), ("recurrent_state", (None, 32)))
    ]
    (block, _, attention) = [layer.temporal_block for layer in module.model.layers]
    attention.register_forward_hook(lambda own, given, out: setattr(own, "seen", out[0].clone()))
    attention.register_buffer("last", torch.zeros(2, 3, 32))
    attention.register_forward_hook(lambda own, given, out: setattr(own, "last", out[0].clone()))
    assert find_kept(module).parts == kept.parts  # nobody reads what the hooks leave
    assert block.conv1d_state is None
    before = block.rg_lru.recurrent_states = torch.ones(2, 32)
    with kept.filled(kept.empty(3, torch.device("cpu"))) as holder:
        assert block.conv1d_state.shape == (3, 32, 3)
        assert [kept.at(holder, part).shape[0] for part in states] == [3] * 4
    assert block.conv1d_state is None
    assert block.rg_lru.recurrent_states is before


@pytest.mark.parametrize(
    ("name", "goes_on", "is_chunked", "looped"),
    [
        ("Lfm2", True, False, None),
        ("Mamba", False, True, ["MambaMixer"]),
        ("Bamba", True, True, ["BambaMixer"]),
        ("FalconH1", True, True, ["FalconH1Mixer"] * 2),
        ("MiniMax", False, True, None),
        ("NemotronH", True, True, None),
        ("RecurrentGemma", False, True, ["RecurrentGemmaRecurrentBlock"] * 2),
    ],
)
def test_forms_that_go_on_from_a_state(
    name: str, goes_on: bool, is_chunked: bool, looped: list[str] | None
) -> None:
    module = built(name)
    forms = forms_of(module, find_kept(module))
    assert (forms.pieces.alone <= forms.tolerance) == goes_on
    assert forms.is_chunked == is_chunked
    if looped is not None:
        assert forms.loops is not None
        assert forms.loops.alone <= forms.tolerance
        assert (forms.loops.padded <= forms.tolerance) == (name not in UNPADDED)
        assert [type(mixer.module).__name__ for mixer in forms.mixers] == looped
    assert forms.takes_several == (looped is not None or name in ("Lfm2", "NemotronH"))
    assert all("forward" not in module.__dict__ for module in module.modules())
    assert (forms.steps.alone <= forms.tolerance) == (name not in STEPS_DIFFER)
    assert (forms.steps.padded <= forms.tolerance) == (name not in UNPADDED | STEPS_DIFFER)
    assert forms.chunk == (CHUNK if forms.is_chunked and name not in LOOPS else None)


def test_what_states_do_not_take() -> None:
    _, decoder = compiled("Lfm2")
    ids, mask = prompt(2, 4)
    mask[1] = torch.tensor([1, 0, 1, 1])
    with pytest.raises(UsageError, match=r"0 at row 1, place 1, behind a token: .* on the left"):
        decoder(ids, mask)
    with pytest.raises(UsageError, match=r"keeps states alone.* static cache"):
        attngraph.optimize_decoder(built("Mamba"), cache="static", max_length=16)
    with pytest.raises(UsageError, match=r"keeps states.* leave out --position-ids"):
        attngraph.optimize_decoder(built("Lfm2"), position_ids=True)
    with pytest.raises(UsageError, match=r"past_key_values\.0\.conv_state: run it with"):
        genai_config(decoder, Generation())


def test_more_experts_per_token_than_there_are() -> None:
    module = built("Lfm2Moe")
    for part in module.modules():
        if hasattr(part, "top_k"):
            part.top_k = 9  # of 4
    with pytest.raises(UsageError, match=r"doesn't run .* more experts per token than experts"):
        attngraph.optimize_decoder(module)
    with pytest.raises(CaptureError, match=r"topk\(.*more experts per token than experts"):
        attngraph.optimize(module, (torch.ones(2, 5, dtype=torch.long),))


@pytest.mark.slow
def test_a_given_state_is_of_the_shape_and_dtype_that_a_recurrence_takes() -> None:
    x, state = torch.randn(2, 6, WIDTH), torch.randn(2, HEADS, KEYS, VALUES)
    rows = {0: Dim("batch", max=8)}
    module = GatedDeltaLoop().eval()
    optimized = attngraph.optimize(module, (x, state), dynamic_shapes=(rows, rows))
    for other, said in (
        (state.mT, r"'state' has shape \(2, 3, 5, 4\); the model takes \(batch, 3, 4, 5\)"),
        (state[:1], r"'state' has batch = 1 where input 'x' has 2"),
        (state.half(), "'state' is float16; the model takes float32"),
        (state[0], r"'state' has shape \(3, 4, 5\); the model takes \(batch, 3, 4, 5\)"),
    ):
        with pytest.raises(UsageError, match=said):
            optimized(x, other)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_no_form_decodes_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=REFUSED[name]) as raised:
        attngraph.optimize_decoder(built(name))
    said = re.sub(r"0\.\d+", "0.…", str(raised.value))
    assert said in re.sub(r"0\.\d+", "0.…", PAGE.read_text("utf-8"))


def test_the_page_has_each_family() -> None:
    said = [line.split(" | ") for line in PAGE.read_text("utf-8").splitlines()]
    outcome = {cells[0].removeprefix("| "): cells[1] for cells in said if len(cells) == 5}
    del outcome["family"], outcome["---"]
    assert outcome.keys() == FAMILIES.keys()
    assert {name for name, what in outcome.items() if what == "refused"} == REFUSED.keys()
    pieces = {name for name, what in outcome.items() if what == "in pieces of any length"}
    assert pieces == IN_PIECES
