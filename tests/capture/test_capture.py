"""Capture: the graph means what the eager module does, bit for bit, and knows where it is from."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.capture import Captured, capture, from_program
from attngraph.frontend.locations import short_path
from attngraph.frontend.script import script_to_program
from attngraph.ir import DimInfo, Loc, ScalarType, format_graph, interpret, parse, verify
from attngraph.ir.ops import op_def
from tests.models import CASES, TRACED, Built

BATCH, SEQ = Dim("batch"), Dim("seq")
BOTH = {0: BATCH, 1: SEQ}
NAMES = [case.name for case in CASES]

each_case = pytest.mark.parametrize("name", NAMES)
each_mode = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


@functools.cache
def built(name: str) -> Built:
    return next(case for case in CASES if case.name == name).build()


@functools.cache
def captured(name: str, dynamic: bool) -> Captured:
    model = built(name)
    return capture(
        model.module, model.args, dynamic_shapes=model.dynamic_shapes if dynamic else None
    )


def eager(module: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        leaves = pytree.tree_leaves(module(*args, **kwargs))
    torch.backends.mha.set_fastpath_enabled(fast_path)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def assert_identical(actual: Any, expected: Any) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


class Formula(nn.Module):
    """A module whose forward is a function of itself and up to two inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(9, 9)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("steps", torch.ones(1))

    def forward(self, x: Tensor, y: Any = None) -> Any:
        return self.function(self, x, y)


