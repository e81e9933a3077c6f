"""What config.json and its like say of a checkpoint is held against its files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from attngraph.checkpoints.folder import require_tokenizer
from attngraph.errors import LoadError
from attngraph.frontend.files.load import load
from tests.checkpoints.models import rewritten


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("eos_token_id", [2, "x"], "an id, or a list of ids"),
        ("decoder_start_token_id", "0", "an id, or a list of ids"),
        ("temperature", "hot", "a number"),
        ("top_k", 2.5, "a whole number"),
        ("repetition_penalty", 0, "a number above 0"),
    ],
)
def test_settings_of_generation_are_what_their_names_say(
    folders: Path, tmp_path: Path, name: str, value: Any, what: str
) -> None:
    path = Path(shutil.copytree(folders / "llama", tmp_path / "llama"))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, name: value}))
    with pytest.raises(LoadError, match=rf"says {name} = .*which is not {what}: mend it"):
        load(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "top_p": 1}))
    assert load(path).module is not None


def test_a_tokenizer_is_looked_for_in_an_adapters_base_too(bert: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(bert)}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(LoadError, match="has no tokenizer"):
        require_tokenizer(adapter, "genai")
    (bert / "tokenizer.json").write_text("{}")
    require_tokenizer(adapter, "genai")


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        (
            "bert",
            {"num_attention_heads": 0},
            r"modulo by zero \(config.json says num_attention_heads",
        ),
        ("bert", {"hidden_size": -1}, r"dimension -1.* \(config.json says hidden_size = -1\)"),
        ("llama", {"num_attention_heads": 0}, r"zero \(config.json says num_attention_heads = 0\)"),
        ("llama", {"num_key_value_heads": 0}, r"zero \(config.json says num_key_value_heads = 0"),
    ],
)
def test_a_size_that_nothing_has_is_named(
    folders: Path, tmp_path: Path, family: str, changes: dict[str, Any], told: str
) -> None:
    path = Path(shutil.copytree(folders / family, tmp_path / family))
    rewritten(path, **changes)
    with pytest.raises(LoadError, match=told):
        load(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": 10**9}, "says num_hidden_layers = 1000000000, which weights of"),
        ({"num_hidden_layers": -3}, "says num_hidden_layers = -3"),
        ({"num_labels": 10**9}, "says num_labels = 1000000000"),
        ({"text_config": {"n_layer": 10**9}}, "says n_layer = 1000000000"),
        ({"num_hidden_layers": 600}, r"far more weights than the [\d,]+ bytes"),
        ({"hidden_size": 2**20}, r"far more weights than .* \(90, 1048576\)"),
        ({"intermediate_size": 2**50}, "far more weights than"),
    ],
)
def test_a_config_of_another_size_is_refused_before_it_is_built(
    bert: Path, changes: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers makes memory for weights of a wrong shape: here none is asked for."""
    rewritten(bert, id2label=None, label2id=None, **changes)
    empty_like = torch.empty_like

    def small(tensor: torch.Tensor, **how: Any) -> torch.Tensor:
        assert tensor.numel() < 1 << 20
        return empty_like(tensor, **how)

    monkeypatch.setattr(torch, "empty_like", small)
    with pytest.raises(LoadError, match=told):
        load(bert)


def test_a_config_with_a_layer_more_says_which_weights_are_missing(bert: Path) -> None:
    """A near miss: it could be held, so what is wrong is told by name."""
    rewritten(bert, num_hidden_layers=2)
    with pytest.raises(LoadError, match=r"in no file \(bert\.encoder\.layer\.1\."):
        load(bert)


@pytest.mark.parametrize(("prefix", "of"), [("TF", "TensorFlow"), ("Flax", "Flax")])
def test_a_class_of_another_framework_has_one_in_pytorch(bert: Path, prefix: str, of: str) -> None:
    name = load(bert).module.__class__.__name__
    rewritten(bert, architectures=[f"{prefix}{name}"])
    with pytest.raises(LoadError, match=f"which is a class of {of}: write {name} there"):
        load(bert)
    rewritten(bert, architectures=[f"{prefix}Other"])
    with pytest.raises(LoadError, match="a class of its author's own"):
        load(bert)
