"""Compiles tiny models of transformers, one of each head, with the transformers that it finds.

Prints its version, then a line for each model that passed; what fails ends it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import attngraph

_SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
}
_TEXT = {**_SIZES, "vocab_size": 96, "max_position_embeddings": 64}
_VISION = {**_SIZES, "image_size": 32, "patch_size": 8}
_GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 64, "vocab_size": 96}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 96}
_BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 96,
}


def _built(name: str, config: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = getattr(transformers, name)(
        getattr(transformers, config)(**settings, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    )
    return module.eval()


def _texts(*names: str, config: str, **settings: Any) -> dict[str, Callable[[], nn.Module]]:
    return {name: lambda name=name: _built(name, config, **settings) for name in names}


IDS = torch.arange(3, 30).reshape(3, 9)
SAMPLES: Mapping[str, Mapping[str, Tensor]] = {
    "BertForMultipleChoice": {"input_ids": IDS.reshape(3, 3, 3)},
    "T5Model": {"input_ids": IDS, "decoder_input_ids": IDS},
    "T5ForConditionalGeneration": {"input_ids": IDS, "decoder_input_ids": IDS},
    "CLIPModel": {"input_ids": IDS, "pixel_values": torch.randn(2, 3, 32, 32)},
}
FORWARDS: Mapping[str, Callable[[], nn.Module]] = {
    **_texts(
        "BertModel",
        "BertForMaskedLM",
        "BertForPreTraining",
        "BertForSequenceClassification",
        "BertForTokenClassification",
        "BertForQuestionAnswering",
        "BertForNextSentencePrediction",
        "BertForMultipleChoice",
        config="BertConfig",
        **_TEXT,
    ),
    **_texts(
        "LlamaModel",
        "LlamaForCausalLM",
        "LlamaForSequenceClassification",
        config="LlamaConfig",
        **_TEXT,
    ),
    **_texts("GPT2LMHeadModel", "GPT2DoubleHeadsModel", config="GPT2Config", **_GPT2),
    **_texts("T5EncoderModel", "T5Model", "T5ForConditionalGeneration", config="T5Config", **_T5),
    **_texts("ViTModel", "ViTForImageClassification", config="ViTConfig", **_VISION),
    "CLIPModel": lambda: _built(
        "CLIPModel", "CLIPConfig", text_config=_TEXT, vision_config=_VISION, projection_dim=32
    ),
}
FOLDERS: Mapping[str, Callable[[], nn.Module]] = {
    "BertForSequenceClassification": FORWARDS["BertForSequenceClassification"],
    "ViTForImageClassification": FORWARDS["ViTForImageClassification"],
    "LlamaForCausalLM": FORWARDS["LlamaForCausalLM"],
    "BartForConditionalGeneration": lambda: _built(
        "BartForConditionalGeneration", "BartConfig", **_BART, decoder_start_token_id=1
    ),
}


def _inputs(name: str) -> Mapping[str, Tensor]:
    if name.startswith("ViT"):
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    return SAMPLES.get(name, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})


def main() -> None:
    """Parity is checked by each compile, which raises where it doesn't hold."""
    print(transformers.__version__)
    for name, made in FORWARDS.items():
        attngraph.optimize(made(), (), kwargs=_inputs(name))
        print(name)
    for name, made in FOLDERS.items():
        with tempfile.TemporaryDirectory() as folder:
            made().save_pretrained(folder)
            attngraph.optimize_checkpoint(folder)
        print("folder of", name)


if __name__ == "__main__":
    main()
