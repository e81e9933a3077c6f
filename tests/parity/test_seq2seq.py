"""Compiled encoder-decoders give the tokens of eager models, whatever is padded where."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import Decoder, Seq2Seq
from attngraph.decoding.checking import Encoded, generated_parity
from attngraph.decoding.compile_seq2seq import compile_seq2seq
from attngraph.decoding.lengths import Lengths
from attngraph.decoding.rules import Rules
from attngraph.decoding.seq2seq import DECODER, ENCODER, MERGED
from attngraph.errors import LoadError, ParityError, UsageError
from attngraph.export.parity.budget import Parity
from attngraph.export.runtime.tensors import to_ort, to_torch
from attngraph.frontend.capture import Captured
from attngraph.frontend.families.seq2seq import Parts, of_transformers
from attngraph.frontend.model import trace
from attngraph.options import DecoderOptions
from tests.models.kit import peaked

pytestmark = pytest.mark.wide

VOCABULARY, STEPS = 60, 20


def _bart(**more: Any) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {
        f"{part}_{what}": size
        for part in ("encoder", "decoder")
        for what, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
    }
    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        max_position_embeddings=48,
        tie_word_embeddings=False,
        **sizes,
        **more,
    )
    return BartForConditionalGeneration(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_source_positions=12, max_target_positions=40, num_mel_bins=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        begin_suppress_tokens=[5, 6],
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def _trocr() -> nn.Module:
    from transformers import (
        TrOCRConfig,
        TrOCRForCausalLM,
        VisionEncoderDecoderModel,
        ViTConfig,
        ViTModel,
    )

    encoder = ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=8,
    )  # fmt: skip
    decoder = TrOCRConfig(
        vocab_size=VOCABULARY, d_model=16, decoder_layers=1, decoder_attention_heads=2,
        decoder_ffn_dim=32, max_position_embeddings=48, cross_attention_hidden_size=24,
    )  # fmt: skip
    model = VisionEncoderDecoderModel(encoder=ViTModel(encoder), decoder=TrOCRForCausalLM(decoder))
    model.generation_config.decoder_start_token_id = 2
    return model


def _moonshine() -> nn.Module:
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration

    parts = {
        f"{part}_{what}": size
        for part in ("encoder", "decoder")
        for what, size in (("num_hidden_layers", 1), ("num_attention_heads", 2))
    }
    config = MoonshineConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, max_position_embeddings=48,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **parts,
    )  # fmt: skip
    return MoonshineForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bart": _bart,
    "t5": _t5,
    "whisper": _whisper,
    "trocr": _trocr,
    "moonshine": _moonshine,
}
SLOW = pytest.mark.slow
FAST_AND_SLOW = [name if name == "bart" else pytest.param(name, marks=SLOW) for name in MODELS]


@functools.cache
def compiled(name: str) -> tuple[Any, Seq2Seq]:
    torch.manual_seed(0)
    module = peaked(MODELS[name]())
    return module, attngraph.optimize_seq2seq(module, first_step=True)


def sources(module: Any, rows: int) -> dict[str, Tensor]:
    """What is encoded; row b of token ids is padded on the right by 2 b, the last on the left."""
    random = torch.Generator().manual_seed(rows)
    if module.main_input_name == "input_features":
        return {"input_features": torch.randn(rows, 8, 24, generator=random)}
    if module.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=random)}
    if module.main_input_name == "input_values":
        return {"input_values": torch.randn(rows, 5000, generator=random)}
    ids = torch.randint(3, VOCABULARY, (rows, 9), generator=random)
    mask = (torch.arange(9) < 9 - 2 * torch.arange(rows)[:, None]).long()
    if rows > 1:
        mask[-1] = mask[-1].flip(0)
    return {"input_ids": ids, "attention_mask": mask}


def eager_tokens(module: Any, source: Mapping[str, Tensor], steps: int, **given: Any) -> Tensor:
    """What generate gives; Whisper's own cuts the start tokens off."""
    from transformers import GenerationMixin

    tokens: Tensor = GenerationMixin.generate(
        module, **source, max_new_tokens=steps, do_sample=False, num_beams=1, **given
    )
    return tokens


