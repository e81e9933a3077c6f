"""Compiled decoders give the tokens that eager models give, step by step, padded or not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph import Decoder
from attngraph.errors import LoadError, ParityError, UsageError
from attngraph.export.parity.budget import compare
from attngraph.export.parity.reference import Reference, ReferenceOutputs
from attngraph.frontend.families.causal_lm import CausalLM
from examples import cached_gpt
from tests.models.kit import FEED_FORWARD, HEADS, HIDDEN, LAYERS, POSITIONS, VOCABULARY, peaked

STEPS = 32
PROMPT = 7


def common(**more: object) -> dict[str, object]:
    return {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "intermediate_size": FEED_FORWARD,
        "max_position_embeddings": POSITIONS,
        "vocab_size": VOCABULARY,
        **more,
    }


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=HIDDEN, n_head=HEADS, n_layer=LAYERS, n_positions=POSITIONS, vocab_size=VOCABULARY
    )
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**common(num_key_value_heads=HEADS // 2)))


def _gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**common(attn_implementation="eager")))


def _mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    window = common(num_key_value_heads=HEADS // 2, sliding_window=5)
    return MistralForCausalLM(MistralConfig(**window))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "gpt-neox": _gpt_neox,
    "mistral": _mistral,
}


@functools.cache
def compiled(name: str) -> tuple[nn.Module, Decoder]:
    module = peaked(MODELS[name]())
    return module, attngraph.optimize_decoder(module)


def prompts(batch: int) -> tuple[Tensor, Tensor]:
    """Token ids, and a mask under which row b is padded on the left by 2 b."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (batch, PROMPT), generator=random)
    return ids, (torch.arange(PROMPT) >= 2 * torch.arange(batch)[:, None]).long()


def assert_greedy_tokens_are_those_of_eager(module: nn.Module, decoder: Decoder) -> None:
    """32 of them, in one row and in three that are padded differently."""
    for batch in (1, 3):
        ids, mask = prompts(batch)
        expected = module.generate(
            ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert torch.equal(decoder.generate(ids, STEPS, mask), expected)
        assert expected[:, PROMPT:].unique().numel() > batch  # a model that says something


each_model = pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=() if each in ("llama", "gpt2") else pytest.mark.wide)
        for each in MODELS
    ],
)


@each_model
def test_32_greedy_tokens_are_those_of_eager(name: str) -> None:
    assert_greedy_tokens_are_those_of_eager(*compiled(name))


@each_model
def test_the_logits_of_each_step_are_within_budget(name: str) -> None:
    """Eager computes each step without a cache; the decoder from its own, of 32 steps."""
    module, decoder = compiled(name)
    ids, mask = prompts(3)
    whole = decoder.generate(ids, STEPS, mask)
    mask = torch.cat([mask, mask.new_ones(3, STEPS)], 1)
    full = CausalLM(module, all_logits=True)
    _, _, layers = full.sample(batch=3, past=0)[0]
    outputs = Reference(full, precision="fp32")((whole, mask, layers))
    assert outputs.exact[0] is not None
    exact = outputs.exact[0][:, PROMPT - 1 :]
    expected = ReferenceOutputs(("logits",), (outputs.eager[0][:, PROMPT - 1 :],), (exact,))
    logits, cache = decoder(ids, mask[:, :PROMPT])
    found = [logits]
    for step in range(PROMPT, PROMPT + STEPS):
        logits, cache = decoder(whole[:, step : step + 1], mask[:, : step + 1], cache)
        found.append(logits)
    parity = compare(expected, (torch.cat(found, 1),), "fp32")
    assert parity.passed, str(parity)


@each_model
def test_no_copy_of_the_cache_is_left(name: str) -> None:
    """Each layer's past goes straight into its attention, and its presents straight out."""
    decoder = compiled(name)[1]
    assert decoder.optimized is not None
    graph = decoder.optimized.model.graph
    attentions = [node for node in graph if node.op_type == "Attention"]
    assert len(attentions) == LAYERS
    pasts = [node.inputs[place] for node in attentions for place in (4, 5)]
    assert [value.name for value in pasts if value is not None] == list(decoder.layout.pasts)
    presents = [node.outputs[place].name for node in attentions for place in (1, 2)]
    assert presents == list(decoder.layout.presents)
    assert all(site.cache.endswith("inside the op") for site in decoder.report.sites)


