"""A folder of sentence-transformers: its file has the embedding of each text as well."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import attngraph
from attngraph.checkpoints.embeddings import Pooling
from attngraph.errors import LoadError, UsageError
from attngraph.frontend.files.load import load
from tests.checkpoints.models import feed, saved

_HERE = "sentence_transformers.models"
_POOLING = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
_SIZES = {"batch": 4, "seq": 9}


def _with_stages(root: Path, name: str, *stages: tuple[str, dict[str, Any] | None]) -> Path:
    """A checkpoint and its modules.json; a Dense gets weights."""
    saved(root, name)
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{_HERE}.Transformer"}]
    for at, (kind, settings) in enumerate(stages, 1):
        path = f"{at}_{kind.rpartition('.')[2]}"
        package = "" if "." in kind else f"{_HERE}."
        entries.append({"idx": at, "name": str(at), "path": path, "type": f"{package}{kind}"})
        if settings is not None:
            (root / path).mkdir()
            (root / path / "config.json").write_text(json.dumps(settings))
        if kind == "Dense" and settings is not None:
            torch.manual_seed(at)
            width, made = int(settings["in_features"]), int(settings["out_features"])
            weights = {"linear.weight": torch.randn(made, width), "linear.bias": torch.randn(made)}
            save_file(weights, root / path / "model.safetensors")
    (root / "modules.json").write_text(json.dumps(entries))
    return root


def _results(made: Any, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs that the compile didn't see, with masks that have holes, and the file's outputs."""
    made.save(folder)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    given = feed({value.name: value.shape for value in session.get_inputs()}, _SIZES)
    found = session.run(None, {name: each.numpy() for name, each in given.items()})
    names = [value.name for value in session.get_outputs()]
    return given, {n: torch.from_numpy(each) for n, each in zip(names, found, strict=True)}


def _by_row(mode: str, tokens: Tensor, mask: Tensor) -> Tensor:
    """The definition of a pooling, one row and one token at a time."""
    rows = []
    for row, shown in zip(tokens, mask.bool(), strict=True):
        places = [at for at, is_shown in enumerate(shown) if is_shown]
        kept = row[places]
        weights = torch.tensor([1.0 + at - places[0] for at in places])
        rows.append(
            {
                "cls": kept[0],
                "lasttoken": kept[-1],
                "max": kept.amax(0),
                "mean": kept.mean(0),
                "mean_sqrt_len_tokens": kept.sum(0) / math.sqrt(len(places)),
                "weightedmean": (kept * weights[:, None]).sum(0) / weights.sum(),
            }[mode]
        )
    return torch.stack(rows)


def _unit(model: Any, given: dict[str, Tensor], mode: str) -> Tensor:
    """What a model's tokens are pooled to, of length 1."""
    with torch.no_grad():
        tokens = model(**given).last_hidden_state
    return torch.nn.functional.normalize(_by_row(mode, tokens, given["attention_mask"]), dim=-1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    "mode", ["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"]
)
def test_a_pooling_is_its_definition(mode: str, dtype: torch.dtype) -> None:
    tokens = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[1] * 6, [1] * 2 + [0] * 4, [0] * 3 + [1] * 3, [0, 1, 0, 1, 1, 0]])
    features = {"token_embeddings": tokens, "attention_mask": mask.to(dtype)}
    found = Pooling([mode])(features)["sentence_embedding"]
    torch.testing.assert_close(found, _by_row(mode, tokens, mask))


def test_half_precision_is_added_up_in_float32() -> None:
    tokens = torch.full((1, 3000, 2), 1.0, dtype=torch.bfloat16)
    mask = torch.ones(1, 3000, dtype=torch.int64)
    features = {"token_embeddings": tokens, "attention_mask": mask}
    assert torch.equal(Pooling(["mean"])(features)["sentence_embedding"], tokens[:, 0])


