"""A checkpoint becomes a folder, whole or not at all, that computes what the model does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

import attngraph
from attngraph.cli import run
from attngraph.decoding.rules import Rules
from attngraph.deployment.folder import OutputFolder
from attngraph.deployment.kept import require_folder
from attngraph.errors import LoadError, OutputError, ParityError
from attngraph.export.files import save as save_module
from attngraph.optimized import Optimized
from tests.checkpoints.models import feed, saved

_SIZES = {"batch": 3, "seq": 11}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as training leaves it."""
    path = saved(tmp_path_factory.mktemp("checkpoint") / "bert", "bert")
    for name in (
        *("tokenizer.json", "vocab.txt", "special_tokens_map.json", "LICENSE", "README.md"),
        *("optimizer.pt", "trainer_state.json", "training_args.bin", ".gitattributes"),
        "1_Pooling/config.json",
    ):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("{}")
    settings = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def compiled(bert: Path) -> attngraph.OptimizedCheckpoint:
    return attngraph.optimize_checkpoint(bert, verify="off")


def _names(path: Path) -> list[str]:
    return sorted(str(item.relative_to(path)) for item in path.rglob("*") if item.is_file())


def _assert_it_computes(path: Path, source: Path) -> None:
    from transformers import BertForSequenceClassification

    session = onnxruntime.InferenceSession(path)
    given = feed({value.name: value.shape for value in session.get_inputs()}, _SIZES)
    assert list(given) == ["input_ids", "attention_mask", "token_type_ids"]
    assert [value.name for value in session.get_outputs()] == ["logits"]
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in given.items()})
    model: Any = BertForSequenceClassification.from_pretrained(source)
    with torch.no_grad():
        expected = model(**given).logits
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-6)


