"""An adapter of peft is merged into the base that it names, as W + s·BA says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attngraph.checkpoints.tasks import task_adapted
from attngraph.deployment.folder import OutputFolder
from attngraph.deployment.kept import kept_files
from attngraph.errors import LoadError
from attngraph.frontend.files.load import load
from tests.checkpoints.models import made, saved

_QUERY = "bert.encoder.layer.0.attention.self.query"
_EMBEDDED = "bert.embeddings.word_embeddings"
_RANK, _ALPHA = 3, 7
_FILE = "model.safetensors"


def _adapter(path: Path, base: str, weights: dict[str, torch.Tensor], **settings: Any) -> Path:
    path.mkdir(exist_ok=True)
    given = {"peft_type": "LORA", "task_type": "SEQ_CLS", "r": _RANK, "lora_alpha": _ALPHA}
    given |= {"base_model_name_or_path": base, **settings}
    (path / "adapter_config.json").write_text(json.dumps(given))
    named = {f"base_model.model.{name}": tensor for name, tensor in weights.items()}
    save_file(named, path / "adapter_model.safetensors")
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("base") / "bert", "bert")


def _factors(name: str, wide: int = 32, high: int = 32, kind: str = "lora") -> dict[str, Any]:
    ending = ".weight" if kind == "lora" else ""
    return {
        f"{name}.{kind}_A{ending}": torch.randn(_RANK, wide),
        f"{name}.{kind}_B{ending}": torch.randn(high, _RANK),
    }


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, _ALPHA / _RANK),
        ({"use_rslora": True}, _ALPHA / math.sqrt(_RANK)),
        ({"alpha_pattern": {"query": 2}}, 2 / _RANK),
    ],
)
def test_factors_are_merged_and_heads_replaced(
    base: Path, tmp_path: Path, settings: dict[str, Any], scale: float
) -> None:
    weights = _factors(_QUERY)
    head = {"classifier.weight": torch.randn(2, 32), "classifier.bias": torch.randn(2)}
    path = _adapter(tmp_path / "adapter", str(base), {**weights, **head}, **settings)
    loaded = load(path)
    own, module = made("bert"), loaded.module
    assert module is not None
    delta = weights[f"{_QUERY}.lora_B.weight"] @ weights[f"{_QUERY}.lora_A.weight"] * scale
    expected = {n: head.get(n, p.detach()) for n, p in own.named_parameters()}
    expected[f"{_QUERY}.weight"] = expected[f"{_QUERY}.weight"] + delta
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name])
    assert any(f"merged into 1 weights of {base}" in note for note in loaded.notes)
    assert loaded.task is not None
    assert loaded.task.name == "text-classification"
    again = load(base).module
    assert again is not None  # the base's own file is as it was
    query = f"{_QUERY}.weight"
    assert torch.equal(again.get_parameter(query), own.get_parameter(query))


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["value", "query"], "layers_to_transform": [0, 3]},
        {"target_modules": ["query"], "layers_to_transform": 0, "layers_pattern": ["layer"]},
        {"target_modules": [_QUERY], "layers_to_transform": [7]},  # named whole, layers or not
        {"target_modules": r".*\.query", "layers_to_transform": [7]},
        {"target_modules": ["query"], "exclude_modules": ["ery"], "rank_pattern": {"ery": 2}},
    ],
)
def test_what_the_settings_name_is_merged(
    base: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    loaded = load(_adapter(tmp_path / "adapter", str(base), _factors(_QUERY), **settings))
    assert any("merged into 1 weights" in note for note in loaded.notes)


def test_an_embedding_is_adapted_along_its_rows(base: Path, tmp_path: Path) -> None:
    weights = _factors(_EMBEDDED, wide=90, kind="lora_embedding")
    module = load(_adapter(tmp_path / "adapter", str(base), weights)).module
    assert module is not None
    up, down = (weights[f"{_EMBEDDED}.lora_embedding_{part}"] for part in "BA")
    expected = made("bert").get_parameter(f"{_EMBEDDED}.weight") + (up @ down).T * _ALPHA / _RANK
    torch.testing.assert_close(module.get_parameter(f"{_EMBEDDED}.weight"), expected)


_TABLE, _HEAD = "model.embed_tokens", "lm_head"


@pytest.mark.parametrize("trained", ["factors", "whole", "both", "tied", "in place"])
def test_what_is_tied_to_an_adapted_weight_stays_as_it_was(tmp_path: Path, trained: str) -> None:
    """As in peft, which adapts one module or a copy of it, unless it is told to keep ties. What it
    reads into a module that it didn't copy is that of the ties too.
    """
    base = saved(tmp_path / "llama", "llama")
    new = torch.randn(90, 32)
    weights = {
        "factors": _factors(_TABLE, wide=90, kind="lora_embedding"),
        "whole": {f"{_TABLE}.weight": new},
        "both": {f"{_TABLE}.weight": new, f"{_HEAD}.weight": new + 1},
        "tied": {f"{_TABLE}.weight": new},
        "in place": {f"{_TABLE}.weight": new},
    }[trained]
    copied = {"whole": ["embed_tokens"], "both": ["lm_head", "embed_tokens"]}
    settings = {
        "task_type": "CAUSAL_LM",
        "ensure_weight_tying": trained == "tied",
        "modules_to_save": copied.get(trained),
    }
    module = load(_adapter(tmp_path / "adapter", str(base), weights, **settings)).module
    assert module is not None
    before = made("llama").get_parameter(f"{_TABLE}.weight")
    if trained == "factors":
        up, down = (weights[f"{_TABLE}.lora_embedding_{part}"] for part in "BA")
        new = before + (up @ down).T * _ALPHA / _RANK
    head = {"both": new + 1, "tied": new, "in place": new}.get(trained, before)
    torch.testing.assert_close(module.get_parameter(f"{_TABLE}.weight"), new)
    torch.testing.assert_close(module.get_parameter(f"{_HEAD}.weight"), head)


def test_a_base_may_have_other_names_in_its_file_than_in_its_class(tmp_path: Path) -> None:
    """Which transformers turns into those; an adapter has those of the class."""
    base, name = saved(tmp_path / "bert", "bert"), "bert.embeddings.LayerNorm.bias"
    old = {n.replace(name, f"{name[:-4]}beta"): t for n, t in load_file(base / _FILE).items()}
    assert f"{name[:-4]}beta" in old
    save_file(old, base / _FILE, metadata={"format": "pt"})
    new = torch.randn(32)
    path = _adapter(tmp_path / "adapter", str(base), {**_factors(_QUERY), name: new}, bias="all")
    module = load(path).module
    assert module is not None
    torch.testing.assert_close(module.get_parameter(name), new, check_device=False)


@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_dora_have_the_lengths_that_were_trained(
    base: Path, tmp_path: Path, turned: bool
) -> None:
    """An embedding is adapted along its rows, and so its columns have them."""
    name, kind, wide = (_EMBEDDED, "lora_embedding", 90) if turned else (_QUERY, "lora", 32)
    weights, lengths = _factors(name, wide=wide, kind=kind), torch.rand(32) + 0.5
    given = {**weights, f"{name}.lora_magnitude_vector": lengths}
    module = load(_adapter(tmp_path / "adapter", str(base), given, use_dora=True)).module
    assert module is not None
    before = made("bert").get_parameter(f"{name}.weight")
    up, down = (weights[n] for part in "BA" for n in weights if f"{kind}_{part}" in n)
    moved = (before.T if turned else before) + up @ down * _ALPHA / _RANK
    expected = lengths[:, None] * moved / moved.pow(2).sum(1, keepdim=True).sqrt()
    found = module.get_parameter(f"{name}.weight")
    torch.testing.assert_close(found, expected.T if turned else expected)


@pytest.mark.parametrize(
    ("model", "name", "high"),
    [("bert", _QUERY, 32), ("llama", "model.layers.0.self_attn.q_proj", 32)],
)
def test_a_bias_of_the_factors_is_added_to_that_of_the_linear(
    tmp_path: Path, model: str, name: str, high: int
) -> None:
    """Llama's has none."""
    path, shift = saved(tmp_path / model, model), torch.randn(high)
    given = {**_factors(name, high=high), f"{name}.lora_B.bias": shift}
    settings = {"task_type": "CAUSAL_LM" if model == "llama" else "SEQ_CLS", "lora_bias": True}
    module = load(_adapter(tmp_path / "adapter", str(path), given, **settings)).module
    assert module is not None
    had = dict(made(model).named_parameters()).get(f"{name}.bias", torch.zeros(high))
    torch.testing.assert_close(
        module.get_parameter(f"{name}.bias"), had + shift * _ALPHA / _RANK, check_device=False
    )


