"""Architectures of `transformers`, each with eager and with sdpa attention."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tests.models.kit import (
    BATCH,
    FEED_FORWARD,
    HEADS,
    HIDDEN,
    LAYERS,
    POSITIONS,
    SEQ,
    TARGET,
    TRACED,
    VOCABULARY,
    Args,
    Built,
    Case,
    Sizes,
    peaked,
    present,
    states,
    tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Text(nn.Module):
    """A transformers model of token ids and perhaps a padding mask, returning `outputs`."""

    def __init__(self, model: PreTrainedModel, outputs: tuple[str, ...], cached: bool) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs
        self.fixed = {"use_cache": False} if cached else {}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Args:
        result = self.model(input_ids=input_ids, attention_mask=attention_mask, **self.fixed)
        return tuple(result[name] for name in self.outputs)


class TextToText(nn.Module):
    """A transformers encoder-decoder, returning its logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_ids: Tensor) -> Tensor:
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_ids,
            use_cache=False,
        ).logits


class Vision(nn.Module):
    """A transformers image model, returning its hidden states."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values).last_hidden_state


def _text(
    model: PreTrainedModel, outputs: tuple[str, ...], causal: bool = False, padded: bool = True
) -> Built:
    def inputs(sizes: Sizes) -> Args:
        batch, seq = sizes["batch"], sizes["seq"]
        mask = present(batch, seq).long()
        return (tokens(batch, seq), mask) if padded else (tokens(batch, seq),)

    module = Text(model, outputs, cached=causal)
    peaked(module)
    args = inputs(TRACED)
    unmasked: dict[str, tuple[nn.Module, Args]] = {}
    if padded:
        unmasked["padding"] = (module, (args[0], torch.ones_like(args[1])))
    if causal:
        unmasked["causal"] = (_acausal(module), args)
    return Built(
        module,
        inputs,
        ("input_ids", "attention_mask")[: len(args)],
        ({0: BATCH, 1: SEQ},) * len(args),
        LAYERS,
        unmasked,
    )


def _acausal(module: nn.Module) -> nn.Module:
    """A copy in which every transformers sub-module attends both ways."""
    module = copy.deepcopy(module)
    for part in module.modules():
        if isinstance(getattr(part, "is_causal", None), bool):
            part.is_causal = False
        if (config := getattr(part, "config", None)) is not None:
            config.is_causal = False
    return module


def _bert(attention: str) -> Built:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_hidden_layers=LAYERS,
        intermediate_size=FEED_FORWARD,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        attn_implementation=attention,
    )
    return _text(BertModel(config), ("last_hidden_state", "pooler_output"))


def _gpt2(attention: str, padded: bool) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=HIDDEN,
        n_head=HEADS,
        n_layer=LAYERS,
        n_inner=FEED_FORWARD,
        n_positions=POSITIONS,
        vocab_size=VOCABULARY,
        attn_implementation=attention,
        **_SPECIAL_TOKENS,
    )
    return _text(GPT2LMHeadModel(config), ("logits",), causal=True, padded=padded)


def _llama(attention: str, padded: bool) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        num_hidden_layers=LAYERS,
        intermediate_size=FEED_FORWARD,
        max_position_embeddings=POSITIONS,
        vocab_size=VOCABULARY,
        attn_implementation=attention,
        **_SPECIAL_TOKENS,
    )
    return _text(LlamaForCausalLM(config), ("logits",), causal=True, padded=padded)


def _decoder(kind: str, attention: str, **options: object) -> Built:
    """A causal LM of grouped heads, some of whose layers see a window of 4."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=HIDDEN // HEADS,
        num_hidden_layers=LAYERS,
        intermediate_size=FEED_FORWARD,
        max_position_embeddings=POSITIONS,
        vocab_size=VOCABULARY,
        attn_implementation=attention,
        **_SPECIAL_TOKENS,
        **options,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return _text(model, ("logits",), causal=True, padded=False)


def _vit(attention: str) -> Built:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_hidden_layers=LAYERS,
        intermediate_size=FEED_FORWARD,
        image_size=24,
        patch_size=8,
        attn_implementation=attention,
    )
    module = Vision(ViTModel(config, add_pooling_layer=False))
    peaked(module)

    def inputs(sizes: Sizes) -> Args:
        return (states(sizes["batch"], 3, 24, 24),)

    return Built(module, inputs, ("pixel_values",), ({0: BATCH},), LAYERS)


def _t5(attention: str) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=HIDDEN,
        num_heads=HEADS,
        d_kv=HIDDEN // HEADS,
        num_layers=LAYERS,
        num_decoder_layers=LAYERS,
        d_ff=FEED_FORWARD,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        attn_implementation=attention,
    )
    module = TextToText(T5ForConditionalGeneration(config))
    peaked(module, gain=0.75)  # T5 does not divide its scores by √d

    def inputs(sizes: Sizes) -> Args:
        batch, seq, target = sizes["batch"], sizes["seq"], sizes["target"]
        return tokens(batch, seq), present(batch, seq).long(), tokens(batch, target, seed=1)

    ids, mask, decoder_ids = inputs(TRACED)
    return Built(
        module,
        inputs,
        ("input_ids", "attention_mask", "decoder_ids"),
        ({0: BATCH, 1: SEQ}, {0: BATCH, 1: SEQ}, {0: BATCH, 1: TARGET}),
        3 * LAYERS,
        {
            "padding": (module, (ids, torch.ones_like(mask), decoder_ids)),
            "causal": (_acausal(module), (ids, mask, decoder_ids)),
        },
    )


_WINDOW = {"sliding_window": 4}
_GROUPED = (
    ("mistral", "Mistral", _WINDOW),
    ("gemma2", "Gemma2", {**_WINDOW, "query_pre_attn_scalar": 16}),
    ("qwen3", "Qwen3", {}),
    (
        "gpt-oss",
        "GptOss",
        {**_WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": None},
    ),
)
CASES = tuple(
    Case(f"{name}-{attention}", partial(build, attention))
    for name, build in (
        ("bert", _bert),
        ("gpt2", partial(_gpt2, padded=True)),
        ("gpt2-unpadded", partial(_gpt2, padded=False)),
        ("llama", partial(_llama, padded=True)),
        ("llama-unpadded", partial(_llama, padded=False)),
        ("vit", _vit),
        ("t5", _t5),
    )
    for attention in ("eager", "sdpa")
)
CASES += tuple(
    Case(name, partial(_decoder, kind, "eager", **options)) for name, kind, options in _GROUPED
)