@pytest.mark.parametrize("name", FAST_AND_SLOW)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    module, model = compiled(name)
    seen = set[int]()
    for rows in (1, 3):
        source = sources(module, rows)
        expected = eager_tokens(module, source, STEPS)
        assert torch.equal(model.generate(source, STEPS), expected)
        seen.update(expected.unique().tolist())
    assert len(seen) > 2


@pytest.mark.parametrize("name", FAST_AND_SLOW)
def test_a_row_alone_gives_what_it_gives_in_a_batch(name: str) -> None:
    """Neither another row nor its own padding has a part in it."""
    module, model = compiled(name)
    source = sources(module, 3)
    together, cache = model(torch.zeros(3, 2, dtype=torch.long), model.start(source))
    again, _ = model(torch.ones(3, 1, dtype=torch.long), cache)
    for row in range(3):
        shown = source["attention_mask"][row].bool() if "attention_mask" in source else ...
        alone = {key: value[row : row + 1] for key, value in source.items()}
        if shown is not ... and row == 1:  # the last is padded on the left, which moves positions
            alone = {key: value[:, shown] for key, value in alone.items()}
        first, cache = model(torch.zeros(1, 2, dtype=torch.long), model.start(alone))
        second, _ = model(torch.ones(1, 1, dtype=torch.long), cache)
        scale = float(together.abs().max())
        atol = 64 * torch.finfo(torch.float32).eps * scale
        torch.testing.assert_close(first, together[row : row + 1], rtol=0, atol=atol)
        torch.testing.assert_close(second, again[row : row + 1], rtol=0, atol=atol)


def test_samples_of_one_length_are_of_any_number_of_rows() -> None:
    """As a decoder's tokens are; without shapes all was fixed but these, and the check failed."""
    module, _ = compiled("bart")
    model = attngraph.optimize_seq2seq(module, sources(module, 2), first_step=False)
    source = sources(module, 3)
    assert torch.equal(model.generate(source, STEPS), eager_tokens(module, source, STEPS))


def test_an_encoder_runs_once_and_its_keys_are_no_work_of_a_step() -> None:
    """No step reads a weight of the cross-attentions' keys and values, or lays them out anew."""
    _, model = compiled("bart")
    assert model.encoder is not None
    assert model.decoder.optimized is not None
    held = [name for name in model.decoder.layout.memory if "encoder.key" in name]
    assert held == ["past_key_values.0.encoder.key"]
    nodes = list(model.decoder.optimized.model.graph)
    own = [value for value in model.decoder.optimized.model.graph.inputs if value.name in held]
    reads = [node.op_type for node in nodes for value in node.inputs if value in own]
    assert reads == ["Attention"]
    names = {value.name for value in model.decoder.optimized.graph.constants.values()}
    assert not any("encoder_attn.k_proj" in name or "encoder_attn.v_proj" in name for name in names)
    assert any("encoder_attn.q_proj" in name for name in names)


def test_files_have_the_names_that_others_know(tmp_path: Path) -> None:
    module, model = compiled("bart")
    written = model.save(tmp_path / "out")
    assert [path.name for path in written] == [ENCODER, DECODER, MERGED]
    loaded = Seq2Seq.load(tmp_path / "out")
    source = sources(module, 3)
    assert torch.equal(loaded.generate(source, STEPS), eager_tokens(module, source, STEPS))
    assert loaded.rules == model.rules
    past = [
        f"past_key_values.0.{kind}.{part}"
        for kind in ("decoder", "encoder")
        for part in ("key", "value")
    ]
    assert loaded.decoder.session.input_names == ("input_ids", "encoder_attention_mask", *past)
    assert loaded.decoder.session.output_names == (
        "logits", "present.0.decoder.key", "present.0.decoder.value",
    )  # fmt: skip
    assert model.merged is not None
    assert model.merged.session.input_names == (
        *loaded.decoder.session.input_names, "encoder_hidden_states", "use_cache_branch",
    )  # fmt: skip
    assert sorted(model.merged.session.output_names) == sorted(
        ("logits", *(name.replace("past_key_values", "present") for name in past))
    )


