"""Bad input: one sentence on stderr, its own exit code, nothing on stdout, no output file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from attngraph.export.lowering.emission import registry
from attngraph.export.precision import gates
from attngraph.ir import Node

USAGE, LOAD, CAPTURE, LOWERING, PARITY, OUTPUT = 2, 3, 4, 6, 8, 9
TOO_LONG = "a" * 300


@pytest.fixture(autouse=True)
def nothing_is_written(here: Path) -> Any:
    yield
    assert not [name for name in os.listdir(here) if ".onnx" in name or "partial" in name]


def _optimize(attngraph: Any, *arguments: str) -> Any:
    return attngraph("optimize", *arguments, "-o", "out.onnx")


def test_missing_file(attngraph: Any) -> None:
    ran = _optimize(attngraph, "nowhere.pt2")
    assert ran.code == LOAD
    assert "nowhere.pt2" in ran.sentence


def test_wrong_kind_of_file(attngraph: Any, here: Path) -> None:
    (here / "notes.pt").write_text("not a model")
    ran = _optimize(attngraph, "notes.pt")
    assert ran.code == LOAD
    assert "notes.pt is not a model file" in ran.sentence


def test_an_onnx_file_for_a_model_and_a_folder(attngraph: Any, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "x.onnx").write_bytes(b"\x08\x0a")
    ran = attngraph("explain", str(folder / "x.onnx"))
    assert ran.code == LOAD
    assert "is an ONNX file, which attngraph writes; give the model it was made" in ran.sentence
    ran = attngraph("explain", str(folder))
    assert ran.code == LOAD
    assert "has no config.json, so it is no checkpoint" in ran.sentence


def test_truncated_zip(attngraph: Any, here: Path) -> None:
    torch.save({"weight": torch.zeros(100)}, here / "cut.pt")
    whole = (here / "cut.pt").read_bytes()
    (here / "cut.pt").write_bytes(whole[: len(whole) // 2])
    ran = _optimize(attngraph, "cut.pt", "--factory", "user_models:alone")
    assert ran.code == LOAD
    assert "cut.pt" in ran.sentence


def test_weights_that_do_not_match_the_factory(attngraph: Any, here: Path) -> None:
    weights = {"query.weight": (16, 16), "query.bias": (16,)}
    save_file({name: torch.zeros(shape) for name, shape in weights.items()}, here / "w.safetensors")
    ran = _optimize(attngraph, "w.safetensors", "--factory", "user_models:wider")
    assert ran.code == LOAD
    assert "query.weight is (16, 16) in the file and (32, 32) in the module" in ran.sentence


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--input", "x:float32[2]"], "'x:float32[2]' doesn't parse"),
        (["--input", "x=float31[2]"], "'float31' is no dtype"),
        (["--input", "x=float32[b=2]", "--dim", "b=two"], "'b=two' doesn't parse"),
        (["--input", "x=float32[b=2]", "--dim", "c=2..4"], "c names no dim"),
        (["--dim", "c=2..4"], "c names no dim"),
        (["--input", "y=float32[2,8,16]"], "no parameter 'y'; it takes x"),
        (["--inputs", "nowhere.npz"], "nowhere.npz does not exist"),
        ([], "brings no sample inputs"),
    ],
)
def test_input_specs_that_do_not_parse_or_fit(
    attngraph: Any, arguments: list[str], part: str
) -> None:
    ran = _optimize(attngraph, "--factory", "user_models:alone", *arguments)
    assert ran.code == (LOAD if "npz" in part else USAGE)
    assert part in ran.sentence


def test_inputs_of_a_shape_the_model_refuses(attngraph: Any) -> None:
    ran = _optimize(
        attngraph, "--factory", "user_models:alone", "--input", "x=float32[batch=2,8,15]"
    )
    assert ran.code == CAPTURE
    assert "user_models.py:17" in ran.sentence


def test_inputs_of_values_the_model_refuses(attngraph: Any) -> None:
    np.savez("ids.npz", ids=np.array([[1, 50]]))
    ran = _optimize(attngraph, "--factory", "user_models:lookup", "--inputs", "ids.npz")
    assert ran.code == USAGE
    assert "user_models:lookup itself fails" in ran.sentence
    assert "out of range" in ran.sentence


def test_an_exported_program_takes_no_inputs(attngraph: Any, here: Path) -> None:
    program = torch.export.export(torch.nn.Linear(4, 4), (torch.zeros(2, 4),))
    torch.export.save(program, here / "linear.pt2")
    ran = _optimize(attngraph, "linear.pt2", "--input", "input=float32[batch=2,4]")
    assert ran.code == USAGE
    assert "linear.pt2 is an exported program" in ran.sentence
    assert "leave out --input" in ran.sentence


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--dim", "batch=2..8"], "leave out --dim with a range"),
        (["--dim", "batch=y:0"], "the program has no tensor input y; it has x, memory"),
        (["--dim", "batch=x:2"], "x has 2 axes, counted from 0"),
        (["--dim", "width=x:1"], "that axis is fixed to 4 in the program"),
        (["--dim", "batch=x:0", "--dim", "rows=x:0"], "is named twice"),
        (["--dim", "batch=x:0", "--dim", "rows=bias:0"], "has one dim for it and batch"),
        (["--dim", "batch=x:0", "--dim", "batch=memory:0"], "doesn't require it to equal x:0"),
        (["--dim", "batch=x:0", "--dim", "batch=2..8"], "leave out --dim batch with a range"),
        (["--dim", "batch=x:0", "--input", "x=float32[2,4]"], "leave out --input"),
    ],
)
def test_names_that_do_not_fit_a_program(
    attngraph: Any, here: Path, arguments: list[str], part: str
) -> None:
    class Model(torch.nn.Module):
        def forward(
            self, x: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return x + bias, memory.sum(1)

    batch = torch.export.Dim("batch", max=64)
    rows = torch.export.Dim("rows", max=64)
    program = torch.export.export(
        Model(),
        (torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, 4)),
        dynamic_shapes=({0: batch}, {0: rows}, {0: batch}),
    )
    torch.export.save(program, here / "model.pt2")
    ran = _optimize(attngraph, "model.pt2", *arguments)
    assert ran.code == USAGE
    assert part in ran.sentence


def test_names_of_a_program_are_not_for_modules(attngraph: Any) -> None:
    ran = _optimize(attngraph, "--factory", "user_models:alone", "--dim", "batch=x:0")
    assert ran.code == USAGE
    assert "write the dim as batch=size in --input x" in ran.sentence


@pytest.mark.parametrize(
    ("factory", "line", "what", "hint"),
    [
        ("branch", "39 (if x.sum() > 0:)", "of different shapes", "Use torch.where"),
        ("selection", "47 (return chosen if", "of different shapes", "Use torch.where"),
        ("number", "52 (return x[:, list(", "data-dependent number", "Keep it a tensor"),
    ],
)
def test_what_python_asks_of_a_tensors_values_is_told_with_the_users_line(
    attngraph: Any, factory: str, line: str, what: str, hint: str
) -> None:
    ran = _optimize(attngraph, "--factory", f"user_models:{factory}")
    assert ran.code == CAPTURE
    assert f"user_models.py:{line}" in ran.sentence
    assert what in ran.sentence
    assert hint in ran.sentence
    assert "u0" not in ran.sentence


def test_an_op_without_a_lowering_is_named_with_its_line_and_module(attngraph: Any) -> None:
    ran = _optimize(attngraph, "--factory", "user_models:bessel")
    assert ran.code == LOWERING
    for part in ("aten.special_bessel_j0", "user_models.py:34", "(1)"):
        assert part in ran.sentence


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("nowhere/out.onnx", "no folder nowhere"),
        ("user_models.py/out.onnx", "no folder user_models.py"),
        (".", "is a folder"),
        ("pipe", "is a device or a pipe"),
        (TOO_LONG, "File name too long"),
    ],
)
def test_an_output_path_is_checked_before_the_model_is_read(
    attngraph: Any, here: Path, path: str, part: str
) -> None:
    os.mkfifo(here / "pipe")
    ran = attngraph("optimize", "missing.pt2", "-o", path)
    assert ran.code == OUTPUT
    assert part in ran.sentence
    assert (here / "pipe").is_fifo()


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", TOO_LONG),
        ("explain", "--factory", "user_models:alone", "--inputs", TOO_LONG),
        ("verify", "--factory", "user_models:alone", TOO_LONG),
    ],
)
def test_a_file_out_of_reach_is_told_with_the_systems_reason(
    attngraph: Any, arguments: tuple[str, ...]
) -> None:
    ran = attngraph(*arguments)
    assert ran.code == LOAD
    assert "can't be read: File name too long." in ran.sentence


def test_the_model_is_not_overwritten_by_the_output(attngraph: Any, here: Path) -> None:
    (here / "model.pt2").write_bytes(b"precious")
    ran = attngraph("optimize", "model.pt2", "-o", "./model.pt2")
    assert ran.code == USAGE
    assert "choose another path" in ran.sentence
    assert (here / "model.pt2").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["optimize", "model.pt2"], "'-o' / '--output'. See attngraph optimize --help."),
        (["optimize", "-o", "x.onnx"], "no model"),
        (
            ["optimize", "m.pt2", "-o", "x.onnx", "--precision", "fp8"],
            "'--precision': 'fp8' is not",
        ),
        (["optimize", "m.pt2", "-o", "x.onnx", "--target", "tpu"], "no target 'tpu'"),
        (["optimise"], "Did you mean 'optimize'? See attngraph --help."),
        (["explain", "--fast"], "--fast"),
    ],
)
def test_command_lines_that_do_not_parse(attngraph: Any, arguments: list[str], part: str) -> None:
    ran = attngraph(*arguments)
    assert ran.code == USAGE
    assert part in ran.sentence


def test_a_dtype_that_the_device_cannot_do(attngraph: Any, here: Path) -> None:
    ran = _optimize(attngraph, "--factory", "user_models:attention", "--precision", "bf16")
    assert ran.code == USAGE
    assert "CPU provider has no bfloat16 kernels" in ran.sentence
    assert "--precision fp16" in ran.sentence
    assert not list(here.glob("*.onnx"))


def test_a_wrong_result_is_not_written_and_its_node_is_named(
    attngraph: Any, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    def tanh_instead(context: Any, node: Node) -> Any:
        return context.op("Tanh", context.value(node.inputs[0]))

    monkeypatch.setitem(registry._LOWERINGS, "aten.sigmoid", tanh_instead)
    monkeypatch.setattr(gates, "in_exponentials", lambda graph: 0)  # which would do without it
    ran = _optimize(attngraph, "--factory", "user_models:attention", "--json")
    assert ran.code == PARITY
    assert "out of its error budget" in ran.sentence
    assert "aten.sigmoid" in ran.sentence
    assert "user_models.py:18" in ran.sentence