def states(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


X = states(3, 9)


def check(
    function: Callable[..., Any], *args: Any, dims: Any = None, further: Any = None
) -> Captured:
    """Captures a formula, verifies its graph, and compares it with eager, at `further` too."""
    module = Formula(function).eval()
    result = capture(module, args, dynamic_shapes=dims)
    verify(result.graph)
    text = format_graph(result.graph)
    assert format_graph(parse(text)) == text
    for inputs in [args] if further is None else [args, further]:
        tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        outputs = interpret(result.graph, [tensor.clone() for tensor in tensors])
        assert_identical(outputs, eager(module, *inputs))
    return result


def ops(result: Captured) -> list[str]:
    return [node.op for node in result.graph]


# the suite's models


@each_mode
@each_case
def test_graph_is_valid_and_its_text_reads_back(name: str, dynamic: bool) -> None:
    graph = captured(name, dynamic).graph
    verify(graph)
    text = format_graph(graph)
    weights = {value.name: value.data for value in graph.constants.values()}
    assert format_graph(parse(text, weights)) == text  # type: ignore[arg-type]


@each_mode
@each_case
def test_interpreter_is_eager_bit_for_bit(name: str, dynamic: bool) -> None:
    model, result = built(name), captured(name, dynamic)
    assert_identical(interpret(result.graph, result.args), eager(model.module, *model.args))
    for sizes in model.sizes if dynamic else ():
        args = model.inputs({**TRACED, **sizes})
        assert_identical(interpret(result.graph, args), eager(model.module, *args))


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
    assert not captured(name, False).dynamic


def test_softmax_is_located_in_the_attention_of_the_models_own_file() -> None:
    result = captured("llama-eager", False)
    locations = [node.loc for node in result.graph if node.op == "aten.softmax.int"]
    assert [loc.module.removeprefix("model.model.") for loc in locations] == [
        "layers.0.self_attn",
        "layers.1.self_attn",
    ]
    assert {loc.file for loc in locations} == {"transformers/models/llama/modeling_llama.py"}


def test_tied_weights_are_one_shared_constant() -> None:
    model, result = built("t5-sdpa"), captured("t5-sdpa", False)
    pointers = [v.data.data_ptr() for v in result.graph.constants.values() if v.data is not None]
    assert len(pointers) == len(set(pointers))
    assert {parameter.data_ptr() for parameter in model.module.parameters()} <= set(pointers)


# module state


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


# what is left out, and what is inlined


def test_an_in_place_op_on_a_temporary_needs_no_retrace(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Any:
        mask = torch.zeros_like(x)
        earlier = mask + 1
        mask.masked_fill_(x > 0, 1.0)
        mask += x
        return mask * 2, earlier

    monkeypatch.delattr(torch.export.ExportedProgram, "run_decompositions")
    check(forward, X, dims=({0: BATCH},), further=(states(4, 9),))


def _through_a_view(self: Formula, x: Tensor, y: None) -> Any:
    mask = torch.zeros_like(x)
    mask[:, 0] = 1
    return mask


def _under_a_view(self: Formula, x: Tensor, y: None) -> Any:
    mask = torch.zeros_like(x)
    view = mask.t()
    mask.add_(x)
    return view


def _under_an_alias(self: Formula, x: Tensor, y: None) -> Any:
    mask = torch.zeros_like(x)
    alias = mask.detach()
    alias.add_(x)
    return mask


def _other_dtype(self: Formula, x: Tensor, y: None) -> Any:
    return torch.zeros_like(x).gt_(-1)


@pytest.mark.parametrize("forward", [_through_a_view, _under_a_view, _under_an_alias, _other_dtype])
def test_other_mutation_is_functionalized_too(forward: Callable[..., Any]) -> None:
    result = check(forward, X, dims=({0: BATCH},), further=(states(4, 9),))
    assert not any(op_def(op).mutates for op in ops(result))


def test_a_buffer_that_is_updated_is_read_and_noted() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Tensor:
        self.steps.add_(1)
        return x + self.steps

    result = capture(Formula(forward), (X,))
    assert "updates steps" in result.notes[0]
    assert result.output_names == ("output_0",)
    assert_identical(interpret(result.graph, (X,)), [X + 2])


def test_grad_and_disabled_autocast_blocks_are_inlined() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = self.linear(x)
        with torch.enable_grad():
            return torch.sin(y) + torch.tensor([1.0] * 9)

    result = check(forward, X, dims=({0: BATCH},), further=(states(4, 9),))
    assert ops(result) == ["aten.linear", "aten.sin", "aten.add.Tensor"]


def test_enabled_autocast_becomes_casts() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x)

    result = check(forward, X, dims=({0: BATCH},), further=(states(4, 9),))
    assert ops(result).count("aten._to_copy") == 3


def test_a_mask_function_under_vmap_becomes_plain_operators() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Tensor:
        def allowed(query: Tensor, key: Tensor) -> Tensor:
            return (query - key < 3) & (key <= query)

        position = torch.arange(9)
        over_keys = torch.vmap(allowed, in_dims=(None, 0))
        mask = torch.vmap(over_keys, in_dims=(0, None))(position, position)
        return x @ mask.to(x.dtype)

    result = check(forward, X, dims=({0: BATCH},), further=(states(4, 9),))
    assert all(op.startswith("aten.") for op in ops(result))


def test_no_ops_vanish_and_casts_and_reshapes_have_one_form() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Tensor:
        x = nn.functional.dropout(x.detach().float().contiguous(), 0.5, False)
        return x.view(-1).double().to(torch.float32).reshape(x.shape).t().contiguous()

    result = check(forward, X, dims=(BOTH,), further=(states(5, 4),))
    assert ops(result) == [
        "aten.reshape",
        "aten._to_copy",
        "aten._to_copy",
        "aten.reshape",
        "aten.t",
        "aten.clone",
    ]


def test_numbers_in_place_of_tensors_are_attributes() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Any:
        return (
            x + 2, 3 - x, 2**x, x / 2, x * True, (x > 0) & True, x % 2,
            7 // (x.abs().int() + 1), x.int() + 1.5, torch.where(x > 0, x, -torch.inf),
            x * x.shape[0] ** -0.5, x + x.shape[1] // 2, torch.full_like(x, torch.nan),
        )  # fmt: skip

    result = check(forward, X, dims=(BOTH,), further=(states(5, 4),))
    assert "sym_size" not in format_graph(result.graph)


# runtime sizes


def test_item_defines_a_dim() -> None:
    def forward(self: Formula, x: Tensor, y: Tensor) -> Tensor:
        return torch.zeros(y.max().item()) + x.sum()

    result = check(
        forward, X, torch.tensor([2, 5]), dims=(BOTH, None), further=(X, torch.tensor([8, 1]))
    )
    item = next(node for node in result.graph if node.op == "aten.item")
    assert item.output.type == ScalarType("int", "u0")
    assert result.graph.dims["u0"].low == 0


def test_a_fraction_read_by_item_stays_a_tensor() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Tensor:
        return x[x > 0].sum() * self.scale.item()

    check(forward, X, dims=(BOTH,), further=(states(5, 4),))


# dims


def test_a_derived_dim_keeps_the_root() -> None:
    half = Dim("half")
    result = check(
        lambda self, x, y: x[:, ::2] + y,
        states(3, 8),
        states(3, 4),
        dims=({0: BATCH, 1: 2 * half}, {0: BATCH, 1: half}),
        further=(states(2, 10), states(2, 5)),
    )
    assert [str(value.type) for value in result.graph.inputs] == [
        "f32[batch, 2*half]",
        "f32[batch, half]",
    ]


def test_auto_dims_are_named_after_their_input() -> None:
    auto = {0: Dim.AUTO, 1: Dim.AUTO}
    result = check(lambda self, x, y: x * 2, X, dims=(auto,), further=(states(5, 4),))
    assert result.dynamic == {(0, 0): "x_0", (0, 1): "x_1"}


def test_names_that_the_text_form_reads_otherwise_are_adapted() -> None:
    dims = ({0: Dim("f32"), 1: Dim("none")},)
    result = check(lambda self, x, y: x.view(-1), X, dims=dims, further=(states(5, 4),))
    assert result.dynamic == {(0, 0): "f32_", (0, 1): "none_"}


def test_a_range_that_the_model_demands_is_applied_and_noted() -> None:
    result = check(
        lambda self, x, y: x + torch.zeros(64)[: x.shape[1]],
        X,
        dims=(BOTH,),
        further=(states(5, 64),),
    )
    assert result.graph.dims["seq"] == DimInfo(1, 64, 9)
    assert result.notes == ("Dim 'seq' is at most 64: the model demands it.",)


def _fixes_the_batch(self: Formula, x: Tensor, y: None) -> Tensor:
    doubled = x * 2
    return doubled.reshape(3, -1)


@pytest.mark.parametrize("dims", [BOTH, {0: Dim.AUTO, 1: Dim.AUTO}], ids=["named", "auto"])
def test_a_dim_that_specialised_names_what_forced_it(dims: Any) -> None:
    with pytest.raises(CaptureError) as error:
        capture(Formula(_fixes_the_batch), (X,), dynamic_shapes=(dims,))
    line = _fixes_the_batch.__code__.co_firstlineno + 2
    message = str(error.value)
    assert "nput x's axis 0" in message
    assert "fixes it to 3" in message
    assert f"{Path(__file__).name}:{line} (return doubled.reshape(3, -1))" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("function", "args", "dims", "words"),
    [
        (lambda s, x, y: x, (X[:1],), (BOTH,), ["axis 0", "size 1", "2 or more"]),
        (lambda s, x, y: x.view(x.shape[0], 3, -1), (X,), (BOTH,), ["'seq'", "seq = 3*_seq"]),
        (lambda s, x, y: x + y, (X, X), (BOTH, {0: BATCH, 1: Dim("other")}), ["'other'", "equal"]),
        (lambda s, x, y: x if x.sum() > 0 else -x, (X,), None, ["test_capture.py", "torch.where"]),
        (lambda s, x, y: x @ y, (X, X), None, ["test_capture.py", "reduction dim"]),
        (lambda s, x, y: x.shape[0], (X,), None, ["no tensor"]),
        (lambda s, x, y: x * y, (X, 3), (None, Dim.DYNAMIC), ["Input y", "as a tensor"]),
        (
            lambda s, x, y: torch.cond(x.sum() > 0, lambda q: q * 2, lambda q: q - 1, (x,)),
            (X,),
            None,
            ["cond", "test_capture.py"],
        ),
    ],
)
def test_what_cannot_be_captured_is_said_in_a_sentence(
    function: Any, args: Any, dims: Any, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError) as error:
        capture(Formula(function), args, dynamic_shapes=dims)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)
    assert capsys.readouterr().err == ""


