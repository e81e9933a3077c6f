"""A checkpoint's folder is read as transformers' own from_pretrained reads it, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attngraph.errors import AttngraphError, LoadError, UsageError
from attngraph.frontend.files.load import Loaded, load
from tests.checkpoints.models import NAMES, made, rewritten, saved


def _assert_as_transformers_loads_it(loaded: Loaded, path: Path) -> None:
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


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_transformers_loads(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, name)
    loaded = load(path)
    _assert_as_transformers_loads_it(loaded, path)
    module: Any = loaded.module
    with torch.no_grad():
        outputs = module(**loaded.kwargs)
    assert all(shape is None or shape for shape in dict(loaded.dynamic_shapes or {}).values())
    assert outputs[0].isfinite().all()


def test_halves_and_ties_stay_and_weights_lie_in_the_file(folders: Path) -> None:
    loaded = load(folders / "llama")
    _assert_as_transformers_loads_it(loaded, folders / "llama")
    module: Any = loaded.module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert module.model.rotary_emb.inv_freq.dtype is torch.float32
    mapped = Path("/proc/self/maps")
    if not mapped.exists():
        pytest.skip("no /proc")
    place = module.model.layers[0].mlp.up_proj.weight.data_ptr()
    lines = (line.split() for line in mapped.read_text().splitlines())
    files = [line[5] for line in lines if len(line) > 5 and _holds(line[0], place)]
    assert files
    assert files[0].endswith("model.safetensors")


def _holds(region: str, place: int) -> bool:
    low, high = (int(number, 16) for number in region.split("-"))
    return low <= place < high


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    path = saved(tmp_path, "bert", max_shard_size="10KB")
    assert not (path / "model.safetensors").exists()
    _assert_as_transformers_loads_it(load(path), path)


@pytest.mark.parametrize("prefix", ["module.", "module.model.", "_orig_mod."])
def test_what_a_wrapper_put_before_each_name_is_taken_off(bert: Path, prefix: str) -> None:
    weights = load_file(bert / "model.safetensors")
    own = made("bert").state_dict()
    save_file({prefix + name: data for name, data in weights.items()}, bert / "model.safetensors")
    loaded = load(bert)
    assert torch.equal(dict(loaded.module.named_parameters())["classifier.weight"],  # type: ignore
                       own["classifier.weight"])  # fmt: skip
    assert any(repr(prefix) in note for note in loaded.notes)


def test_another_head_of_the_same_weights(folders: Path, bert: Path) -> None:
    loaded = load(bert, task="feature-extraction")
    assert type(loaded.module).__name__ == "BertModel"
    assert any("classifier.bias" in note for note in loaded.notes)
    with pytest.raises(LoadError, match=r"4 of its weights are in no file \(.*classifier\.bias"):
        load(folders / "bert-mlm", task="text-classification")
    unpooled = load(folders / "bert-mlm", task="feature-extraction")
    assert any("has no pooler" in note for note in unpooled.notes)
    assert "pooler.dense.weight" not in dict(unpooled.module.named_parameters())  # type: ignore
    with pytest.raises(UsageError, match="no bert model with such a head"):
        load(bert, task="image-classification")


@pytest.mark.parametrize("sharded", [False, True])
def test_pickles_are_for_those_who_trust_them(bert: Path, sharded: bool) -> None:
    weights = load_file(bert / "model.safetensors")
    (bert / "model.safetensors").unlink()
    name = "pytorch_model-00001-of-00001.bin" if sharded else "pytorch_model.bin"
    torch.save(weights, bert / name)
    if sharded:
        index = {"weight_map": dict.fromkeys(weights, name)}
        (bert / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match="--trust-pickle"):
        load(bert)
    _assert_weights(load(bert, trust_pickle=True), weights)


def _evil(mark: Path) -> Any:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (mark,)

    return Evil()


@pytest.mark.parametrize("place", ["safetensors", "index", "config", "adapter"])
def test_a_pickle_is_told_by_what_it_is_and_not_by_its_name(
    bert: Path, tmp_path: Path, place: str
) -> None:
    names = {"safetensors": "model.safetensors", "adapter": "adapter_model.safetensors"}
    name = names.get(place, "weights.bin")
    if place != "adapter":
        (bert / "model.safetensors").unlink()
    torch.save({"classifier.weight": torch.ones(2, 32), "x": _evil(tmp_path / "ran")}, bert / name)
    if place == "index":
        index = {"weight_map": {"classifier.weight": name}}
        (bert / "model.safetensors.index.json").write_text(json.dumps(index))
    elif place == "config":
        rewritten(bert, transformers_weights=name)
    elif place == "adapter":
        (bert / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(LoadError, match=f"weights in {name}, a pickle.*--trust-pickle"):
        load(bert)
    assert not (tmp_path / "ran").exists()


def _assert_weights(loaded: Loaded, weights: dict[str, torch.Tensor]) -> None:
    assert loaded.module is not None
    own = dict(loaded.module.named_parameters())
    assert all(torch.equal(own[name], data) for name, data in weights.items())


_CODE = """
import pathlib
from transformers import BertForSequenceClassification

