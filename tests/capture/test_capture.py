"""Capture: the graph means what the eager module does, and knows where it is from."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attngraph.errors import CaptureError
from attngraph.frontend.capture import Captured, capture, from_program
from attngraph.frontend.files.pt2 import load_program
from attngraph.frontend.files.script import script_to_program
from attngraph.frontend.watching.locations import portable_path, short_path
from attngraph.ir import DimInfo, Loc, format_graph, interpret, parse, verify
from attngraph.ir.ops import op_def
from tests.capture.formula import (
    BATCH,
    SEQ,
    Formula,
    X,
    assert_eager,
    assert_identical,
    built,
    captured,
    eager,
    ops,
    states,
)
from tests.models import CASES, KEPT, TRACED, Built

NAMES = [case.name for case in CASES]

each_case = pytest.mark.parametrize("name", NAMES)

# With the sizes of the sample they are captured in tests/parity/test_models.py as well.
each_mode = pytest.mark.parametrize(
    "dynamic", [pytest.param(False, marks=pytest.mark.slow), True], ids=["static", "dynamic"]
)


@each_mode
@each_case
def test_graph_is_valid_and_its_text_reads_back(name: str, dynamic: bool) -> None:
    graph = captured(name, dynamic).graph
    verify(graph)
    text = format_graph(graph)
    constants = graph.constants.values()
    weights = {value.name: value.data for value in constants if value.data is not None}
    assert format_graph(parse(text, weights)) == text


@each_mode
@each_case
def test_interpreter_is_eager_up_to_the_order_of_sums(name: str, dynamic: bool) -> None:
    model, result = built(name), captured(name, dynamic)
    assert_eager(result.graph, model.module, *model.args)
    for sizes in (*model.sizes, dict.fromkeys(TRACED, 1)) if dynamic else ():
        assert_eager(result.graph, model.module, *model.inputs({**TRACED, **sizes}))


@each_mode
@each_case
def test_every_node_has_a_line_a_module_and_no_side_effect(name: str, dynamic: bool) -> None:
    model, result = built(name), captured(name, dynamic)
    paths = {path for path, _ in model.module.named_modules(remove_duplicate=False)}
    for node in result.graph:
        assert node.loc.line > 0
        assert node.loc.file
        assert not os.path.isabs(node.loc.file)
        assert "torch/" not in node.loc.file
        assert node.loc.module in paths
        assert not op_def(node.op).mutates
    assert bool(result.dynamic) is dynamic


@each_case
def test_dims_have_the_users_names_and_ranges(name: str) -> None:
    model, result = built(name), captured(name, True)
    asked = {
        (position, axis): dim
        for position, axes in enumerate(model.dynamic_shapes)
        for axis, dim in axes.items()
    }
    assert result.dynamic == {place: dim.__name__ for place, dim in asked.items()}
    for dim in asked.values():
        info = result.graph.dims[dim.__name__]
        assert info == DimInfo(max(dim.min, 1), dim.max, TRACED[dim.__name__])
    assert result.input_names == model.input_names


@pytest.mark.parametrize("name", [case.name for case in (*CASES, *KEPT)])
def test_every_named_dim_and_site_is_kept(name: str) -> None:
    model, result = built(name), captured(name, True)
    shapes = [value.tensor_type.shape for value in result.graph.inputs]
    for shape, axes in zip(shapes, model.dynamic_shapes, strict=True):
        symbolic = {axis: str(dim) for axis, dim in enumerate(shape) if not isinstance(dim, int)}
        assert symbolic == {axis: dim.__name__ for axis, dim in axes.items()}
    normalisers = [
        node
        for node in result.graph
        if node.op in ("aten.softmax.int", "aten.scaled_dot_product_attention")
        and node.outputs[0].tensor_type.rank > 2  # the router of a mixture is none
    ]
    assert len(normalisers) == model.sites


def test_softmax_is_located_in_the_attention_of_the_models_own_file() -> None:
    result = captured("llama-eager", True)
    locations = [node.loc for node in result.graph if node.op == "aten.softmax.int"]
    assert [loc.module.removeprefix("model.model.") for loc in locations] == [
        "layers.0.self_attn",
        "layers.1.self_attn",
    ]
    assert {loc.file for loc in locations} == {"transformers/models/llama/modeling_llama.py"}


def test_tied_weights_are_one_shared_constant() -> None:
    model, result = built("t5-sdpa"), captured("t5-sdpa", True)
    pointers = [v.data.data_ptr() for v in result.graph.constants.values() if v.data is not None]
    assert len(pointers) == len(set(pointers))
    assert {parameter.data_ptr() for parameter in model.module.parameters()} <= set(pointers)


def test_training_flags_and_the_fast_path_are_as_before() -> None:
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module.train()
    module.norm1.eval()
    flags = [part.training for part in module.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    result = capture(module, (states(2, 3, 8),))
    assert [part.training for part in module.modules()] == flags
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    assert not [op for op in ops(result) if "dropout" in op]
    weight = result.graph.constants["linear1.weight"].data
    assert weight is not None
    assert weight.data_ptr() == module.linear1.weight.data_ptr()
    assert not weight.requires_grad


@pytest.mark.parametrize(
    "name", ["encoder-lengths", pytest.param("t5-sdpa", marks=pytest.mark.slow)]
)
def test_a_saved_program_gives_the_same_graph(name: str, tmp_path: Path) -> None:
    model = built(name)
    program = _export(model)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = load_program(tmp_path / "model.pt2", trust_pickle=False)
    result = from_program(loaded, model.args, dynamic_shapes=model.dynamic_shapes)
    verify(result.graph)
    assert result.dynamic == captured(name, True).dynamic
    assert_eager(result.graph, model.module, *model.inputs({**TRACED, **model.sizes[0]}))
    assert all(node.loc.line for node in result.graph)


def test_a_temporary_that_a_saved_program_mutates_is_a_value(tmp_path: Path) -> None:
    """Only the retrace after loading sees that the operator mutates."""
    module = Formula(lambda self, x, y: (x + 1).mul_(2).softmax(-1)).eval()
    program = torch.export.export(module, (X,), dynamic_shapes=({0: BATCH},), strict=False)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = load_program(tmp_path / "model.pt2", trust_pickle=False)
    assert "aten.mul_.Tensor" in {str(node.target) for node in loaded.graph.nodes}
    result = from_program(loaded, (X,), dynamic_shapes=({0: BATCH},))
    assert not any(op_def(node.op).mutates for node in result.graph)
    assert_eager(result.graph, module, states(5, 9))


def test_a_program_without_names_has_dims_named_after_inputs() -> None:
    result = from_program(_export(built("bert-sdpa")))
    assert set(result.dynamic.values()) == {"input_ids_0", "input_ids_1"}
    assert_identical(result.args, built("bert-sdpa").args)


def test_dims_of_a_program_are_named_by_input_and_axis() -> None:
    program = _export(built("bert-sdpa"))
    result = from_program(program, dim_names={("input_ids", 0): "batch"})
    assert result.dynamic == {
        (0, 0): "batch",
        (0, 1): "input_ids_1",
        (1, 0): "batch",
        (1, 1): "input_ids_1",
    }
    unnamed = from_program(program).graph.dims
    assert result.graph.dims["batch"] == unnamed["input_ids_0"]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch copies its own there
def test_a_decomposed_program_is_captured_too() -> None:
    model = built("vit-sdpa")
    result = from_program(_export(model).run_decompositions())
    verify(result.graph)
    assert_close_to_eager(result, model)


def test_a_script_module_is_captured_with_its_dims() -> None:
    module = Formula(lambda self, x, y: self.linear(x).softmax(-1)).eval()
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):
        script = torch.jit.trace(module, (X,))
    result = capture(script, (X,), dynamic_shapes=({0: BATCH},))
    verify(result.graph)
    assert result.dynamic == {(0, 0): "batch"}
    program = script_to_program(script, (X,), {}, ({0: BATCH},))
    assert from_program(program, (X,)).input_names == result.input_names
    assert_eager(result.graph, module, states(5, 9))


def test_root_modules_have_an_empty_path() -> None:
    result = capture(Formula(lambda self, x, y: x + 1), (X,))
    (node,) = result.graph
    assert isinstance(node.loc, Loc)
    assert node.loc.module == ""


SOURCE = """
import torch