def test_a_prompt_in_parts_gives_what_it_gives_at_once() -> None:
    decoder = compiled("llama")[1]
    ids, mask = prompts(3)
    at_once, _ = decoder(ids, mask)
    first, cache = decoder(ids[:, :4], mask[:, :4])
    second, grown = decoder(ids[:, 4:], mask, cache)
    again, _ = decoder(ids[:, 4:], mask, cache)
    # the same sums, of other lengths: a few roundings of the largest logit
    atol = 32 * torch.finfo(torch.float32).eps * float(at_once.abs().max())
    torch.testing.assert_close(second, at_once, rtol=0, atol=atol)
    assert torch.equal(again, second)  # a cache is not used up
    assert (cache.length, grown.length) == (4, PROMPT)
    assert first.shape == (3, 1, VOCABULARY)


def test_rows_that_have_ended_are_filled() -> None:
    module, decoder = compiled("gpt2")
    ids, mask = prompts(3)
    open_end = decoder.generate(ids, STEPS, mask)
    end = int(open_end[0, PROMPT + 2])
    expected = module.generate(
        ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False,
        eos_token_id=end, pad_token_id=1,
    )  # fmt: skip
    found = decoder.generate(ids, STEPS, mask, eos_token_id=end, pad_token_id=1)
    assert torch.equal(found, expected)