@pytest.mark.parametrize("said", [[3, 70], {"embed_tokens": [3, 70]}])
def test_rows_that_were_trained_are_those_of_what_is_tied_too(tmp_path: Path, said: object) -> None:
    base, rows = saved(tmp_path / "llama", "llama"), torch.randn(2, 32)
    given = {
        **_factors("model.layers.0.self_attn.q_proj"),
        f"{_TABLE}.token_adapter.trainable_tokens_delta": rows,
    }
    settings = {"task_type": "CAUSAL_LM", "trainable_token_indices": said}
    module = load(_adapter(tmp_path / "adapter", str(base), given, **settings)).module
    assert module is not None
    expected = made("llama").get_parameter(f"{_TABLE}.weight").detach().clone()
    expected[[3, 70]] = rows
    for name in (_TABLE, _HEAD):
        torch.testing.assert_close(module.get_parameter(f"{name}.weight").detach(), expected)


def test_tokens_that_were_added_are_in_the_table_and_the_config(tmp_path: Path) -> None:
    """peft writes what it has under two more names then."""
    base, new = saved(tmp_path / "llama", "llama"), torch.randn(93, 32)
    given = {
        f"{_TABLE}.weight": new,
        f"{_HEAD}.modules_to_save.weight": new + 1,
        f"{_HEAD}.original_module.weight": new * 0,
    }
    loaded = load(_adapter(tmp_path / "adapter", str(base), given, task_type="CAUSAL_LM"))
    assert loaded.module is not None
    torch.testing.assert_close(loaded.module.get_parameter(f"{_TABLE}.weight"), new)
    torch.testing.assert_close(loaded.module.get_parameter(f"{_HEAD}.weight"), new + 1)
    assert loaded.settings["vocab_size"] == 93


