"""What is wrong with a checkpoint's folder is told in one sentence, and what looks so is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from attngraph.errors import AttngraphError, LoadError
from attngraph.frontend.files.load import load
from tests.checkpoints.models import assert_as_transformers_loads_it, rewritten


def _gone(path: Path) -> None:
    (path / "config.json").unlink()


def _damaged(path: Path) -> None:
    (path / "config.json").write_text('{"architectures": [')


def _list(path: Path) -> None:
    (path / "config.json").write_text("[1, 2]")


def _weightless(path: Path) -> None:
    (path / "model.safetensors").rename(path / "weights.msgpack")


def _truncated(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def _lacking(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    del weights["classifier.weight"]
    save_file(weights, path / "model.safetensors")


def _other_shape(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    weights["classifier.weight"] = torch.zeros(5, 32)
    save_file(weights, path / "model.safetensors")


def _linked_out(path: Path) -> None:
    (path / "model.safetensors").rename(path.parent / "elsewhere.safetensors")
    (path / "model.safetensors").symlink_to(path.parent / "elsewhere.safetensors")


def _linked_in_a_circle(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "config.json").symlink_to(path / "config.json")


def _index(path: Path, name: Any) -> None:
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").rename(path / "model-1.safetensors")
    places = {**dict.fromkeys(weights, "model-1.safetensors"), "classifier.weight": name}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _twice(path: Path) -> None:
    """One name in two shards, with other numbers."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").rename(path / "model-1.safetensors")
    save_file({"classifier.weight": torch.zeros(2, 32)}, path / "model-2.safetensors")
    places = dict.fromkeys(weights, "model-1.safetensors") | {
        "classifier.weight": "model-2.safetensors"
    }
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _adapter_of_another(path: Path) -> None:
    settings = {"peft_type": "LORA", "base_model_name_or_path": "some/other"}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    save_file({"a": torch.ones(1)}, path / "adapter_model.safetensors")


def _one_snapshot_in(path: Path) -> None:
    (path / "snapshots" / "5f0").mkdir(parents=True)
    (path / "config.json").rename(path / "snapshots" / "5f0" / "config.json")


def _one_further_in(path: Path) -> None:
    (path / "checkpoint-5").mkdir()
    (path / "config.json").rename(path / "checkpoint-5" / "config.json")


def _beside(path: Path, name: str) -> None:
    (path / name).write_text("{}")


