"""Every kind of model file loads; a file that could run code doesn't, and nothing of it ran."""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import shutil
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from attngraph.errors import LoadError, UsageError
from attngraph.frontend.binding import forward_signature
from attngraph.frontend.factory import importable_cwd
from attngraph.frontend.load import Loaded, load
from attngraph.frontend.script import script_to_program
from attngraph.frontend.sniff import ModelKind, sniff

FACTORY = "load_fixture:tied"
SOURCE = '''
import torch
class Tied(torch.nn.Module):
    """An embedding whose weight is the output projection's."""
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, ids, mask=None):
        hidden = self.norm(self.embed(ids))
        return self.head(hidden if mask is None else hidden.masked_fill(mask[..., None], 0.0))
IDS = torch.arange(6).reshape(2, 3)
def tied(): return Tied()
def on_meta():
    with torch.device("meta"): return Tied()
def with_args(): return Tied(), (IDS,)
def with_kwargs(): return Tied(), {"ids": IDS}
def with_shapes(): return Tied(), (IDS,), {"ids": None}
def broken(): raise ValueError("no such size")
def wrong(): return "a module"
'''


@pytest.fixture(autouse=True)
def fixture_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`load_fixture`, importable from the working directory only."""
    (tmp_path / "load_fixture.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    with importable_cwd():
        module = importlib.import_module("load_fixture")
    monkeypatch.setitem(sys.modules, "load_fixture", module)
    return module


@pytest.fixture
def model(fixture_module: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    module: torch.nn.Module = fixture_module.Tied().eval()
    return module


IDS = torch.arange(6).reshape(2, 3)
Writer = Callable[[torch.nn.Module, Path], None]


def _write_pt2(module: torch.nn.Module, path: Path) -> None:
    batch, seq = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("seq", min=2)
    shapes = {"ids": {0: batch, 1: seq}, "mask": {0: batch, 1: seq}}
    program = torch.export.export(
        module, (IDS,), {"mask": torch.zeros(2, 3, dtype=torch.bool)}, dynamic_shapes=shapes
    )
    with path.open("wb") as file:
        torch.export.save(program, file)


def _trace(module: torch.nn.Module, *args: torch.Tensor) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(module, args)


def _write_script(module: torch.nn.Module, path: Path) -> None:
    _trace(module, IDS).save(str(path))


def _write_safetensors(module: torch.nn.Module, path: Path) -> None:
    weights = module.state_dict()
    del weights["head.weight"]  # safetensors drops the second name of a tied weight
    save_file(weights, path)


WRITERS: dict[ModelKind, Writer] = {
    ModelKind.EXPORTED_PROGRAM: _write_pt2,
    ModelKind.TORCHSCRIPT: _write_script,
    ModelKind.TORCH_SAVE: lambda module, path: torch.save(module.state_dict(), path),
    ModelKind.LEGACY_PICKLE: lambda module, path: torch.save(
        module.state_dict(), path, _use_new_zipfile_serialization=False
    ),
    ModelKind.SAFETENSORS: _write_safetensors,
}


def _run(loaded: Loaded, ids: torch.Tensor) -> torch.Tensor:
    if loaded.program is not None:
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        result: torch.Tensor = loaded.program.module()(ids, mask=mask)
        return result
    assert loaded.module is not None
    output: torch.Tensor = loaded.module(ids)
    return output


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
    assert torch.equal(_run(loaded, IDS), model(IDS))


def test_a_pt2_brings_its_sample_inputs_and_its_dynamic_dims(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    _write_pt2(model, tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert loaded.args is not None
    assert torch.equal(loaded.args[0], IDS)
    assert list(loaded.kwargs) == ["mask"]
    longer = torch.arange(20).reshape(4, 5) % 7
    assert torch.equal(_run(loaded, longer), model(longer))


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
    assert torch.equal(_run(loaded, IDS), model(IDS))


# Hostile files


class Payload:
    """Unpickling this makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    return tmp_path / "code-ran"


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_pickle_is_refused_and_nothing_ran(
    zipped: bool, trap: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": Payload(trap)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(LoadError, match=r"imports (posix|nt)\.mkdir"):
        load(path)
    assert not trap.exists()
    torch.load(path, weights_only=False)
    assert trap.exists()  # the control: the trap does spring


def test_script_is_refused_until_trusted(model: torch.nn.Module, tmp_path: Path) -> None:
    _write_script(model, tmp_path / "m")
    with pytest.raises(LoadError, match=r"is TorchScript.*--trust-pickle"):
        load(tmp_path / "m")


def _rewrite(path: Path, member: str, change: Callable[[bytes], bytes]) -> None:
    """Replace, or add, one member of a zip."""
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].partition("/")[0]
        content = {name: archive.read(name) for name in archive.namelist()}
    full = f"{root}/{member}"
    content[full] = change(content.get(full, b""))
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def _edit_program(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    def change(data: bytes) -> bytes:
        program = json.loads(data)
        edit(program)
        return json.dumps(program).encode()

    _rewrite(path, "models/model.json", change)


def _graph(program: dict[str, Any]) -> dict[str, Any]:
    graph: dict[str, Any] = program["graph_module"]["graph"]
    return graph


def _set_size(text: str) -> Callable[[dict[str, Any]], None]:
    def edit(program: dict[str, Any]) -> None:
        _graph(program)["tensor_values"]["ids"]["sizes"][0]["as_expr"]["expr_str"] = text

    return edit


def _set_target(text: str) -> Callable[[dict[str, Any]], None]:
    def edit(program: dict[str, Any]) -> None:
        _graph(program)["nodes"][-1]["target"] = text

    return edit


def _set_name(program: dict[str, Any]) -> None:
    _graph(program)["inputs"][-1]["as_tensor"]["name"] = "x=__import__('os').mkdir('code-ran')"


def _set_forward_name(program: dict[str, Any]) -> None:
    entry = program["graph_module"]["module_call_graph"][0]
    entry["signature"]["forward_arg_names"] = ["a=__import__('os').mkdir('code-ran')", "b"]


def _set_treespec(program: dict[str, Any]) -> None:
    spec = [1, {"type": "collections.defaultdict", "context": "{}", "children_spec": []}]
    program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps(spec)


def _add_guard(program: dict[str, Any]) -> None:
    program["guards_code"] = ["__import__('os').mkdir('code-ran') or L['ids'].size()[0] >= 2"]


EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "size": (_set_size("__import__('os').mkdir('code-ran')"), "size expression"),
    "size in a string": (
        _set_size('Mul(Integer(4), \'__import__("os").mkdir("code-ran")\')'),
        "size expression",
    ),
    "size after a newline": (_set_size("s27 #\n+exec('1')"), "size expression"),
    "operator": (_set_target("torch.os.mkdir"), r"operator 'torch\.os\.mkdir'"),
    "hub": (_set_target("torch.hub.load"), r"operator 'torch\.hub\.load'"),
    "file operator": (_set_target("torch.ops.aten.from_file.default"), "operator"),
    "script operator": (_set_target("torch.ops.aten.save.default"), "operator"),
    "other library": (_set_target("torch.ops.fbgemm.anything.default"), "operator"),
    "attrgetter": (_set_target("_operator.attrgetter"), "operator"),
    "name": (_set_name, "the name"),
    "parameter": (_set_forward_name, "the name"),
    "container": (_set_treespec, "container type"),
    "guard": (_add_guard, "the guard"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_pt2_whose_graph_could_run_code_is_refused_and_nothing_ran(
    edit: str, model: torch.nn.Module, trap: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.pt2"
    _write_pt2(model, path)
    change, reason = EDITS[edit]
    _edit_program(path, change)
    with pytest.raises(LoadError, match=f"{reason}.*--trust-pickle"):
        load(path)
    assert not trap.exists()


def _pickled(trap: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(((Payload(trap),), {}), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "member", ["data/sample_inputs/model.pt", "data/weights/model.pt", "data/constants/model.pt"]
)
def test_a_pt2_with_a_pickled_member_is_refused_and_nothing_ran(
    member: str, model: torch.nn.Module, trap: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.pt2"
    _write_pt2(model, path)
    _rewrite(path, member, lambda _: _pickled(trap))
    with pytest.raises(LoadError, match=f"pickled member {member}"):
        load(path)
    assert not trap.exists()


def test_torch_itself_runs_a_pickled_sample_input(
    model: torch.nn.Module, trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: the fixture is hostile, and trusting it means it runs."""
    path = tmp_path / "m.pt2"
    _write_pt2(model, path)
    _rewrite(path, "data/sample_inputs/model.pt", lambda _: _pickled(trap))
    load(path, trust_pickle=True)
    assert trap.exists()


def test_a_pt2_with_a_pickled_weight_is_refused(
    model: torch.nn.Module, trap: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.pt2"
    _write_pt2(model, path)

    def mark(data: bytes) -> bytes:
        config = json.loads(data)
        config["config"]["norm.weight"]["use_pickle"] = True
        return json.dumps(config).encode()

    _rewrite(path, "data/weights/model_weights_config.json", mark)
    _rewrite(path, "data/weights/weight_1", lambda _: _pickled(trap))
    with pytest.raises(LoadError, match=r"pickled payload weight_1 of 'norm\.weight'"):
        load(path)
    assert not trap.exists()


def test_compiled_code_is_refused_even_when_trusted(model: torch.nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    _write_pt2(model, path)
    _rewrite(path, "data/aotinductor/model/a.so", lambda _: b"\x7fELF")
    with pytest.raises(LoadError, match="AOTInductor"):
        load(path, trust_pickle=True)


# Damaged and wrong files


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
        ".": "is a directory",
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


# Weights and factories


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_a_checkpoint_may_nest_its_state_dict(
    key: str, model: torch.nn.Module, tmp_path: Path
) -> None:
    torch.save({"epoch": 3, key: model.state_dict()}, tmp_path / "m")
    assert torch.equal(_run(load(tmp_path / "m", factory=FACTORY), IDS), model(IDS))


@pytest.mark.parametrize("factory", ["load_fixture:tied", "load_fixture:on_meta"])
def test_a_tied_weight_stays_one_parameter(
    factory: str, model: torch.nn.Module, tmp_path: Path
) -> None:
    _write_safetensors(model, tmp_path / "m")
    loaded = load(tmp_path / "m", factory=factory).module
    assert loaded is not None
    assert loaded.get_parameter("head.weight") is loaded.get_parameter("embed.weight")
    assert torch.equal(loaded(IDS), model(IDS))


def test_weights_are_cast_to_the_modules_dtype(model: torch.nn.Module, tmp_path: Path) -> None:
    torch.save({k: v.half() for k, v in model.state_dict().items()}, tmp_path / "m")
    loaded = load(tmp_path / "m", factory=FACTORY).module
    assert loaded is not None
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_tied_weights_that_differ_in_the_file_are_refused(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    weights = dict(model.state_dict())
    weights["head.weight"] = weights["head.weight"] + 1
    torch.save(weights, tmp_path / "m")
    with pytest.raises(LoadError, match=r"embed\.weight and head\.weight are one tied parameter"):
        load(tmp_path / "m", factory=FACTORY)


def test_weights_that_do_not_fit_name_the_first_keys(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    weights = dict(model.state_dict())
    renamed = {k.replace("norm", "ln"): v for k, v in weights.items()}
    torch.save(renamed, tmp_path / "renamed")
    torch.save({**weights, "norm.bias": torch.zeros(5)}, tmp_path / "shape")
    keys = r"2 missing \(norm.weight, norm.bias\) and 2 unexpected \(ln.weight, ln.bias\)"
    with pytest.raises(LoadError, match=keys):
        load(tmp_path / "renamed", factory=FACTORY)
    with pytest.raises(LoadError, match=r"norm.bias is \(5,\) in the file and \(4,\)"):
        load(tmp_path / "shape", factory=FACTORY)


def test_weights_without_a_factory_ask_for_one(model: torch.nn.Module, tmp_path: Path) -> None:
    _write_safetensors(model, tmp_path / "m")
    with pytest.raises(LoadError, match="pass --factory"):
        load(tmp_path / "m")


def test_a_factory_is_enough_and_its_sample_inputs_come_along() -> None:
    alone = load(None, factory="load_fixture:tied")
    assert (alone.args, alone.kwargs, alone.dynamic_shapes) == (None, {}, None)
    assert alone.module is not None
    assert not alone.module.training
    args = load(None, factory="load_fixture:with_args").args
    assert args is not None
    assert torch.equal(args[0], IDS)
    assert list(load(None, factory="load_fixture:with_kwargs").kwargs) == ["ids"]
    assert load(None, factory="load_fixture:with_shapes").dynamic_shapes == {"ids": None}


@pytest.mark.parametrize(
    ("factory", "error", "reason"),
    [
        ("load_fixture", UsageError, "not of the form pkg.mod:fn"),
        ("no_such_module:fn", UsageError, "no module 'no_such_module'"),
        ("load_fixture:nothing", UsageError, "no function 'nothing'; it has broken, on_meta"),
        ("load_fixture:broken", LoadError, "failed: ValueError: no such size"),
        ("load_fixture:wrong", LoadError, "returned a str; return a module"),
        ("load_fixture:on_meta", LoadError, "no values for embed.weight"),
    ],
)
def test_a_factory_that_fails_says_why(factory: str, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        load(None, factory=factory)


def test_a_factory_does_not_go_with_a_file_that_brings_its_model(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    _write_pt2(model, tmp_path / "m")
    with pytest.raises(UsageError, match="leave out --factory"):
        load(tmp_path / "m", factory=FACTORY)
    with pytest.raises(UsageError, match="give a model file, or --factory"):
        load(None)


# TorchScript


def test_a_trace_converts_with_its_dims_dynamic(model: torch.nn.Module, tmp_path: Path) -> None:
    _write_script(model, tmp_path / "m")
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
    _trace(layer, torch.randn(2, 3, 8)).save(str(tmp_path / "m"))
    with pytest.raises(LoadError, match=r"re-trace with torch.backends.mha.set_fastpath_enabled"):
        load(tmp_path / "m", trust_pickle=True)


def test_files_are_independent_of_their_name(model: torch.nn.Module, tmp_path: Path) -> None:
    WRITERS[ModelKind.TORCH_SAVE](model, tmp_path / "weights.safetensors")
    shutil.copy(tmp_path / "weights.safetensors", tmp_path / "weights.onnx")
    assert sniff(tmp_path / "weights.onnx") is ModelKind.TORCH_SAVE