def test_sampling_is_seeded_and_keeps_to_the_likeliest() -> None:
    decoder = compiled("llama")[1]
    ids, mask = prompts(3)
    drawn = [decoder.generate(ids, 16, mask, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    greedy = decoder.generate(ids, 16, mask)
    assert torch.equal(decoder.generate(ids, 16, mask, temperature=2.0, top_k=1), greedy)
    assert torch.equal(decoder.generate(ids, 16, mask, temperature=1.0, top_p=1e-6), greedy)


def test_a_saved_decoder_knows_its_cache(tmp_path: Path) -> None:
    decoder = compiled("llama")[1]
    decoder.save(tmp_path / "llama.onnx")
    loaded = Decoder.load(tmp_path / "llama.onnx")
    ids, mask = prompts(3)
    assert loaded.layout == decoder.layout
    assert torch.equal(loaded.generate(ids, 8, mask), decoder.generate(ids, 8, mask))
    with pytest.raises(UsageError, match="loaded from a file"):
        loaded.save(tmp_path / "again.onnx")


def test_another_onnx_file_is_no_decoder(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    attngraph.optimize(module, (torch.ones(1, 2),), verify="off").save(tmp_path / "plain.onnx")
    with pytest.raises(LoadError, match="attngraph optimize --decode"):
        Decoder.load(tmp_path / "plain.onnx")


def test_a_plain_module_with_its_own_past() -> None:
    module, args, shapes = cached_gpt.build()
    peaked(module)
    decoder = attngraph.optimize_decoder(module, args, dynamic_shapes=shapes)
    assert len(decoder.layout.pasts) == 2 * len(args[1])
    assert {site.mask for site in decoder.report.sites} == {"causal"}
    ids, mask = prompts(3)
    assert torch.equal(decoder.generate(ids, STEPS), cached_gpt.generate(module, ids, STEPS))
    with pytest.raises(UsageError, match="no row can be padded"):
        decoder.generate(ids, 1, mask)


class Stacked(nn.Module):
    """Keeps its cache as one tensor (2, B, heads, P, width), and returns it first."""

    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.inner, self.swapped = cached_gpt.build()[0], swapped
        peaked(self.inner)

    def forward(self, ids: Tensor, kept: Tensor, more: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, past = self.inner(ids, [tuple(kept.unbind()), tuple(more.unbind())])
        first, second = (torch.stack(layer) for layer in past)
        return (second, first, logits) if self.swapped else (first, second, logits)

    def sample(self) -> tuple[tuple[Tensor, ...], tuple[dict[int, torch.export.Dim], ...]]:
        _, (ids, past), (dims, layers) = cached_gpt.build()
        before = {1: dims[0], 3: layers[0][0][2]}
        return (ids, *(torch.stack(layer) for layer in past)), (dims, before, before)


def test_a_cache_of_another_form_is_found_by_its_shape() -> None:
    module = Stacked()
    args, shapes = module.sample()
    decoder = attngraph.optimize_decoder(module, args, dynamic_shapes=shapes)
    assert decoder.layout.pasts == ("kept", "more")
    ids, _ = prompts(2)
    plain, plain_args, plain_shapes = cached_gpt.build()
    peaked(plain)
    other = attngraph.optimize_decoder(plain, plain_args, dynamic_shapes=plain_shapes, verify="off")
    assert torch.equal(decoder.generate(ids, 8), other.generate(ids, 8))


def test_a_cache_paired_wrongly_is_noticed_and_can_be_named() -> None:
    module = Stacked(swapped=True)
    args, shapes = module.sample()
    with pytest.raises(ParityError, match="paired wrongly"):
        attngraph.optimize_decoder(module, args, dynamic_shapes=shapes)
    names = {"kept": "output_1", "more": "output_0"}
    decoder = attngraph.optimize_decoder(module, args, dynamic_shapes=shapes, presents=names)
    assert decoder.report.parity is not None
    assert decoder.report.parity.passed


class Named(cached_gpt.CachedGPT):
    """Returns its past under the name under which it takes it."""

    def forward(self, input_ids: Tensor, past: cached_gpt.Past) -> Any:
        logits, grown = super().forward(input_ids, past)
        return {"logits": logits, "past": grown}


def test_a_past_may_come_back_under_its_own_name() -> None:
    module, args, shapes = cached_gpt.build()
    named = Named(module.config).eval()
    named.load_state_dict(module.state_dict())
    decoder = attngraph.optimize_decoder(named, args, dynamic_shapes=shapes)
    assert decoder.layout.pasts[0] == "past_0_0"
    assert decoder.layout.presents[0] == "present_0_0"
    ids, _ = prompts(2)
    other = attngraph.optimize_decoder(module, args, dynamic_shapes=shapes, verify="off")
    assert torch.equal(decoder.generate(ids, 4), other.generate(ids, 4))


def test_models_without_such_a_cache() -> None:
    from transformers import BertConfig, BertModel

    for module in (BertModel(BertConfig(**common())), nn.Linear(2, 2)):
        with pytest.raises(UsageError, match=f"cache of {type(module).__name__} can't be found"):
            attngraph.optimize_decoder(module)


def test_a_model_that_keeps_no_cache_compiles_as_its_error_says() -> None:
    """GPT-1 takes the cache among its keywords, and leaves it empty."""
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    config = OpenAIGPTConfig(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    module, ids = OpenAIGPTLMHeadModel(config).eval(), torch.arange(14).reshape(2, 7)
    with pytest.raises(UsageError, match="keeps no cache: it put nothing") as caught:
        attngraph.optimize_decoder(module)
    shapes = ({0: Dim("batch"), 1: Dim("seq")},)
    assert "(input_ids,), dynamic_shapes=({0: Dim('batch'), 1: Dim('seq')},)" in str(caught.value)
    optimized = attngraph.optimize(module, (ids,), dynamic_shapes=shapes)
    assert [(site.status, site.code) for site in optimized.report.sites] == [("fused", "attention")]


def test_bad_calls() -> None:
    decoder = compiled("llama")[1]
    ids, mask = prompts(3)
    _, cache = decoder(ids, mask)
    for call, message in (
        (lambda: decoder(ids[0]), "must be \\(batch, length\\)"),
        (lambda: decoder(ids[:2], None, cache), "2 rows, and the cache 3"),
        (lambda: decoder(ids, mask, cache), "it must be \\(3, 14\\)"),
        (lambda: decoder.generate(ids, 2, mask.flip(1)), "Row 1 .* pad on the left"),
        (lambda: decoder.generate(ids, 2, temperature=-1.0), "temperature"),
        (lambda: decoder.generate(ids, 2, temperature=1.0, top_p=0.0), "top_p"),
        (lambda: decoder.generate(ids, 2, temperature=1.0, top_k=0), "top_k"),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def _llava() -> nn.Module:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    vision = CLIPVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4,
    )  # fmt: skip
    text = LlamaConfig(**common())
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text))


def _qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"embed_dim": 16, "hidden_size": HIDDEN, "depth": 1, "num_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    text = common(num_key_value_heads=HEADS // 2, rope_scaling=rope)
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision))


def _bert_with_cross_attention() -> nn.Module:
    from transformers import BertConfig, BertLMHeadModel

    return BertLMHeadModel(BertConfig(**common(is_decoder=True, add_cross_attention=True)))


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (_llava, "LlavaForConditionalGeneration also takes pixel_values,"),
        (_qwen2_vl, "also takes pixel_values, pixel_values_videos, image_grid_thw, video_grid_thw"),
        (_bert_with_cross_attention, "also takes encoder_hidden_states, encoder_attention_mask,"),
    ],
)
def test_a_decoder_that_takes_more_than_text_is_refused(
    build: Callable[[], nn.Module], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        attngraph.optimize_decoder(build())