def test_one_weight_has_no_two_values(tmp_path: Path) -> None:
    base, new = saved(tmp_path / "llama", "llama"), torch.randn(90, 32)
    given = {f"{_TABLE}.weight": new, f"{_HEAD}.weight": new + 1}
    with pytest.raises(LoadError, match=r"for model.embed.* than for lm_head.*are one weight"):
        load(_adapter(tmp_path / "adapter", str(base), given, task_type="CAUSAL_LM"))


def test_a_head_has_labels_of_its_own(base: Path, tmp_path: Path) -> None:
    head = {"classifier.weight": torch.randn(5, 32), "classifier.bias": torch.randn(5)}
    loaded = load(_adapter(tmp_path / "adapter", str(base), {**_factors(_QUERY), **head}))
    assert loaded.module is not None
    torch.testing.assert_close(
        loaded.module.get_parameter("classifier.bias"), head["classifier.bias"]
    )
    assert len(loaded.settings["id2label"]) == 5
    place = OutputFolder(tmp_path / "out", tmp_path / "adapter")
    with place:
        place.write({}, {}, loaded.settings)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(written["id2label"].values())[4] == "LABEL_4"
    assert written["hidden_size"] == 32


def test_the_class_is_that_which_was_adapted(base: Path, tmp_path: Path) -> None:
    """Of an adapter that names no task."""
    told = {"base_model_class": "BertModel", "parent_library": "transformers.models.bert.modeling"}
    weights = _factors(_QUERY.removeprefix("bert."))
    path = _adapter(tmp_path / "adapter", str(base), weights, task_type=None, auto_mapping=told)
    loaded = load(path)
    assert type(loaded.module).__name__ == "BertModel"
    assert loaded.settings["architectures"] == ["BertModel"]


@pytest.mark.parametrize(
    ("said", "architecture", "expected"),
    [
        ("CAUSAL_LM", "LlamaForCausalLM", None),
        ("CAUSAL_LM", "LlavaForConditionalGeneration", None),
        ("CAUSAL_LM", "Gemma3ForConditionalGeneration", None),
        ("SEQ_2_SEQ_LM", "WhisperForConditionalGeneration", None),
        ("CAUSAL_LM", "LlamaModel", "text-generation"),
        ("CAUSAL_LM", None, "text-generation"),
        ("SEQ_CLS", "LlamaForCausalLM", "text-classification"),
        (None, "LlamaForCausalLM", None),
    ],
)
def test_what_generates_stays_the_class_that_was_saved(
    said: str | None, architecture: str | None, expected: str | None
) -> None:
    """peft calls models that see or listen language models, as all that generates."""
    assert task_adapted(said, architecture) == expected


def test_factors_of_one_expert_are_told_where_all_are_one_weight(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "mixtral")
    expert = "model.layers.0.block_sparse_moe.experts.0.w1"
    path = _adapter(tmp_path / "adapter", str(base), _factors(expert), task_type="CAUSAL_LM")
    with pytest.raises(LoadError, match=r"in one weight with others.*merge_and_unload"):
        load(path)