pathlib.Path({mark!r}).touch()


class OwnForSequenceClassification(BertForSequenceClassification):
    pass
"""


def test_code_of_the_author_runs_only_where_it_is_trusted(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    mark = tmp_path / "ran"
    (bert / "own.py").write_text(_CODE.format(mark=str(mark)))
    place = "own.OwnForSequenceClassification"
    for architecture in ("OwnForSequenceClassification", "BertForSequenceClassification"):
        rewritten(
            bert,
            architectures=[architecture],
            auto_map={"AutoModelForSequenceClassification": place},
        )
        with pytest.raises(LoadError, match=f"auto_map: {place}.*--trust-code"):
            load(bert)
    assert not mark.exists()
    loaded = load(bert, trust_code=True)
    assert type(loaded.module).__name__ == "OwnForSequenceClassification"
    assert mark.exists()
    assert loaded.task is not None
    assert loaded.task.name == "text-classification"


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
    _assert_as_transformers_loads_it(loaded, bert)
    assert any("teacher.weight" in note for note in loaded.notes)


@pytest.mark.parametrize("kernel", ["flash_attention_2", "of_next_year"])
def test_the_kernel_that_a_config_asks_for_needs_no_package(bert: Path, kernel: str) -> None:
    rewritten(bert, _attn_implementation=kernel)
    _assert_weights(load(bert), load_file(bert / "model.safetensors"))


def test_a_part_of_a_model_is_found_where_the_model_is(tmp_path: Path) -> None:
    """A class of transformers that its package doesn't name, and that takes no text."""
    from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
    from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    config = Idefics2VisionConfig(**sizes, num_hidden_layers=1, image_size=16, patch_size=8)
    Idefics2VisionTransformer(config).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    _assert_as_transformers_loads_it(loaded, tmp_path)
    assert [(n, tuple(each.shape)) for n, each in loaded.kwargs.items()] == [
        ("pixel_values", (2, 3, 16, 16))
    ]


def test_a_part_may_have_the_config_of_the_whole(tmp_path: Path) -> None:
    path = saved(tmp_path, "clip")
    rewritten(path, architectures=["CLIPTextModel"])
    assert type(load(path).module).__name__ == "CLIPTextModel"


def test_what_is_read_otherwise_than_it_is_written_is_told(bert: Path) -> None:
    rewritten(bert, architectures="BertForSequenceClassification")
    assert not load(bert).notes
    rewritten(bert, dtype="bfloat16", architectures=["BertForSequenceClassification", "BertModel"])
    loaded = load(bert)
    _assert_as_transformers_loads_it(loaded, bert)
    rounded, first = loaded.notes
    assert rounded.startswith("25 weights are float32 in the files and rounded to bfloat16")
    assert first.startswith("config.json names BertForSequenceClassification and BertModel: this")
    weights = load_file(bert / "model.safetensors")
    save_file({n: data.bfloat16() for n, data in weights.items()}, bert / "model.safetensors")
    assert load(bert).notes == (first,)
    weights = {n: data.float() if "query" in n else data.half() for n, data in weights.items()}
    save_file(weights, bert / "model.safetensors")
    rewritten(bert, dtype=None)
    loaded = load(bert)
    _assert_as_transformers_loads_it(loaded, bert)
    assert loaded.notes[0].startswith("2 weights are float32 in the files and rounded to float16")


def test_the_hubs_own_cache_is_links_to_its_blobs(bert: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for item in bert.iterdir():
        item.rename(blobs / item.name[::-1])
        (snapshot / item.name).symlink_to(Path("../../blobs") / item.name[::-1])
    assert load(snapshot).module is not None