class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.linear(x).tanh()

class Whole(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x):
        return self.part(x).sin()
"""


def test_code_without_a_file_is_in_its_module_at_no_line() -> None:
    """torch tells no lines of it, and those of the layer before it would be untrue."""
    names: dict[str, Any] = {"__name__": "made_here"}
    exec(SOURCE.replace("SIZE", str(X.shape[-1])), names)
    locs = {node.op: node.loc for node in capture(names["Whole"](), (X,)).graph}
    assert locs["aten.linear"].place.startswith("torch/nn/modules/linear.py:")
    assert locs["aten.tanh"] == Loc(module="part")
    assert str(locs["aten.tanh"]) == "unknown source (part)"
    assert locs["aten.sin"] == Loc()
    graph = capture(torch.fx.symbolic_trace(Layers()), (torch.ones(2, 4),)).graph
    assert {node.op: node.loc for node in graph}["aten.sin"] == Loc()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.layer(x))


def _export(model: Built) -> torch.export.ExportedProgram:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        program = torch.export.export(
            model.module, model.args, dynamic_shapes=model.dynamic_shapes, strict=False
        )
    torch.backends.mha.set_fastpath_enabled(fast_path)
    return program


def assert_close_to_eager(result: Captured, model: Built) -> None:
    """Decomposed operators round otherwise, each output element by a few units of its norm."""
    for actual, expected in zip(
        interpret(result.graph, model.args), eager(model.module, *model.args), strict=True
    ):
        error = (actual - expected).norm() / expected.norm()
        assert error < 16 * torch.finfo(actual.dtype).eps


def test_locations_follow_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "models" / "mine.py")
    assert short_path(file) == file
    monkeypatch.chdir(tmp_path)
    assert short_path(file) == "models/mine.py"
    monkeypatch.chdir(tmp_path.parent)
    assert short_path(file) == f"{tmp_path.name}/models/mine.py"


class OtherName(torch.nn.Module):
    """torch keeps the lines of functions that are called forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).softmax(-1)

    forward = project