def test_inputs_that_do_not_fit_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="too many positional"):
        capture(Formula(lambda s, x, y: x), (X, X, X))
    with pytest.raises(UsageError, match="2 entries for 1 inputs"):
        capture(Formula(lambda s, x, y: x), (X,), dynamic_shapes=(BOTH, BOTH))


# inputs and outputs


def test_one_tensor_given_twice_is_two_inputs() -> None:
    check(lambda self, x, y: x - 2 * y, X, X, dims=(BOTH, BOTH), further=(states(5, 4), X[0, :4]
          .expand(5, 4)))  # fmt: skip


def test_keywords_in_any_order_and_constants_of_the_trace() -> None:
    class Model(nn.Module):
        def forward(self, a: Tensor, flag: bool, b: Tensor, c: Tensor | None = None) -> Tensor:
            return a - b if flag else a + b

    module, other = Model(), states(3, 9) + 1
    dims = {"a": BOTH, "flag": None, "b": BOTH, "c": None}
    result = capture(
        module, (), kwargs={"c": None, "b": other, "flag": True, "a": X}, dynamic_shapes=dims
    )
    assert result.input_names == ("a", "b")
    assert_identical(interpret(result.graph, result.args), [X - other])


def test_outputs_are_named_by_what_the_model_returns() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Any:
        return {"logits": x + 1, "states": [x + 2, None, x + 3], "size": 3, "same": x}

    result = capture(Formula(forward), (X,))
    assert result.output_names == ("logits", "states_0", "states_2", "same")
    outputs = result.unflatten(interpret(result.graph, (X,)))
    assert outputs["states"][1] is None
    assert outputs["size"] == 3
    assert_identical([outputs["states"][2], outputs["same"]], [X + 3, X])