def test_an_encoders_file_has_the_embedding_of_each_text(tmp_path: Path) -> None:
    from transformers import BertModel

    dense = {"in_features": 32, "out_features": 6, "bias": True}
    folder = _with_stages(
        tmp_path / "in",
        "bert",
        ("Pooling", _POOLING),
        ("Dense", {**dense, "activation_function": "torch.nn.modules.activation.Tanh"}),
        ("Normalize", None),
    )
    made = attngraph.optimize_checkpoint(folder)
    given, found = _results(made, tmp_path / "out")
    assert made.task == "feature-extraction"
    assert list(found) == ["last_hidden_state", "pooler_output", "sentence_embedding"]
    model: Any = BertModel.from_pretrained(folder)
    with torch.no_grad():
        tokens = model(**given).last_hidden_state
    torch.manual_seed(2)
    weight, bias = torch.randn(6, 32), torch.randn(6)
    expected = torch.tanh(_by_row("mean", tokens, given["attention_mask"]) @ weight.T + bias)
    expected = expected / expected.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(found["last_hidden_state"], tokens, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["sentence_embedding"], expected, rtol=1e-5, atol=1e-6)
    # What sentence-transformers reads of the folder beside the ONNX file.
    for name in ("modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_a_model_may_lie_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """As older releases saved it, with a config.json around it that is none of a model."""
    from transformers import BertModel

    folder = _with_stages(tmp_path / "in", "bert", ("Pooling", _POOLING), ("Normalize", None))
    inner = folder / "0_Transformer"
    inner.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(inner / name)
    (inner / "vocab.txt").write_text("a")
    (folder / "config.json").write_text(json.dumps({"__version__": "0.2.4"}))
    entries = json.loads((folder / "modules.json").read_text())
    entries[0]["path"] = inner.name
    (folder / "modules.json").write_text(json.dumps(entries))
    given, found = _results(attngraph.optimize_checkpoint(folder), tmp_path / "out")
    expected = _unit(BertModel.from_pretrained(inner), given, "mean")
    torch.testing.assert_close(found["sentence_embedding"], expected, rtol=1e-5, atol=1e-6)
    written = {str(each.relative_to(tmp_path / "out")) for each in (tmp_path / "out").rglob("*.*")}
    assert written == {
        *("model.onnx", "config.json", "vocab.txt", "modules.json", "1_Pooling/config.json")
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "bert"
    entries[0]["path"] = ""
    assert json.loads((tmp_path / "out" / "modules.json").read_text()) == entries
    entries[0]["path"] = "../elsewhere"
    (folder / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(LoadError, match=r"names the file '\.\./elsewhere', which is not"):
        load(folder)


def test_a_decoder_with_stages_is_an_embedding_model(tmp_path: Path) -> None:
    """A LlamaForCausalLM by its config, of which the hidden states are asked for."""
    from transformers import LlamaModel

    folder = _with_stages(
        tmp_path / "in", "llama", ("Pooling", {"pooling_mode": "lasttoken"}), ("Normalize", {})
    )
    with pytest.raises(UsageError, match="or pass --task text-generation to have its decoder"):
        attngraph.optimize_checkpoint(folder, cache="static", max_length=16)
    made = attngraph.optimize_checkpoint(folder)
    assert made.report.notes[0].endswith("--task text-generation compiles what it was saved as.")
    given, found = _results(made, tmp_path / "out")
    assert made.task == "feature-extraction"
    expected = _unit(LlamaModel.from_pretrained(folder), given, "lasttoken")
    torch.testing.assert_close(found["sentence_embedding"], expected, rtol=1e-5, atol=1e-5)


def test_another_task_leaves_the_stages_out(tmp_path: Path) -> None:
    folder = _with_stages(tmp_path / "in", "bert", ("Pooling", _POOLING))
    loaded = load(folder, task="text-classification")
    assert type(loaded.module).__name__ == "BertForSequenceClassification"
    assert loaded.kwargs
    with torch.no_grad():
        assert loaded.module is not None
        assert list(loaded.module(**loaded.kwargs)) == ["logits"]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LSTM", {"hidden_dim": 8}),
        ("custom_st.Pooling", _POOLING),
        ("Pooling", {"pooling_mode": "median"}),
        ("Pooling", {"pooling_mode": []}),
        ("Dense", {"in_features": 32, "out_features": 4, "activation_function": "mine.Swish"}),
        ("Dense", {"in_features": 32, "out_features": True}),
        ("WeightedLayerPooling", {"layer_start": 1, "num_hidden_layers": 2}),
        ("Normalize", {"module_input_name": "nothing"}),
    ],
)
def test_what_is_not_known_is_told(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    folder = _with_stages(tmp_path / "in", "bert", ("Pooling", _POOLING), (kind, settings))
    loaded = load(folder)
    (note,) = [each for each in loaded.notes if "modules.json" in each]
    assert f"Pooling then {kind.rpartition('.')[2]} of" in note
    assert "its caller is to do the rest" in note
    assert type(loaded.module).__name__ == "BertForSequenceClassification"


def test_a_prompt_that_the_file_is_not_told_of_is_noted(tmp_path: Path) -> None:
    settings = {**_POOLING, "include_prompt": False}
    folder = _with_stages(tmp_path / "in", "bert", ("Pooling", settings))
    assert any("that of texts without one" in note for note in load(folder).notes)


def test_weights_that_are_missing_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    dense = {"in_features": 32, "out_features": 6, "activation_function": "torch.nn.Tanh"}
    folder = _with_stages(tmp_path / "in", "bert", ("Pooling", _POOLING), ("Dense", dense))
    settings = folder / "2_Dense" / "config.json"
    settings.write_text(json.dumps({**dense, "out_features": 7}))
    with pytest.raises(LoadError, match=r"linear.weight is \(6, 32\) in the file and \(7, 32\)"):
        load(folder)
    for name in ("torch.nn.Sharp", "torch.nn.Linear"):
        settings.write_text(json.dumps({**dense, "activation_function": name}))
        with pytest.raises(LoadError, match=f"has the activation {name}, which torch.nn lacks"):
            load(folder)
    (folder / "2_Dense" / "model.safetensors").unlink()
    settings.write_text(json.dumps(dense))
    with pytest.raises(LoadError, match=r"2_Dense.model.safetensors is missing, which modules"):
        load(folder)


@pytest.mark.parametrize("kind", ["Dense", "LayerNorm"])
def test_a_stage_of_another_width_is_refused(tmp_path: Path, kind: str) -> None:
    sizes = {"in_features": 24, "out_features": 6, "dimension": 24}
    settings = {**sizes, "activation_function": "torch.nn.Tanh"}
    folder = _with_stages(tmp_path / "in", "bert", ("Pooling", _POOLING), (kind, settings))
    if kind == "LayerNorm":
        weights = {"norm.weight": torch.ones(24), "norm.bias": torch.zeros(24)}
        save_file(weights, folder / "2_LayerNorm" / "model.safetensors")
    said = f"^A {kind} of modules.json takes sentence_embedding of 24 numbers, and what stands"
    with pytest.raises(LoadError, match=f"{said} before it makes 32: "):
        attngraph.optimize_checkpoint(folder)


@pytest.mark.parametrize("text", ["{", '{"0": 1}'])
def test_a_modules_json_that_is_no_list_is_refused(tmp_path: Path, text: str) -> None:
    folder = saved(tmp_path / "in", "bert")
    (folder / "modules.json").write_text(text)
    with pytest.raises(LoadError, match=r"modules\.json"):
        load(folder)