def test_another_modules_line_is_not_where_a_node_is() -> None:
    graph = capture(OtherName(), (torch.randn(2, 4),)).graph
    assert [(node.op, node.loc.file, node.loc.module) for node in graph] == [
        ("aten.linear", "torch/nn/modules/linear.py", "inner"),
        ("aten.softmax.int", "", ""),
    ]


class Moving(torch.nn.Module):
    """Moves a part of itself to its input's device as it runs, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = self.expert.to(x.device)(x)
        return moved


def test_a_module_that_moves_its_parts_is_traced() -> None:
    shapes = ({0: torch.export.Dim("rows", min=2)},)
    captured = capture(Moving(), (torch.zeros(3, 4),), dynamic_shapes=shapes)
    assert [node.op for node in captured.graph] == ["aten.linear"]
    assert captured.dynamic == {(0, 0): "rows"}


@functools.lru_cache
def _remembered(size: int) -> Tensor:
    return torch.full((size, size), -1.0).triu(1)


class Remembering(nn.Module):
    """Keeps tables by size, in a function's cache and in a dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.tables: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        size, key = x.shape[1], str(x.device)
        if key not in self.tables:
            self.tables[key] = self.weight[:, torch.arange(size)]
        return x @ (self.tables[key] + _remembered(size))


def test_a_table_that_a_trace_made_is_forgotten() -> None:
    module, x = Remembering().eval(), torch.randn(2, 4, 4)
    result = capture(module, (x,), dynamic_shapes=({0: BATCH},))
    assert not module.tables
    assert_eager(result.graph, module, x)


def test_a_function_with_a_cache_takes_an_open_size() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + _remembered(x.shape[1])

    result = capture(Masked(), (torch.randn(4, 4),), dynamic_shapes=({0: SEQ, 1: SEQ},))
    assert_eager(result.graph, Masked(), torch.randn(6, 6))


def test_a_file_elsewhere_is_named_as_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "package" / "model.py"
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    assert portable_path(str(model)) == str(Path("package", "model.py"))
    assert portable_path(str(tmp_path.parent / "other.py")) == "other.py"
    monkeypatch.chdir(tmp_path / "..")
    assert portable_path(str(model)) == str(Path(tmp_path.name, "package", "model.py"))


def test_a_wrapper_of_ours_is_no_part_of_a_modules_name() -> None:
    from attngraph.decoding.compile import of_causal_lm
    from attngraph.frontend.model import Model, trace
    from tests.runtimes.families import decoder

    module = decoder("Llama")
    graph = trace(of_causal_lm(Model(module, None, (), {}, None, "llama"))).graph
    named = {node.loc.module for node in graph if node.loc.module}
    assert named <= dict(module.named_modules()).keys()


def test_what_torch_refuses_of_its_own_trace_is_the_models_failure() -> None:
    """A mask of bytes passes the trace, and fails where in-place writes become values."""

    class Bytes(nn.Module):
        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            scores = x @ x.mT
            scores.masked_fill_(hidden[:, None].byte(), -1e9)
            return scores.softmax(-1) @ x

    with pytest.raises(CaptureError, match=r"itself fails on its sample inputs at .*boolean masks"):
        capture(Bytes(), (torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)))
