"""Every kind of model file is told by its content and loads; what is no model is one sentence."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from attngraph.errors import LoadError
from attngraph.frontend.files.load import load
from attngraph.frontend.files.script import script_to_program
from attngraph.frontend.files.sniff import ModelKind, sniff
from attngraph.frontend.interface.binding import forward_signature
from tests.load.model_files import FACTORY, IDS, WRITERS, run, trace, write_pt2, write_script


@pytest.mark.parametrize("extension", [".pt", ".pt2", ".safetensors", ""])
@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_is_told_by_content_and_computes_what_the_model_does(
    kind: ModelKind, extension: str, model: torch.nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / f"model{extension}"
    WRITERS[kind](model, path)
    assert sniff(path) is kind
    brings_model = kind in (ModelKind.EXPORTED_PROGRAM, ModelKind.TORCHSCRIPT)
    loaded = load(
        path,
        factory=None if brings_model else FACTORY,
        trust_pickle=kind is ModelKind.TORCHSCRIPT,
    )
    assert torch.equal(run(loaded, IDS), model(IDS))


def test_a_pt2_brings_its_sample_inputs_and_its_dynamic_dims(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    write_pt2(model, tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert loaded.args is not None
    assert torch.equal(loaded.args[0], IDS)
    assert list(loaded.kwargs) == ["mask"]
    longer = torch.arange(20).reshape(4, 5) % 7
    assert torch.equal(run(loaded, longer), model(longer))


def test_a_pt2_with_several_dim_expressions_is_clean(tmp_path: Path) -> None:
    class Shapes(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            tail = x[:, 1:]
            both = torch.cat([x, y], dim=1)
            rows = both.reshape(x.shape[0] * both.shape[1], -1)
            return {"tail": tail * x.shape[0] ** 0.5, "rows": rows.repeat(2, 1)}

    seq, other = torch.export.Dim("seq", min=4, max=64), torch.export.Dim("other", min=2, max=32)
    args = (torch.randn(3, 8, 4), torch.randn(3, 5, 4))
    batch = torch.export.Dim("batch", min=2)
    shapes = {"x": {0: batch, 1: seq}, "y": {0: batch, 1: other}}
    program = torch.export.export(Shapes(), args, dynamic_shapes=shapes)
    with (tmp_path / "m").open("wb") as file:
        torch.export.save(program, file)
    loaded = load(tmp_path / "m")
    assert loaded.program is not None
    expected = Shapes()(*args)
    actual = loaded.program.module()(*args)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_pickled_module_loads_when_trusted(model: torch.nn.Module, tmp_path: Path) -> None:
    torch.save(model, tmp_path / "m.pt")
    with pytest.raises(LoadError, match=r"load_fixture.Tied.*--trust-pickle"):
        load(tmp_path / "m.pt")
    loaded = load(tmp_path / "m.pt", trust_pickle=True)
    assert torch.equal(run(loaded, IDS), model(IDS))


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_cut_short_is_one_sentence(
    kind: ModelKind, model: torch.nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "m"
    WRITERS[kind](model, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(LoadError) as caught:
        load(path, factory=FACTORY)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_empty_directory_and_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not a model at all")
    (tmp_path / "pointer").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "pickle").write_bytes(pickle.dumps([1]))
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("hello.txt", "hello")
    for name, reason in {
        "none": "does not exist",
        "empty": "is empty",
        "pointer": "git lfs pull",
        "text": "not a model file",
        "pickle": "not a model file",
        "zip": "not a model file",
    }.items():
        with pytest.raises(LoadError, match=reason):
            load(tmp_path / name)


def test_a_saved_object_that_is_no_model_is_named(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "m")
    with pytest.raises(LoadError, match="holds a list that is neither a module nor a state dict"):
        load(tmp_path / "m", factory=FACTORY)


def test_a_trace_converts_with_its_dims_dynamic(model: torch.nn.Module, tmp_path: Path) -> None:
    write_script(model, tmp_path / "m")
    script = load(tmp_path / "m", trust_pickle=True).module
    assert isinstance(script, torch.jit.ScriptModule)
    assert list(forward_signature(script).parameters) == ["ids"]
    shapes = {"ids": {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("seq", min=2)}}
    program = script_to_program(script, (IDS,), dynamic_shapes=shapes)
    assert list(forward_signature(program.module()).parameters) == ["ids"]
    longer = torch.arange(20).reshape(4, 5) % 7
    assert torch.equal(program.module()(longer), model(longer))
    assert len(program.range_constraints) == 2


def test_a_trace_with_the_fast_path_baked_in_is_refused(tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    trace(layer, torch.randn(2, 3, 8)).save(str(tmp_path / "m"))
    with pytest.raises(LoadError, match=r"re-trace with torch.backends.mha.set_fastpath_enabled"):
        load(tmp_path / "m", trust_pickle=True)


def test_files_are_independent_of_their_name(model: torch.nn.Module, tmp_path: Path) -> None:
    WRITERS[ModelKind.TORCH_SAVE](model, tmp_path / "weights.safetensors")
    shutil.copy(tmp_path / "weights.safetensors", tmp_path / "weights.onnx")
    assert sniff(tmp_path / "weights.onnx") is ModelKind.TORCH_SAVE
