"""`attngraph verify`: what is right, what is wrong, and what can't be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

USAGE, LOAD, PARITY = 2, 3, 8
DYNAMIC = ("--factory", "user_models:dynamic")
EAGER = ("--factory", "examples.eager_attention:build")


@pytest.fixture
def written(attngraph: Any, here: Path) -> Path:
    ran = attngraph("optimize", *EAGER, "-o", "out.onnx", "--verify", "off")
    assert ran.code == 0, ran.err
    return here / "out.onnx"


def _edit(path: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)


def _shift_the_largest_weight(model: onnx.ModelProto) -> None:
    weight = max(model.graph.initializer, key=lambda tensor: np.prod(tensor.dims))
    values = numpy_helper.to_array(weight).copy()
    values[:, :32] += 0.1
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))


def _verify(attngraph: Any, *arguments: str) -> Any:
    ran = attngraph("verify", *arguments, "--json")
    assert ran.err == ""
    return ran.code, json.loads(ran.out)


def test_a_right_file_passes_at_every_size(attngraph: Any, written: Path) -> None:
    code, found = _verify(attngraph, *EAGER, "out.onnx")
    assert code == 0
    assert found["passed"] is True
    assert found["paired"] == {"inputs": "name", "outputs": "name"}
    assert found["first_diverging"] is None
    cases = [output["case"] for output in found["parity"]["outputs"]]
    assert len(cases) == 6  # the sample's sizes, two more, and three that were drawn
    assert all("seq=" in case for case in cases)
    ran = attngraph("verify", *EAGER, "out.onnx")
    assert ran.code == 0
    assert ran.out.startswith("✓ out.onnx is within the error budget of examples.eager_attention")
    assert ran.out.count("passed, error") == 6


def test_changed_weights_are_out_of_budget_and_named(attngraph: Any, written: Path) -> None:
    _edit(written, _shift_the_largest_weight)
    before = written.read_bytes()
    code, found = _verify(attngraph, *EAGER, "out.onnx")
    assert code == PARITY
    assert found["passed"] is False
    assert "other weights than the model: query" in found["first_diverging"]
    assert "examples/eager_attention.py:29 (query)" in found["first_diverging"]
    assert written.read_bytes() == before
    ran = attngraph("verify", *EAGER, "out.onnx")
    assert (ran.code, ran.err) == (PARITY, "")
    assert ran.out.startswith("✗ out.onnx is out of the error budget")


def test_a_node_that_computes_something_else_is_named(attngraph: Any, here: Path) -> None:
    assert attngraph("optimize", *DYNAMIC, "-o", "out.onnx").code == 0

    def tanh(model: onnx.ModelProto) -> None:
        (node,) = (node for node in model.graph.node if node.op_type == "Reciprocal")
        node.op_type = "Tanh"

    _edit(here / "out.onnx", tanh)
    code, found = _verify(attngraph, *DYNAMIC, "out.onnx")
    assert code == PARITY
    assert found["first_diverging"].startswith("The first ONNX value to diverge is %")
    assert "aten.sigmoid, from user_models.py:18" in found["first_diverging"]


def test_outputs_of_each_others_names_are_out_of_budget(attngraph: Any, here: Path) -> None:
    pair = ("--factory", "user_models:pair")
    assert attngraph("optimize", *pair, "-o", "out.onnx").code == 0

    def swap(model: onnx.ModelProto) -> None:
        first, second = (output.name for output in model.graph.output)
        to = {first: second, second: first}
        for node in model.graph.node:
            node.output[:] = [to.get(name, name) for name in node.output]
            node.input[:] = [to.get(name, name) for name in node.input]

    assert _verify(attngraph, *pair, "out.onnx")[0] == 0
    _edit(here / "out.onnx", lambda model: model.graph.output.reverse())
    assert _verify(attngraph, *pair, "out.onnx")[0] == 0  # the names tell
    _edit(here / "out.onnx", swap)
    code, found = _verify(attngraph, *pair, "out.onnx")
    assert code == PARITY
    assert "first ONNX value to diverge" in found["first_diverging"]


def test_a_file_of_another_exporter_is_paired_in_order(attngraph: Any, here: Path) -> None:
    def foreign(model: onnx.ModelProto) -> None:
        model.producer_name = "other"
        del model.metadata_props[:]
        old, new = model.graph.input[0].name, "tokens"
        model.graph.input[0].name = new
        for node in model.graph.node:
            node.input[:] = [new if name == old else name for name in node.input]

    assert attngraph("optimize", *DYNAMIC, "-o", "out.onnx").code == 0
    _edit(here / "out.onnx", foreign)
    code, found = _verify(attngraph, *DYNAMIC, "out.onnx")
    assert code == 0
    assert found["paired"] == {"inputs": "order", "outputs": "name"}
    assert "paired in their order" in attngraph("verify", *DYNAMIC, "out.onnx").out
    _edit(here / "out.onnx", lambda model: _shift_the_largest_weight(model))
    code, found = _verify(attngraph, *DYNAMIC, "out.onnx")
    assert code == PARITY
    assert "says that attngraph made it from this model" in found["first_diverging"]


def test_a_file_of_fixed_sizes_is_compared_at_those_and_says_so(attngraph: Any) -> None:
    fixed = ("--factory", "user_models:attention")
    assert attngraph("optimize", *fixed, "-o", "out.onnx").code == 0
    code, found = _verify(attngraph, *DYNAMIC, "out.onnx")
    assert code == 0
    assert len(found["parity"]["outputs"]) == 1
    assert [n for n in found["notes"] if n.startswith("Not compared at batch=")], found["notes"]
    assert found["weights"]["different"] == []


def test_a_decoder_is_compared_over_several_steps(attngraph: Any) -> None:
    cached = ("--factory", "examples.cached_gpt:build")
    ran = attngraph("optimize", *cached, "--decode", "-o", "out.onnx", "--verify", "off")
    assert ran.code == 0, ran.err
    code, found = _verify(attngraph, *cached, "out.onnx")
    assert code == 0
    cases = {output["case"] for output in found["parity"]["outputs"]}
    assert "decoding" in cases
    assert "batch=12, seq=1, past=7" in cases


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--factory", "user_models:attention"), USAGE, "takes 2 (x, mask)"),
        (("--factory", "user_models:two"), USAGE, "its input x is float32[batch, seq, 32]"),
        (("--factory", "user_models:several"), USAGE, "their number differs"),
        ((*EAGER, "model.pt2", "other.pt2"), USAGE, "takes a model and an ONNX file"),
        ((), USAGE, "takes a model and an ONNX file"),
    ],
)
def test_what_does_not_fit(
    attngraph: Any, written: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    ran = attngraph("verify", *arguments, "out.onnx")
    assert ran.code == code
    assert message in ran.sentence


def test_what_is_no_onnx_file(attngraph: Any, here: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, here / "weights.onnx")
    for name in ("nowhere.onnx", "weights.onnx", "user_models.py"):
        ran = attngraph("verify", *EAGER, name)
        assert ran.code == LOAD
        assert name in ran.sentence