def test_the_folder_holds_what_a_runtime_needs(
    bert: Path, compiled: attngraph.OptimizedCheckpoint, tmp_path: Path
) -> None:
    compiled.save(tmp_path / "out")
    assert _names(tmp_path / "out") == [
        *("1_Pooling/config.json", "LICENSE", "README.md", "config.json", "model.onnx"),
        *("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"),
    ]
    assert compiled.task == "text-classification"
    assert compiled.report.dims == {"batch": (1, None), "seq": (1, 40)}
    _assert_it_computes(tmp_path / "out" / "model.onnx", bert)
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_the_config_says_which_files_have_their_weights_beside_them(
    bert: Path,
    compiled: attngraph.OptimizedCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    plain = json.loads((bert / "config.json").read_text())
    for above, told in ((1 << 40, {}), (0, {"model.onnx": 1}), (1 << 40, {})):
        monkeypatch.setattr(save_module, "EXTERNAL_ABOVE", above)
        compiled.save(out)
        settings = {"transformers.js_config": {"use_external_data_format": told}} if told else {}
        assert json.loads((out / "config.json").read_text()) == {**plain, **settings}
        assert (out / "model.onnx_data").exists() == bool(told)


def test_a_name_that_ends_in_onnx_is_one_file(
    bert: Path, compiled: attngraph.OptimizedCheckpoint, tmp_path: Path
) -> None:
    compiled.save(tmp_path / "bert.onnx")
    assert _names(tmp_path) == ["bert.onnx"]
    _assert_it_computes(tmp_path / "bert.onnx", bert)


def test_what_was_written_before_is_replaced_and_nothing_else(
    bert: Path, compiled: attngraph.OptimizedCheckpoint, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    compiled.save(out)
    (out / "model.onnx").write_text("old")
    compiled.save(out)
    assert (out / "model.onnx").stat().st_size > 10_000
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(OutputError, match=r"holds thesis\.tex"):
        compiled.save(out)
    assert (out / "thesis.tex").read_text() == "mine"
    for place in (bert, bert / "inside", bert.parent):
        with pytest.raises(OutputError, match="one inside the other"):
            compiled.save(place)
    with pytest.raises(OutputError, match="There is no folder"):
        compiled.save(tmp_path / "none" / "out")
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_nothing_says_that_the_files_are_quantized_as_the_source_was(
    bert: Path, tmp_path: Path
) -> None:
    """A runtime that read it would look for codes, or for the package that unpacks them."""
    source = Path(shutil.copytree(bert, tmp_path / "source"))
    plain = json.loads((bert / "config.json").read_text()) | {"text_config": {"hidden_size": 32}}
    told = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    said = {**plain, **told, "text_config": {"hidden_size": 32, **told}}
    (source / "config.json").write_text(json.dumps(said))
    (source / "quantize_config.json").write_text("{}")
    with OutputFolder(tmp_path / "out", source) as place:
        place.write({}, {})
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == plain
    assert not (tmp_path / "out" / "quantize_config.json").exists()


def test_settings_stand_where_a_runtime_looks_for_them(bert: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(bert, tmp_path / "source"))
    text, own = {"hidden_size": 32, "model_type": "qwen2_vl_text"}, {"model_type": "qwen2_vl"}
    (source / "config.json").write_text(json.dumps({**own, "text_config": text}))
    with OutputFolder(tmp_path / "out", source) as place:
        place.write({}, {})
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said == {**own, "text_config": text, "hidden_size": 32}


def test_all_files_of_a_model_that_listens_may_be_replaced(tmp_path: Path) -> None:
    for name in ("audio_encoder", "join_sounds", "embed_tokens", "decoder_model_merged"):
        (tmp_path / f"{name}.onnx").write_text("")
    require_folder(tmp_path, None)
    (tmp_path / "other.onnx").write_text("")
    with pytest.raises(OutputError, match=r"holds other\.onnx, which isn't written here"):
        require_folder(tmp_path, None)


def test_a_link_to_a_folder_goes_on_leading_there(
    compiled: attngraph.OptimizedCheckpoint, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "large disk")
    for _ in range(2):
        compiled.save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert "model.onnx" in _names(tmp_path / "large disk")


@pytest.mark.parametrize("fails", ["save", "copy"])
def test_a_failure_leaves_what_was_there(
    compiled: attngraph.OptimizedCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.onnx").write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if fails == "copy":
        monkeypatch.setattr("shutil.copyfile", full)
        expected: type[Exception] = OutputError
    else:
        monkeypatch.setattr(Optimized, "save", full)
        expected = OSError
    with pytest.raises(expected):
        compiled.save(out)
    assert _names(tmp_path) == ["out/model.onnx"]
    assert (out / "model.onnx").read_text() == "old"


def test_a_full_disk_is_told_of_the_folder_that_was_asked_for(
    compiled: attngraph.OptimizedCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_module, "_write_whole", full)
    with pytest.raises(OutputError) as raised:
        compiled.save(tmp_path / "out")
    place = tmp_path / "out" / "model.onnx"
    assert str(raised.value).startswith(f"{place} can't be written: No space left on device;")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("barred", ["out", "tokenizer.json"])
def test_what_is_barred_is_told_before_any_work(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, barred: str
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != barred)
    told = {
        "out": (OutputError, "out can't be written: it is read-only; choose another path"),
        "tokenizer.json": (LoadError, "tokenizer.json can't be read: Permission denied"),
    }
    kind, message = told[barred]
    with pytest.raises(kind, match=message), OutputFolder(tmp_path / "out", bert):
        pytest.fail("work was begun")
    assert _names(tmp_path) == []


def test_the_command_writes_a_folder_and_says_so(
    bert: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ("optimize", str(bert), "-o", str(tmp_path / "out"), "--verify", "off")
    assert run([*command, "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["output"]["path"] == str(tmp_path / "out")
    assert said["output"]["bytes"] == sum(
        (tmp_path / "out" / name).stat().st_size for name in _names(tmp_path / "out")
    )
    assert "model.onnx" in _names(tmp_path / "out")
    assert run(["verify", str(bert), str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["passed"] is True


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--task", "poetry"), "--task poetry is unknown; it can be "),
        (("--max-length", "9"), "max_length is for a static cache"),
        (("--no-padding",), "is no causal language model"),
        (("--factory", "a.b:c"), "leave out --factory"),
    ],
)
def test_the_command_refuses_what_does_not_go_together(
    bert: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: tuple[str], told: str
) -> None:
    assert run(["optimize", str(bert), "-o", str(tmp_path / "out"), *flags]) == 2
    assert told in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_dims_of_what_generates_are_those_of_its_cache(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    path = saved(tmp_path / "in", name)
    flags = ["--dim", "seq=2..8"]
    assert run(["optimize", str(path), "-o", str(tmp_path / "out"), *flags]) == 2
    told = "generates text, and the dims of its files are those of its cache: leave out --dim."
    assert told in capfd.readouterr().err
    assert [item.name for item in tmp_path.iterdir()] == ["in"]


def test_nothing_is_written_where_parity_fails(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import attngraph.compiling.compilation as steps

    def fails(*_: object, **__: object) -> None:
        raise ParityError("out of budget.")

    monkeypatch.setattr(steps.Compilation, "lowered", fails)
    assert run(["optimize", str(bert), "-o", str(tmp_path / "out")]) == ParityError.exit_code
    assert not list(tmp_path.iterdir())


def test_a_causal_language_model_becomes_a_decoder(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    path = saved(tmp_path / "llama", "llama")
    said = {"eos_token_id": [2, 5], "top_k": 7, "min_new_tokens": 6}
    (path / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(LoadError, match="has no tokenizer"):
        attngraph.optimize_checkpoint(path, verify="off", runtime="genai")
    (path / "tokenizer.json").write_text("{}")
    made = attngraph.optimize_checkpoint(path, verify="off", runtime="genai")
    assert made.task == "text-generation"
    assert any("genai knows no min_new_tokens, which" in note for note in made.report.notes)
    made.save(tmp_path / "out")
    decoder = attngraph.Decoder.load(tmp_path / "out" / "model.onnx")
    ids = torch.arange(3, 13).reshape(2, 5)
    model: Any = LlamaForCausalLM.from_pretrained(path)
    expected = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert torch.equal(decoder.generate(ids, max_new_tokens=6), expected)
    names = ("config.json", "genai_config.json", "generation_config.json", "model.onnx")
    assert _names(tmp_path / "out") == [*names, "tokenizer.json"]
    said = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert said["model"]["decoder"]["filename"] == "model.onnx"
    assert said["model"]["eos_token_id"] == [2, 5]
    assert said["search"]["top_k"] == 7


def test_a_decoder_follows_the_rules_of_the_generation_config(tmp_path: Path) -> None:
    """Qwen2.5's has a repetition penalty: `generate` gave other tokens without a word."""
    from transformers import LlamaForCausalLM

    path, file = saved(tmp_path / "llama", "llama"), "generation_config.json"
    ids, rules = torch.arange(3, 13).reshape(2, 5), {"repetition_penalty": 1.7}
    (path / file).write_text(json.dumps(rules))
    model: Any = LlamaForCausalLM.from_pretrained(path)
    plain = model.generate(ids, max_new_tokens=9, do_sample=False, repetition_penalty=1.0)
    tokens = model.generate(ids, max_new_tokens=9, do_sample=False)
    assert not torch.equal(plain, tokens)
    ended = rules | {"eos_token_id": [int(tokens[0, 7]), 95], "pad_token_id": -1, "num_beams": 3}
    (path / file).write_text(json.dumps(ended))
    made = attngraph.optimize_checkpoint(path)
    assert any("sets num_beams = 3, of which `generate` takes no" in n for n in made.report.notes)
    made.save(tmp_path / "out")
    loaded = attngraph.Decoder.load(tmp_path / "out" / "model.onnx")
    as_ours = {"num_beams": 1, "pad_token_id": int(tokens[0, 7])}
    (path / file).write_text(json.dumps(ended | as_ours))
    model = LlamaForCausalLM.from_pretrained(path)
    expected = model.generate(ids, max_new_tokens=9, do_sample=False)
    for decoder in (made.result, loaded):
        assert torch.equal(decoder.generate(ids, 9), expected)
        assert torch.equal(decoder.generate(ids, 9, eos_token_id=[]), tokens)
        assert torch.equal(decoder.generate(ids, 9, rules=Rules()), plain)


@pytest.mark.slow
def test_an_encoder_decoder_becomes_its_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import BartForConditionalGeneration, GenerationConfig, GenerationMixin

    source = saved(tmp_path / "bart", "bart")
    GenerationConfig(
        decoder_start_token_id=2, eos_token_id=2, pad_token_id=1, forced_bos_token_id=7
    ).save_pretrained(source)
    page = tmp_path / "page.html"
    command = ["optimize", str(source), "-o", str(tmp_path / "out"), "--report", str(page)]
    assert run(command) == 0
    files = ("decoder_model_merged.onnx", "decoder_with_past_model.onnx", "encoder_model.onnx")
    assert _names(tmp_path / "out") == sorted((*files, "config.json", "generation_config.json"))
    told, shown = " ".join(capfd.readouterr().out.split()), page.read_text("utf-8")
    for name in files:  # each has attentions, parity and notes of its own
        assert told.count(str(tmp_path / "out" / name)) == 1
        assert f"→ {tmp_path / 'out' / name}</h1>" in shown
    assert told.count("parity passed") == shown.count('class="good">✓ Within') == len(files)
    for text in (told, shown):  # the merged file is compared with those that it is made of
        assert text.count("the other two files, which were compared with eager") == 1
        assert "float64 can't serve" not in text
    assert shown.count("<h2>Time</h2>") == 2  # what is made of the others takes none of its own
    merged = onnx.load(tmp_path / "out" / files[0]).graph.node
    places = {each.name: {p.key: p.value for p in each.metadata_props} for each in merged}
    chosen = [each for each in merged if each.op_type == "If" and "attention" in each.name]
    assert chosen
    assert all("(model.decoder" in places[each.name]["attngraph.loc"] for each in chosen)
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    model: Any = BartForConditionalGeneration.from_pretrained(source)
    expected = GenerationMixin.generate(model, ids, max_new_tokens=8, do_sample=False)
    loaded = attngraph.Seq2Seq.load(tmp_path / "out")
    assert torch.equal(loaded.generate(ids, 8), expected)
    assert run(["verify", str(source), str(tmp_path / "out")]) == 0
    _scaled(source, "model.decoder.layers.0.encoder_attn.v_proj.weight")
    capfd.readouterr()
    assert run(["verify", str(source), str(tmp_path / "out"), "--json"]) == ParityError.exit_code
    told = {Path(each["path"]).name: each for each in json.loads(capfd.readouterr().out)}
    assert [told[name]["passed"] for name in files] == [False, False, False]
    assert "what the encoder gives" in told["decoder_with_past_model.onnx"]["first_diverging"]
    assert run(["verify", str(source), str(tmp_path / "out" / files[0])]) == 2
    assert "give its folder" in capfd.readouterr().err


def _scaled(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name] = weights[name] * 1.01
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
def test_a_factory_of_an_encoder_decoder_makes_the_same_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "bart", "bart")
    kind = "transformers:BartForConditionalGeneration.from_pretrained"
    model = ("--factory", kind, "--factory-arg", str(source))
    assert run(["optimize", *model, "-o", str(tmp_path / "out")]) == 2
    assert "or add --decode" in capfd.readouterr().err
    assert run(["optimize", *model, "--decode", "-o", str(tmp_path / "out.onnx")]) == 2
    assert "give -o a folder" in " ".join(capfd.readouterr().err.split())
    assert run(["optimize", *model, "--decode", "-o", str(tmp_path / "out")]) == 0
    files = ("decoder_model_merged.onnx", "decoder_with_past_model.onnx", "encoder_model.onnx")
    assert _names(tmp_path / "out") == [*files]
    assert run(["verify", *model, str(tmp_path / "out")]) == 0


def test_activations_and_their_budget_are_for_folders_too(bert: Path) -> None:
    made = attngraph.optimize_checkpoint(bert, weights="int8", activations="int8", budget="5%")
    assert made.report.to_dict()["quantised"]["activations"] == "int8"


def test_an_encoder_decoder_is_no_single_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "bart", "bart")
    assert run(["optimize", str(source), "-o", str(tmp_path / "out.onnx")]) == 2
    assert "becomes several files: give -o a folder" in " ".join(capsys.readouterr().err.split())
