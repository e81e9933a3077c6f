"""`attngraph bench`: what is within the error budget is timed, and nothing else."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

QUICK = ("--rounds", "2", "--seconds", "0.01")
MODEL = ("--factory", "user_models:dynamic")
EAGER = ("--engine", "eager")
OURS = ("--engine", "attngraph")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines work in this process; in processes of their own, each would import torch."""
    from attngraph.measuring import contest, worker

    def answer(what: str, folder: str | Path, *more: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return worker.answer(what, Path(folder), *more)

    class Here(nullcontext[Any]):
        def __init__(self, command: Sequence[str], *_: Any) -> None:
            super().__init__(self)
            self.said, self.block = answer(*command[command.index("serve") :])

        process_id = os.getpid()

        def answer(self) -> Any:
            return self.said

    monkeypatch.setattr(contest, "_work", lambda patience, *arguments: answer(*arguments)[0])
    monkeypatch.setattr(contest, "Server", Here)


@pytest.mark.machine
def test_engines_are_timed_on_one_input_once_their_parity_is_known(attngraph: Any) -> None:
    ran = attngraph("bench", *MODEL, *EAGER, *OURS, *QUICK, "--json")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert found["inputs"] == [[2, 8, 16]]
    rows = {row["engine"]: row for row in found["rows"]}
    assert list(rows) == ["eager", "attngraph"]
    for name in rows:
        assert rows[name]["status"] == "timed"
        assert rows[name]["parity"]["passed"] is True
        assert len(rows[name]["ms"]) == 2
        assert min(rows[name]["ms"]) <= rows[name]["median_ms"] <= max(rows[name]["ms"])
    assert rows["attngraph"]["ratio"] == 1
    assert rows["attngraph"]["prepare_cpu_s"] > 0


@pytest.mark.usefixtures("in_process")
def test_an_engine_of_other_models_is_skipped(attngraph: Any) -> None:
    ran = attngraph("bench", *MODEL, *EAGER, "--engine", "transformers", *QUICK, "--json")
    rows = {row["engine"]: row for row in json.loads(ran.out)["rows"]}
    assert [rows[name]["status"] for name in ("eager", "transformers")] == ["timed", "skipped"]
    assert "models of transformers only" in rows["transformers"]["reason"]
    assert rows["transformers"]["ms"] == []


@pytest.mark.usefixtures("in_process")
def test_a_converted_model_is_held_against_eager_in_its_precision(attngraph: Any) -> None:
    """It takes and gives float32 as the original does, and the module in half does not."""
    ran = attngraph("bench", *MODEL, "--precision", "fp16", *EAGER, *OURS, *QUICK, "--json")
    rows = json.loads(ran.out)["rows"]
    assert [(row["engine"], row["status"]) for row in rows] == [
        ("eager", "timed"),
        ("attngraph", "timed"),
    ]


@pytest.mark.usefixtures("in_process")
def test_what_is_out_of_parity_is_not_timed(attngraph: Any, here: Path) -> None:
    assert attngraph("optimize", *MODEL, "-o", "out.onnx").code == 0
    model = onnx.load("out.onnx")
    weight = next(w for w in model.graph.initializer if len(w.dims) == 2)
    wrong = np.ascontiguousarray(numpy_helper.to_array(weight) * np.float32(1.01))
    weight.CopyFrom(numpy_helper.from_array(wrong, weight.name))
    onnx.save(model, "out.onnx")
    ran = attngraph("bench", "out.onnx", *MODEL, *EAGER, *OURS, *QUICK)
    assert ran.code == 8
    assert "attngraph is out of its error budget: parity FAILED" in ran.err
    eager, ours, load = ran.out.splitlines()[1:]
    assert "the machine" in load
    assert " ms (" in eager
    assert "out of parity: parity FAILED" in ours
    assert " ms (" not in ours


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((*MODEL, "--engine", "magic"), "There is no engine 'magic': choose among eager, "),
        (("out.onnx",), "There is no ONNX file 'out.onnx'; check the path."),
        (("a.pt2", "b.pt2"), "One model is measured at a time: "),
        ((), "There is nothing to compare with: name the MODEL, or --factory."),
        ((*MODEL, "--target", "tpu"), "There is no target 'tpu': "),
        (("--factory", "user_models:nothing"), "The model itself doesn't run: "),
    ],
)
@pytest.mark.usefixtures("in_process")
def test_what_can_t_be_measured_is_a_sentence(
    attngraph: Any, arguments: tuple[str, ...], sentence: str
) -> None:
    assert attngraph("bench", *arguments).sentence.startswith(sentence)


def test_an_onnx_file_alone_has_nothing_to_be_compared_with(attngraph: Any, here: Path) -> None:
    (here / "out.onnx").write_bytes(b"")
    assert "that out.onnx was compiled from" in attngraph("bench", "out.onnx").sentence


@pytest.mark.machine
@pytest.mark.usefixtures("in_process")
def test_openvino_runs_the_export_or_says_how_to_install_it(attngraph: Any) -> None:
    ran = attngraph("bench", *MODEL, *OURS, "--engine", "openvino", *QUICK, "--json")
    row = {row["engine"]: row for row in json.loads(ran.out)["rows"]}["openvino"]
    if importlib.util.find_spec("openvino") is None:
        assert (row["status"], row["reason"][-20:]) == ("skipped", "pip install openvino")
    else:
        assert row["status"] == "timed"
        assert row["parity"]["error"] <= row["parity"]["budget"]


@pytest.mark.wide
@pytest.mark.usefixtures("in_process")
def test_a_quantized_engine_is_timed_where_it_is_named_and_its_error_is_told(
    attngraph: Any,
) -> None:
    from attngraph.measuring.contest import engines_named

    assert not any(engine.quantized for engine in engines_named(()))
    engines = ("--engine", "attngraph-int8", "--engine", "onnx-int8")
    ran = attngraph("bench", "--factory", "examples.nanogpt:build", *engines, *QUICK, "--json")
    rows = {row["engine"]: row for row in json.loads(ran.out)["rows"]}
    for name in ("attngraph-int8", "onnx-int8"):
        assert rows[name]["status"] == "timed", rows[name]["reason"]
        assert rows[name]["parity"] is None
        assert 1e-4 < rows[name]["error"] < 0.1
    assert rows["attngraph-int8"]["error"] < rows["onnx-int8"]["error"]