@pytest.mark.parametrize("name", FAST_AND_SLOW)
def test_one_file_begins_and_goes_on(name: str) -> None:
    """As optimum and transformers.js run it: hidden states and no cache, then its own presents."""
    module, model = compiled(name)
    assert model.merged is not None
    assert model.merged.report.parity is not None
    assert model.merged.report.parity.reference == "parts"
    session, source = model.merged.session, sources(module, 3)
    hidden = model.encoder_session.run(source)[0]
    held = {"encoder_hidden_states": hidden}
    if "encoder_attention_mask" in session.input_names:
        held["encoder_attention_mask"] = source["attention_mask"]
    given = {each for each in session.input_names if each.startswith("past")}
    sizes = {dim: 3 for each in given for dim in session.input_shape(each)[:1]}
    pasts = {each: session.zeros(each, {**sizes, "past": 0, "encoder_past": 0}) for each in given}
    cache, crossed = model.start(source), dict[str, Tensor]()
    for count, behind in ((1, False), (2, True), (1, True)):
        ids = torch.full((3, count), 2)
        feeds = {**held, **pasts, "input_ids": ids, "use_cache_branch": torch.tensor([behind])}
        outputs = dict(zip(session.output_names, session.run(feeds), strict=True))
        logits, cache = model(ids, cache)
        atol = 32 * torch.finfo(torch.float32).eps * float(logits.abs().max())
        torch.testing.assert_close(outputs.pop("logits"), logits, rtol=0, atol=atol)
        pasts = {each.replace("present", "past_key_values"): outputs[each] for each in outputs}
        if behind:  # what stays the same isn't given out again
            assert not any(pasts[each].numel() for each in crossed)
        else:
            crossed = {each: pasts[each] for each in given if ".encoder." in each}
        pasts.update(crossed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_codes_that_each_part_chose_for_itself_are_no_difference(seed: int) -> None:
    """The merged file's first step has keys by other codes than the encoder's."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    module = T5ForConditionalGeneration(config).eval()
    for weight in module.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.15)
    model = attngraph.optimize_seq2seq(module, weights="int4", activations="int8")
    assert model.merged is not None
    assert model.merged.report.parity is not None
    assert model.merged.report.parity.passed


RULES: list[dict[str, Any]] = [
    {"forced_bos_token_id": 7, "begin_suppress_tokens": [3]},
    {"forced_eos_token_id": 11},
    {"no_repeat_ngram_size": 2, "suppress_tokens": [53, 4000]},  # it has no 4000
    {"bad_words_ids": [[57], [3, 3], [2]], "min_new_tokens": 6},
    {"repetition_penalty": 1.7, "min_length": 4},
]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(rules))
def test_rules_of_the_generation_config_are_followed(rules: dict[str, Any]) -> None:
    from transformers import GenerationConfig

    module, model = compiled("bart")
    kept = {**module.generation_config.to_dict(), **rules}
    config = GenerationConfig(**kept)
    source = sources(module, 3)
    expected = eager_tokens(module, source, STEPS, generation_config=config)
    own = Seq2Seq(model.encoder, model.decoder, model.wiring, Rules.of_config(config))  # type: ignore[arg-type]
    assert torch.equal(own.generate(source, STEPS), expected)
    assert Rules.from_json(own.rules.to_json(), "x") == own.rules
    plain = Seq2Seq(
        model.encoder, model.decoder, model.wiring, replace(Rules(), start=own.rules.start)
    )  # type: ignore[arg-type]
    assert not torch.equal(plain.generate(source, STEPS, eos_token_id=2), expected)


@pytest.mark.parametrize("rules", [{"forced_bos_token_id": 250}, {"forced_eos_token_id": [2, 60]}])
def test_a_forced_token_that_the_model_lacks_is_refused(rules: dict[str, Any]) -> None:
    from transformers import GenerationConfig

    module, model = compiled("bart")
    kept = Rules.of_config(GenerationConfig(decoder_start_token_id=2, **rules))
    own = Seq2Seq(model.encoder, model.decoder, model.wiring, kept)  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=r"says forced_.os_token_id = .*, and the model knows the ids 0 to 59"
    ):
        own.generate(sources(module, 3), STEPS)


def test_drawn_tokens_are_the_same_of_one_seed() -> None:
    module, model = compiled("bart")
    source = sources(module, 3)
    drawn = [model.generate(source, 8, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_what_does_not_fit_is_refused() -> None:
    module, model = compiled("bart")
    source = sources(module, 2)
    with pytest.raises(UsageError, match="knows the ids 0 to 59"):
        model.start(source["input_ids"] + 60)
    with pytest.raises(UsageError, match=r"attention_mask has shape \(2, 4\)"):
        model.start(source["input_ids"], source["attention_mask"][:, :4])
    with pytest.raises(UsageError, match="no input pixel_values"):
        model.start({**source, "pixel_values": torch.ones(2, 3)})
    with pytest.raises(UsageError, match="at most 48"):
        model.start(torch.ones(1, 49, dtype=torch.long))
    with pytest.raises(UsageError, match="attends to encoder_attention_mask"):
        model.decoder(torch.ones(1, 1, dtype=torch.long))
    with pytest.raises(UsageError, match="rows for 48 tokens"):
        model.generate(source, 60)
    with pytest.raises(UsageError, match="ids has 1 rows, and the cache 2"):
        model(torch.ones(1, 1, dtype=torch.long), model.start(source))


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    _, model = compiled("bart")
    model.save(tmp_path)
    (tmp_path / ENCODER).write_bytes((tmp_path / DECODER).read_bytes())
    with pytest.raises(LoadError, match="doesn't say what a decoder takes of it"):
        Seq2Seq.load(tmp_path)


def _sound(cache: Any) -> Any:
    return cache


def _of_the_row_before(cache: Any) -> Any:
    """Each row attends to the keys of the row before it."""
    name = "past_key_values.0.encoder.key"
    rolled = to_torch(cache.memory[name], torch.float32).roll(1, 0)
    return replace(cache, memory={**cache.memory, name: to_ort(rolled.contiguous())})


def _keys_for_values(cache: Any) -> Any:
    key, value = (f"past_key_values.0.encoder.{part}" for part in ("key", "value"))
    swapped = {key: cache.memory[value], value: cache.memory[key]}
    return replace(cache, memory={**cache.memory, **swapped})


def _without_a_mask(cache: Any) -> Any:
    name = "encoder_attention_mask"
    shown = torch.ones(4, 9, dtype=torch.long)
    return replace(cache, memory={**cache.memory, name: to_ort(shown)})


@functools.cache
def _traced() -> tuple[Parts, Captured]:
    parts = of_transformers(compiled("bart")[0], None, None, "Bart")
    return parts, trace(parts.decoder)


@pytest.mark.parametrize("planted", [_of_the_row_before, _keys_for_values, _without_a_mask, None])
def test_the_check_finds_a_cache_that_is_handed_on_wrongly(planted: Any) -> None:
    """None: the pasts are paired with the wrong presents."""
    module, model = compiled("bart")
    parts, captured = _traced()
    decoder = model.decoder
    source = {name: each[:4] for name, each in sources(module, 4).items()}

    def parity(decoder: Decoder, change: Any) -> Parity:
        cache = Seq2Seq(model.encoder, decoder, model.wiring, Rules()).start(source)  # type: ignore[arg-type]
        encoded = Encoded("", 4, change(cache), parts.whole, (source,))
        return generated_parity(
            parts.decoder, captured, decoder, "fp32", Lengths(), encoded=encoded
        )

    assert parity(decoder, _sound).passed
    if planted is None:
        presents = tuple(reversed(decoder.layout.presents))
        decoder = Decoder(decoder.session, replace(decoder.layout, presents=presents))
    assert not parity(decoder, planted or _sound).passed


@SLOW
def test_a_model_whose_parts_are_wired_wrongly_is_not_compiled() -> None:
    parts = of_transformers(compiled("bart")[0], None, None, "Bart")
    key, value = (f"past_key_values.0.encoder.{part}" for part in ("key", "value"))
    crossed = {**parts.memory, key: parts.memory[value], value: parts.memory[key]}
    with pytest.raises(ParityError, match="step by step is out of its error budget"):
        compile_seq2seq(replace(parts, memory=crossed, keys=None), Rules(), DecoderOptions())