# programs


def test_a_saved_program_gives_the_same_graph(tmp_path: Path) -> None:
    model = built("t5-sdpa")  # mutates a temporary, which only the retrace sees after loading
    program = _export(model)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    result = from_program(loaded, model.args, dynamic_shapes=model.dynamic_shapes)
    verify(result.graph)
    assert result.dynamic == captured("t5-sdpa", True).dynamic
    args = model.inputs({**TRACED, **model.sizes[0]})
    assert_identical(interpret(result.graph, args), eager(model.module, *args))
    assert all(node.loc.line for node in result.graph)


def test_a_program_without_names_has_dims_named_after_inputs() -> None:
    result = from_program(_export(built("bert-sdpa")))
    assert set(result.dynamic.values()) == {"input_ids_0", "input_ids_1"}
    assert_identical(result.args, built("bert-sdpa").args)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch copies its own there
def test_a_decomposed_program_is_captured_too() -> None:
    model = built("vit-sdpa")
    result = from_program(_export(model).run_decompositions())
    verify(result.graph)
    assert_close_to_eager(result, model)


def test_a_script_module_is_captured_with_its_dims() -> None:
    module = Formula(lambda self, x, y: self.linear(x).softmax(-1)).eval()
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        script = torch.jit.trace(module, (X,))
    result = capture(script, (X,), dynamic_shapes=({0: BATCH},))
    verify(result.graph)
    assert result.dynamic == {(0, 0): "batch"}
    program = script_to_program(script, (X,), {}, ({0: BATCH},))
    assert from_program(program, (X,)).input_names == result.input_names
    more = states(5, 9)
    assert_identical(interpret(result.graph, (more,)), eager(module, more))


def test_root_modules_have_an_empty_path() -> None:
    result = capture(Formula(lambda self, x, y: x + 1), (X,))
    (node,) = result.graph
    assert isinstance(node.loc, Loc)
    assert node.loc.module == ""


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


def test_an_output_of_unknown_type_is_named_with_what_to_do() -> None:
    class MyCache:
        pass

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, MyCache]:
            return x + 1, MyCache()

    with pytest.raises(CaptureError, match=r"Model returns a MyCache, .*use_cache"):
        capture(Model(), (torch.ones(2),))


def test_locations_follow_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "models" / "mine.py")
    assert short_path(file) == file
    monkeypatch.chdir(tmp_path)
    assert short_path(file) == "models/mine.py"
    monkeypatch.chdir(tmp_path.parent)
    assert short_path(file) == f"{tmp_path.name}/models/mine.py"


def test_a_condition_that_the_trace_met_is_said_in_the_dims_own_names() -> None:
    class CountsDown(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            size = x.shape[1]
            places = torch.arange(size - 1, -1, -1.0)
            return x + torch.outer(places, torch.ones(4)).view(size, 2, 2).flatten(1)

    with pytest.raises(CaptureError) as caught:
        capture(
            CountsDown(), (torch.randn(2, 5, 4),), dynamic_shapes=({1: Dim("seq", min=2, max=64)},)
        )
    said = str(caught.value)
    assert said.startswith(
        "Input x's axis 1 (dim 'seq') can't take every size: the trace relies on"
    )
    assert "== (4*seq)" in said
    assert "L['x']" not in said
    assert "Leave the dim static" in said
