"""A file that could run code doesn't load, and nothing of it ran."""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attngraph.errors import LoadError
from attngraph.frontend.files.load import load
from tests.load.model_files import write_pt2, write_script


class Payload:
    """Unpickling this makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


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
    write_script(model, tmp_path / "m")
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
    write_pt2(model, path)
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
    write_pt2(model, path)
    _rewrite(path, member, lambda _: _pickled(trap))
    with pytest.raises(LoadError, match=f"pickled member {member}"):
        load(path)
    assert not trap.exists()


def test_torch_itself_runs_a_pickled_sample_input(
    model: torch.nn.Module, trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: the fixture is hostile, and trusting it means it runs."""
    path = tmp_path / "m.pt2"
    write_pt2(model, path)
    _rewrite(path, "data/sample_inputs/model.pt", lambda _: _pickled(trap))
    load(path, trust_pickle=True)
    assert trap.exists()


def test_a_pt2_with_a_pickled_weight_is_refused(
    model: torch.nn.Module, trap: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.pt2"
    write_pt2(model, path)

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
    write_pt2(model, path)
    _rewrite(path, "data/aotinductor/model/a.so", lambda _: b"\x7fELF")
    with pytest.raises(LoadError, match="AOTInductor"):
        load(path, trust_pickle=True)


def test_a_name_that_python_lacks_is_refused_even_when_trusted(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "m.pt2"
    write_pt2(model, path)

    def rename(data: bytes) -> bytes:
        return data.replace(b'"ids"', b'"class"').replace(b'\\"ids\\"', b'\\"class\\"')

    _rewrite(path, "models/model.json", rename)
    with pytest.raises(LoadError, match="the name 'class'"):
        load(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that the graph can't be called any longer
        with pytest.raises(LoadError, match=r"can't be read .*\(invalid syntax"):
            load(path, trust_pickle=True)


def test_a_guard_is_pasted_as_its_tree_says_it(model: torch.nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    write_pt2(model, path)
    guard = '((L[ "ids" ] . size ( )[0]))    >=2'

    def add(program: dict[str, Any]) -> None:
        program["guards_code"] = [guard]

    _edit_program(path, add)
    program = load(path).program
    assert program is not None
    assert program._guards_code == ["L['ids'].size()[0] >= 2"]
    ids, mask = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.bool)
    program.module()(ids, mask=mask)