@pytest.mark.parametrize("before", ["model.language_model", "language_model.model"])
def test_a_model_that_sees_still_does_with_an_adapter(tmp_path: Path, before: str) -> None:
    """Also with one that names its modules as earlier versions of transformers did."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 48,
    }
    eyes = CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    text = LlamaConfig(**sizes, vocab_size=90)
    config = LlavaConfig(vision_config=eyes, text_config=text, image_token_index=89)
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    layer, query = "layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj"
    trained, base = f"{before}.{layer}", str(tmp_path / "base")
    given, settings = _factors(trained), {"task_type": "CAUSAL_LM", "target_modules": [trained]}
    loaded = load(_adapter(tmp_path / "adapter", base, given, **settings))
    module, own = loaded.module, load(Path(base)).module
    assert module is not None
    assert own is not None
    delta = given[f"{trained}.lora_B.weight"] @ given[f"{trained}.lora_A.weight"] * _ALPHA / _RANK
    weight = f"{query}.weight"
    torch.testing.assert_close(module.get_parameter(weight), own.get_parameter(weight) + delta)
    assert loaded.task is not None
    assert loaded.task.kind == "multimodal"
    assert any("merged into 1 weights" in note for note in loaded.notes)


def test_the_output_has_the_files_of_both(base: Path, tmp_path: Path) -> None:
    path = _adapter(tmp_path / "adapter", str(base), _factors(_QUERY))
    (path / "tokenizer.json").write_text("{}")
    (path / "config.json").write_text("{}")  # as some trainers leave there: the base's is read
    assert load(path).module is not None
    assert {str(name): file.parent for name, file in kept_files(path).items()} == {
        "config.json": base,
        "tokenizer.json": path,
    }


@pytest.mark.parametrize(
    ("settings", "weights", "told"),
    [
        ({"base_model_name_or_path": "nobody/nothing"}, {}, "adapter of 'nobody/nothing', which"),
        ({"peft_type": "IA3"}, {}, "of the kind IA3"),
        ({"use_dora": True}, {}, "has A, B of .*, and its settings are for A, B, magnitude_vector"),
        ({"peft_type": "PREFIX_TUNING"}, {}, "adds to prompts and can't be merged"),
        (
            {"trainable_token_indices": [1]},
            {f"{_EMBEDDED}.token_adapter.trainable_tokens_delta": torch.ones(2, 32)},
            r"by \(2, 32\)",
        ),
        ({}, {"classifier.weight": torch.ones(2, 33)}, r"by \(2, 33\), and the base has \(2, 32\)"),
        ({"use_of_2027": 1}, {}, "LoRA with use_of_2027"),
        ({"init_lora_weights": "pissa"}, {}, "changes its base first .*'pissa'"),
        ({}, _factors("bert.pooler.sparse"), "adapts bert.pooler.sparse"),
        ({}, _factors(_QUERY, wide=31), r"by \(32, 31\), and the base has \(32, 32\)"),
        (
            {},
            {f"{_QUERY}.lora_A.weight": torch.ones(3, 32)},
            "has A of .*, and its settings are for A, B",
        ),
        ({}, {f"{_QUERY}.lora_magnitude_vector": torch.ones(32)}, "has magnitude_vector of"),
        ({"r": 4}, {}, "says the rank 4 for .*query, and its factors have 3"),
        ({"rank_pattern": {"query": 2}}, {}, "says the rank 2 for .*query, and its factors have 3"),
        ({"target_modules": ["value"]}, {}, "holds factors of .*query, which its settings leave"),
        ({"exclude_modules": ["self.query"]}, {}, "holds factors of .*query, which its settings"),
        ({"layers_to_transform": [1]}, {}, "holds factors of .*query, which its settings leave"),
        (
            {"layers_to_transform": 0, "layers_pattern": "blocks"},
            {},
            "holds factors of .*query, which its settings leave",
        ),
        (
            {},
            {**_factors(_QUERY), f"{_QUERY}.lora_embedding_A": torch.ones(3, 32)},
            "holds A of .*query under two names",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused(
    base: Path, tmp_path: Path, settings: dict[str, Any], weights: dict[str, Any], told: str
) -> None:
    path = _adapter(tmp_path / "adapter", str(base), weights or _factors(_QUERY), **settings)
    with pytest.raises(LoadError, match=told):
        load(path)
