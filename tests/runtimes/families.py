"""Tiny decoders of the families that other runtimes are asked for."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tests.models.kit import HEADS, HIDDEN, LAYERS, POSITIONS, VOCABULARY, peaked
from tests.parity.test_decode import common

EOS, PAD = 2, 0
_GROUPED = {"num_key_value_heads": HEADS // 2}


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "n_positions": POSITIONS}
    return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=VOCABULARY))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**common(**_GROUPED)))


def _qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**common(**_GROUPED)))


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**common(**_GROUPED, head_dim=24)))


def _phi() -> nn.Module:
    from transformers import PhiConfig, PhiForCausalLM

    return PhiForCausalLM(PhiConfig(**common()))


def _phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**common(**_GROUPED, pad_token_id=PAD)))


def _gemma() -> nn.Module:
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**common(num_key_value_heads=1, head_dim=16)))


def _gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "full_attention"]
    config = common(**_GROUPED, head_dim=16, sliding_window=5, layer_types=layers)
    return Gemma3ForCausalLM(Gemma3TextConfig(**config))


def _mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**common(**_GROUPED, sliding_window=5)))


DECODERS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": _gpt2,
    "Llama": _llama,
    "Qwen2": _qwen2,
    "Qwen3": _qwen3,
    "Phi": _phi,
    "Phi-3": _phi3,
    "Gemma": _gemma,
    "Gemma 3": _gemma3,
    "Mistral": _mistral,
}
WINDOWED = {"Gemma 3", "Mistral"}


def decoder(name: str) -> nn.Module:
    """The family's model, with an end and a padding token that its vocabulary has."""
    module = peaked(DECODERS[name]())
    for config in (module.config, module.generation_config):
        config.eos_token_id, config.pad_token_id, config.bos_token_id = EOS, PAD, 1
    return module
