"""Tiny models of transformers with random weights, each saved as the folder of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from attngraph.frontend.files.load import Loaded
from tests.models import present

SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip
"""Of most configs, without a vocabulary."""
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 48,
    "vocab_size": 90,
    "max_position_embeddings": 40,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
_IMAGE = {**_TEXT, "image_size": 16, "patch_size": 8}
_PAGE = {**_TEXT, "input_size": 16, "patch_size": 8, "coordinate_size": 6, "shape_size": 4}
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "BertForSequenceClassification", _TEXT),
    "bert-mlm": ("Bert", "BertForMaskedLM", _TEXT),
    "choices": ("Bert", "BertForMultipleChoice", _TEXT),
    "roberta": (
        "Roberta",
        "RobertaForTokenClassification",
        {**_TEXT, "max_position_embeddings": 42, "type_vocab_size": 1},
    ),
    "distilbert": (
        "DistilBert",
        "DistilBertForQuestionAnswering",
        {"dim": 32, "n_heads": 2, "n_layers": 1, "hidden_dim": 48, "vocab_size": 90},
    ),
    "vit": ("ViT", "ViTForImageClassification", _IMAGE),
    "clip": (
        "CLIP",
        "CLIPModel",
        {"text_config": _TEXT, "vision_config": _IMAGE, "projection_dim": 8},
    ),
    "blip": (
        "Blip",
        "BlipForImageTextRetrieval",
        {"text_config": {**_TEXT, "encoder_hidden_size": 32}, "vision_config": _IMAGE},
    ),
    "layoutlmv3": ("LayoutLMv3", "LayoutLMv3ForTokenClassification", _PAGE),
    "blind layoutlmv3": (
        "LayoutLMv3",
        "LayoutLMv3ForTokenClassification",
        {**_PAGE, "visual_embed": False},
    ),
    "visual_bert": ("VisualBert", "VisualBertModel", {**_TEXT, "visual_embedding_dim": 8}),
    "sound": (
        "Wav2Vec2",
        "Wav2Vec2ForCTC",
        {
            **_TEXT,
            "conv_dim": [16, 16],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 2],
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
    "ast": (
        "AST",
        "ASTForAudioClassification",
        {**_TEXT, "max_length": 32, "num_mel_bins": 16},
    ),
    "llama": ("Llama", "LlamaForCausalLM", {**_GROUPED, "tie_word_embeddings": True}),
    "llama-class": (
        "Llama",
        "LlamaForSequenceClassification",
        {**_GROUPED, "pad_token_id": 0},
    ),
    "bart": (
        "Bart",
        "BartForConditionalGeneration",
        {
            **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
            "vocab_size": 90,
            "d_model": 32,
            "max_position_embeddings": 40,
        },
    ),
    "mixtral": ("Mixtral", "MixtralForCausalLM", {**_GROUPED, "num_local_experts": 2}),
}
_ELSEWHERE = {"bart", "sound", "blip", "layoutlmv3", "blind layoutlmv3", "visual_bert"}
NAMES = tuple(name for name in _MODELS if name not in _ELSEWHERE)
"""Those that come with samples and nothing to tell; of an encoder-decoder its parts do."""


def made(name: str) -> Any:
    """The model of this name, with norms and biases that are not one and zero."""
    import transformers

    kind, architecture, options = _MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


def saved(path: Path, name: str, *, half: bool = False, **how: Any) -> Path:
    """The folder `path`, which save_pretrained wrote; `how` are options of that."""
    model = made(name)
    (model.half() if half else model).save_pretrained(path, **how)
    return path


def feed(inputs: dict[str, Any], sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Inputs of an ONNX file, by name and shape: not the samples; masks with holes."""
    drawn = torch.Generator().manual_seed(7)
    found = {}
    for name, shape in inputs.items():
        real = [sizes.get(size, size) for size in shape]
        if "mask" in name:
            rows, length = torch.tensor(real[:-1]).prod().item(), real[-1]
            found[name] = present(int(rows), length).long().reshape(real)
        elif name == "token_type_ids":
            found[name] = torch.randint(2, real, generator=drawn)
        elif "ids" in name:
            found[name] = torch.randint(3, 80, real, generator=drawn)
        else:
            found[name] = torch.randn(real, generator=drawn)
    return found


def rewritten(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config |= changes
    (path / "config.json").write_text(json.dumps(config))


def assert_as_transformers_loads_it(loaded: Loaded, path: Path) -> None:
    """Every parameter, and every buffer, those too that no file has."""
    module: Any = loaded.module
    expected = type(module).from_pretrained(path, dtype="auto")
    for kind in ("named_parameters", "named_buffers"):
        found, wanted = dict(getattr(module, kind)()), dict(getattr(expected, kind)())
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name
    assert not module.training
