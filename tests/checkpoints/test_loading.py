"""A checkpoint's folder is read as transformers' own from_pretrained reads it, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attngraph.errors import LoadError, UsageError
from attngraph.frontend.files.load import Loaded, load
from tests.checkpoints.models import NAMES, assert_as_transformers_loads_it, made, rewritten, saved


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_transformers_loads(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, name)
    loaded = load(path)
    assert_as_transformers_loads_it(loaded, path)
    module: Any = loaded.module
    with torch.no_grad():
        outputs = module(**loaded.kwargs)
    assert all(shape is None or shape for shape in dict(loaded.dynamic_shapes or {}).values())
    assert outputs[0].isfinite().all()


def test_halves_and_ties_stay_and_weights_lie_in_the_file(folders: Path) -> None:
    loaded = load(folders / "llama")
    assert_as_transformers_loads_it(loaded, folders / "llama")
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
    assert_as_transformers_loads_it(load(path), path)


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
    told = (
        r"4 of its weights are in no file \(.*classifier\.bias.* BertForMaskedLM: leave out --task"
    )
    with pytest.raises(LoadError, match=told):
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
    assert_as_transformers_loads_it(loaded, tmp_path)
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
    assert_as_transformers_loads_it(loaded, bert)
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
    assert_as_transformers_loads_it(loaded, bert)
    assert loaded.notes[0].startswith("2 weights are float32 in the files and rounded to float16")


def test_the_hubs_own_cache_is_links_to_its_blobs(bert: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for item in bert.iterdir():
        item.rename(blobs / item.name[::-1])
        (snapshot / item.name).symlink_to(Path("../../blobs") / item.name[::-1])
    assert load(snapshot).module is not None