def _scaled(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    weights["classifier.weight_scale_inv"] = torch.ones(1)
    save_file(weights, path / "model.safetensors")


def _in_int8(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    weights["classifier.weight"] = weights["classifier.weight"].to(torch.int8)
    save_file({**weights, "classifier.SCB": torch.ones(1)}, path / "model.safetensors")


def _codes_alone(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    weights["classifier.weight"] = weights["classifier.weight"].to(torch.int8)
    save_file(weights, path / "model.safetensors")


def _packed(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    weights["classifier.qweight"] = weights.pop("classifier.weight").int()
    save_file(weights, path / "model.safetensors")


def _stored(path: Path, name: str, dtype: torch.dtype, *, old: str = "", beside: str = "") -> None:
    """One weight in another dtype, by another name, with a number beside it."""
    weights = load_file(path / "model.safetensors")
    weights[old or name] = weights.pop(name).to(dtype)
    if beside:
        weights[beside] = torch.ones(())
    save_file(weights, path / "model.safetensors")


def _pickled(path: Path, data: torch.Tensor) -> None:
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save({**weights, "classifier.weight": data}, path / "pytorch_model.bin")


def _renamed(path: Path, prefix: str) -> None:
    weights = load_file(path / "model.safetensors")
    save_file({prefix + name: data for name, data in weights.items()}, path / "model.safetensors")


_NORM = "bert.embeddings.LayerNorm"
_F8 = torch.float8_e4m3fn
_BROKEN = {
    "codes by an old name": (
        lambda p: _stored(p, f"{_NORM}.weight", torch.int8, old=f"{_NORM}.gamma"),
        r"stored as int8 without a scale \(bert.embeddings.LayerNorm.gamma\)",
    ),
    "codes by a shorter name": (
        lambda p: _stored(p, f"{_NORM}.weight", torch.int8, old=f"{_NORM[5:]}.weight"),
        r"stored as int8 without a scale \(embeddings.LayerNorm.weight\)",
    ),
    "eight bits and a scale": (
        lambda p: _stored(p, "classifier.weight", _F8, beside="classifier.anything"),
        r"in floats of 8 bits with scales beside them \(classifier.anything\)",
    ),
    "eight bits and a scale elsewhere": (
        lambda p: _stored(p, "classifier.weight", _F8, beside="bert.scale_of_all"),
        r"in floats of 8 bits with scales beside them \(bert.scale_of_all\)",
    ),
    "eight bits and no dtype": (
        lambda p: (
            _stored(p, f"{_NORM}.bias", _F8),
            rewritten(p, dtype=None),
        ),
        "says no dtype, and the first weight is float8_e4m3fn.*: write one of float32",
    ),
    "complex numbers": (
        lambda p: _stored(p, "classifier.weight", torch.complex64),
        "classifier.weight as complex64, and the model's numbers are real",
    ),
    "another prefix": (
        lambda p: _renamed(p, "student."),
        r"25 of its weights are in no file \(.*no place for others in them \(student.bert.*\); "
        "fetch .* or save the weights by the names of the class",
    ),
    "a type of another model": (
        lambda p: rewritten(p, model_type="roberta"),
        "model_type roberta and names the architecture BertForSequenceClassification, which is of "
        "the type bert",
    ),
    "no config": (_gone, "has no config.json"),
    "half a config": (_damaged, "config.json can't be read"),
    "a list for a config": (_list, "holds a list"),
    "no weights": (_weightless, "has no weights: .*it holds config.json, weights.msgpack"),
    "half the weights": (_truncated, "model.safetensors"),
    "a weight lost": (_lacking, r"1 of its weights are in no file \(classifier.weight\)"),
    "another shape": (_other_shape, "classifier.weight"),
    "a link out": (_linked_out, "is a link to .*elsewhere.safetensors, outside"),
    "a circle": (_linked_in_a_circle, "config.json"),
    "a shard lost": (lambda p: _index(p, "model-2.safetensors"), "the shard model-2.safetensors"),
    "a weight twice": (_twice, r"model-2.safetensors and another shard .* for classifier.weight"),
    "a folder above": (_one_further_in, r"has no config.json.*such as .*/checkpoint-5\)"),
    "the hub's folder": (_one_snapshot_in, r"has no config.json.*such as .*/snapshots/5f0\)"),
    "an adapter of another": (
        _adapter_of_another,
        "holds a model and an adapter of 'some/other'",
    ),
    "a shard above": (lambda p: _index(p, "../model-2.safetensors"), "which is not inside of it"),
    "a shard at the root": (lambda p: _index(p, "/etc/hostname"), "which is not inside of it"),
    "a shard without a name": (lambda p: _index(p, None), "names no file for classifier.weight"),
    "no such architecture": (
        lambda p: rewritten(p, architectures=["BertForWonders"], transformers_version="4.2.0"),
        "the architecture BertForWonders, which transformers .* lacks: install the .*4.2.0",
    ),
    "an architecture of its author's": (
        lambda p: rewritten(p, architectures=["BertForWonders"]),
        "BertForWonders, which transformers .* lacks, and saved: it is a class of its author's",
    ),
    "an architecture of several models": (
        lambda p: rewritten(p, architectures=["Qwen2_5OmniForConditionalGeneration"]),
        "Qwen2_5OmniForConditionalGeneration, which runs several models in its generate",
    ),
    "an architecture that is no model": (
        lambda p: rewritten(p, architectures=["pipeline"]),
        "the architecture pipeline, which",
    ),
    "an architecture without a forward": (
        lambda p: rewritten(p, architectures=["BertPreTrainedModel"]),
        "the architecture BertPreTrainedModel, which is no model in transformers",
    ),
    "no such activation": (
        lambda p: rewritten(p, hidden_act="wonder"),
        "doesn't fit BertForSequenceClassification: KeyError: 'wonder'",
    ),
    "no number's dtype": (lambda p: rewritten(p, dtype=16), "the dtype 16, in which no model"),
    "a dtype of codes": (lambda p: rewritten(p, torch_dtype="int8", dtype="int8"), "dtype 'int8'"),
    "no architecture": (lambda p: rewritten(p, architectures=None), "pass --task"),
    "gptq": (lambda p: rewritten(p, quantization_config={"quant_method": "gptq"}), "by gptq"),
    **{
        method: (
            lambda p, method=method: rewritten(p, quantization_config={"quant_method": method}),
            f"by {method}, .*--weights int8",
        )
        for method in ("awq", "torchao", "compressed-tensors", "fp8")
    },
    "mlx": (lambda p: rewritten(p, quantization={"bits": 4}), "by mlx"),
    "gptq beside": (lambda p: _beside(p, "quantize_config.json"), r"by gptq \(quantize_config"),
    "scales": (_scaled, r"scales beside them \(classifier.weight_scale_inv\)"),
    "codes alone": (_codes_alone, r"stored as int8 without a scale \(classifier.weight\)"),
    "packed": (_packed, r"scales beside them \(classifier.qweight\)"),
    "half of what bitsandbytes stores": (
        lambda p: (_in_int8(p), rewritten(p, quantization_config={"load_in_8bit": True})),
        r"classifier can't be read as bitsandbytes stores it: SCB is \(1,\), where",
    ),
}


@pytest.mark.parametrize("how", _BROKEN)
def test_what_is_wrong_with_a_folder_is_one_sentence(bert: Path, how: str) -> None:
    breaks, told = _BROKEN[how]
    breaks(bert)
    with pytest.raises(AttngraphError, match=told) as caught:
        load(bert)
    assert caught.value.exit_code == LoadError.exit_code
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (torch.eye(2, 32).to_sparse(), "a tensor sparse_coo"),
        (torch.empty(2, 32, device="meta"), "a tensor without its numbers"),
    ],
)
def test_a_pickles_tensors_are_dense(bert: Path, data: torch.Tensor, told: str) -> None:
    _pickled(bert, data)
    with pytest.raises(LoadError, match=f"pytorch_model.bin holds classifier.weight as {told}"):
        load(bert, trust_pickle=True)


def test_floats_of_eight_bits_alone_are_numbers(bert: Path) -> None:
    """What the class leaves out elsewhere is none of theirs."""
    _stored(bert, "classifier.weight", _F8, beside="teacher.weight")
    loaded = load(bert)
    assert_as_transformers_loads_it(loaded, bert)
    assert any("teacher.weight" in note for note in loaded.notes)


_MASK = torch.ones(1, 1, 8, 8).tril()


@pytest.mark.parametrize(
    ("name", "kind", "sizes", "stored"),
    [
        ("GPT2", "GPT2LMHeadModel", {"n_embd": 16, "n_layer": 1, "n_head": 2}, "h.0.attn.bias"),
        (
            "GPTNeoX",
            "GPTNeoXForCausalLM",
            {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            "gpt_neox.layers.0.attention.bias",
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool])
def test_the_masks_that_earlier_versions_saved_are_no_codes(
    tmp_path: Path, name: str, kind: str, sizes: dict[str, int], stored: str, dtype: torch.dtype
) -> None:
    config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=40)
    getattr(transformers, kind)(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    prefix = "transformer." if name == "GPT2" else ""
    save_file({**load_file(file), f"{prefix}{stored}": _MASK.to(dtype)}, file)
    assert_as_transformers_loads_it(load(tmp_path), tmp_path)
