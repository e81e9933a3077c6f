"""Each command: what it prints for people and for machines, and what it writes."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from attngraph.cli import run
from attngraph.compiling.pipeline import pipeline
from attngraph.reports.report import Report

ATTENTION = ("--factory", "user_models:attention")


def _json(ran: Any) -> Any:
    assert ran.code == 0, ran.err
    assert ran.err == ""
    return json.loads(ran.out)


def test_optimize_writes_the_model_and_prints_a_summary(attngraph: Any, here: Path) -> None:
    ran = attngraph("optimize", "--factory", "user_models:dynamic", "-o", "out.onnx")
    assert (ran.code, ran.err) == (0, "")
    first, *lines = ran.out.splitlines()
    assert first.startswith("✓ user_models:dynamic → out.onnx (")
    labels = [line.split()[0] for line in lines if line[2:3].strip()]
    assert "  dims       batch 1..64\n" in ran.out
    assert labels == [
        "dims",
        "nodes",
        "attention",
        "kernel",
        "weights",
        "parity",
        "rewrites",
        "time",
    ]
    assert "1 fused" in ran.out
    assert "batch=2" in ran.out
    assert not any(line != line.rstrip() for line in lines)
    model = onnx.load(here / "out.onnx")
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_dims_of_a_program_get_the_names_that_are_given(attngraph: Any, here: Path) -> None:
    width, size = torch.export.Dim("width", max=64), torch.export.Dim("size", max=64)
    program = torch.export.export(
        torch.nn.Bilinear(4, 4, 4),
        (torch.zeros(3, 5, 4), torch.zeros(3, 5, 4)),
        dynamic_shapes=({0: width, 1: size}, {0: width, 1: size}),
    )
    torch.export.save(program, here / "model.pt2")

    def dims(*arguments: str) -> list[list[str]]:
        ran = attngraph("optimize", "model.pt2", "-o", "out.onnx", *arguments)
        assert (ran.code, ran.err) == (0, "")
        graph = onnx.load(here / "out.onnx").graph
        shapes = [value.type.tensor_type.shape.dim for value in (*graph.input, *graph.output)]
        return [[dim.dim_param or str(dim.dim_value) for dim in shape] for shape in shapes]

    assert dims() == [["input1_0", "input1_1", "4"]] * 3
    named = dims("--dim", "batch=input1:0", "--dim", "seq=input2:1", "--dim", "seq=input1:1")
    assert named == [["batch", "seq", "4"]] * 3


def test_json_is_the_report_and_the_output(attngraph: Any, here: Path) -> None:
    found = _json(attngraph("optimize", *ATTENTION, "-o", "out.onnx", "--json"))
    assert found.keys() == Report("", "cpu", "fp32").to_dict().keys() | {"output"}
    assert found["output"] == {"path": "out.onnx", "bytes": (here / "out.onnx").stat().st_size}
    assert found["parity"]["passed"] is True
    assert found["attention"] == {"fused": 1, "declined": 0}
    assert list(found["timings"]) == [
        "import",
        "load",
        "capture",
        "passes",
        "lower",
        "parity",
        "save",
    ]


def test_precision_halves_the_weights_and_keeps_the_interface(attngraph: Any, here: Path) -> None:
    arguments = ("optimize", *ATTENTION, "-o", "out.onnx", "--precision", "fp16")
    found = _json(attngraph(*arguments, "--json"))
    assert (found["precision"], found["parity"]["precision"]) == ("fp16", "fp16")
    assert found["kept_in_fp32"] == []
    assert found["weights"]["bytes"] < 0.6 * found["weights"]["bytes_before"]
    graph = onnx.load(here / "out.onnx").graph
    floats = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert floats == {onnx.TensorProto.FLOAT}
    assert onnx.TensorProto.FLOAT16 in {tensor.data_type for tensor in graph.initializer}
    ran = attngraph(*arguments)
    assert "in fp16)" in ran.out.splitlines()[0]
    assert "stored in float16" in ran.out


def test_a_half_file_is_verified_in_its_precision(attngraph: Any) -> None:
    assert attngraph("optimize", *ATTENTION, "-o", "out.onnx", "--precision", "fp16").code == 0
    found = _json(attngraph("verify", *ATTENTION, "out.onnx", "--json"))
    assert found["passed"] is True
    assert found["parity"]["precision"] == "fp16"


def test_verify_off_says_that_nothing_was_checked(attngraph: Any) -> None:
    ran = attngraph("optimize", *ATTENTION, "-o", "out.onnx", "--verify", "off")
    assert "not checked" in ran.out


def test_verify_each_passes(attngraph: Any) -> None:
    ran = attngraph("optimize", *ATTENTION, "-o", "out.onnx", "--verify", "each")
    assert ran.code == 0, ran.err


def test_an_existing_file_is_replaced(attngraph: Any, here: Path) -> None:
    (here / "out.onnx").write_text("old")
    assert attngraph("optimize", *ATTENTION, "-o", "out.onnx", "--verify", "off").code == 0
    onnx.checker.check_model(here / "out.onnx")
    assert sorted(path.name for path in here.iterdir()) == ["out.onnx", "user_models.py"]


def test_an_input_spec_makes_its_named_dims_dynamic(attngraph: Any, here: Path) -> None:
    ran = attngraph(
        *("optimize", *ATTENTION, "-o", "out.onnx"),
        *("--input", "x=float32[rows=2,keys=5,16]", "--dim", "keys=2..32"),
    )
    assert ran.code == 0, ran.err
    dims = onnx.load(here / "out.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["rows", "keys", 16]


def test_a_forward_of_only_args_takes_inputs_in_order(attngraph: Any, here: Path) -> None:
    ran = attngraph(
        *("optimize", "--factory", "user_models:variadic", "-o", "out.onnx"),
        *("--input", "a=float32[rows=2,4]", "--input", "b=float32[rows=2,4]"),
    )
    assert ran.code == 0, ran.err
    inputs = onnx.load(here / "out.onnx").graph.input
    assert [i.type.tensor_type.shape.dim[0].dim_param for i in inputs] == ["rows", "rows"]


def test_arrays_of_an_npz_are_the_samples(attngraph: Any, here: Path) -> None:
    np.savez(here / "ids.npz", ids=np.array([[1, 49, 3]]))
    ran = attngraph(
        *("optimize", "--factory", "user_models:lookup"),
        *("-o", "out.onnx", "--inputs", "ids.npz"),
    )
    assert ran.code == 0, ran.err
    dims = onnx.load(here / "out.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_value for dim in dims] == [1, 3]


def test_samples_of_a_small_table_are_its_rows(attngraph: Any, here: Path) -> None:
    spec = ("--input", "ids=int64[batch=2,seq=64]")
    ran = attngraph("optimize", "--factory", "user_models:lookup", "-o", "out.onnx", *spec)
    assert ran.code == 0, ran.err


def test_weights_and_a_factory_and_inputs_together(attngraph: Any, here: Path) -> None:
    weights = {"query.weight": (16, 16), "query.bias": 16, "key.weight": (16, 16), "key.bias": 16}
    torch.save({name: torch.ones(shape) for name, shape in weights.items()}, here / "w.pt")
    found = _json(
        attngraph(
            *("optimize", "w.pt", "--factory", "user_models:alone", "-o", "out.onnx", "--json"),
            *("--input", "x=float32[2,8,16]"),
        )
    )
    assert found["source"] == "w.pt with user_models:alone"


def test_explain_prints_a_line_for_each_attention(attngraph: Any) -> None:
    ran = attngraph("explain", *ATTENTION)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("\n") == 1
    assert ran.out.startswith("user_models.py:18: the model: fused into attn.attention: ")


def test_explain_says_why_an_attention_stays(attngraph: Any) -> None:
    ran = attngraph("explain", "--factory", "user_models:waves")
    assert ran.code == 0
    assert ran.out.startswith("user_models.py:29: 0: declined [logits-not-a-product] ")
    assert "aten.sin" in ran.out
    assert "Hint: " in ran.out


def test_explain_prints_json(attngraph: Any) -> None:
    found = _json(attngraph("explain", *ATTENTION, "--json"))
    assert [site["status"] for site in found["sites"]] == ["fused"]


def test_optimize_lists_what_it_declined_and_where(attngraph: Any) -> None:
    ran = attngraph("optimize", "--factory", "user_models:waves", "-o", "out.onnx")
    assert ran.code == 0, ran.err
    assert "0 fused, 1 declined" in ran.out
    assert "declined user_models.py:29 0 [logits-not-a-product]" in ran.out
    assert "hint: " in ran.out


def test_passes_lists_the_pipeline_in_order(attngraph: Any) -> None:
    steps = _json(attngraph("passes", "--json"))
    names = [step["name"] for step in steps]
    assert names == [item.name for item in pipeline(part=True, experts=True)]
    assert all(step["does"].endswith(".") for step in steps)
    lines = attngraph("passes").out.splitlines()
    assert [line.split()[1] for line in lines] == names
    labels = {step["name"]: step["label"] for step in steps}
    assert labels["canonicalize"] == "exact"
    assert labels["distribute"] == "reassociating"
    assert "Reassociating." in lines[names.index("distribute")]


def test_exact_leaves_out_what_reassociates_and_the_report_counts_it(attngraph: Any) -> None:
    late = ("--factory", "user_models:late")
    made = _json(attngraph("optimize", *late, "-o", "out.onnx", "--json"))["reassociated"]
    assert [rewrite["made_by"] for rewrite in made] == ["raise-softmax"]
    assert made[0]["location"].startswith("user_models.py:")
    assert "1 × raise-softmax" in attngraph("optimize", *late, "-o", "out.onnx").out
    found = _json(attngraph("optimize", *late, "-o", "out.onnx", "--json", "--exact"))
    assert found["reassociated"] == []
    assert found["parity"]["passed"] is True


@pytest.mark.parametrize(("level", "code"), [("warning", 0), ("problem", 1)])
def test_doctor_fails_only_where_something_is_broken(
    attngraph: Any, monkeypatch: pytest.MonkeyPatch, level: Any, code: int
) -> None:
    from attngraph.export.runtime import doctor

    findings = [doctor.Finding(level, "torch", "It is ill.", "pip install health")]
    monkeypatch.setattr(doctor, "diagnose", lambda: findings)
    ran = attngraph("doctor")
    assert ran.code == code
    assert "It is ill." in ran.out
    assert "pip install health" in ran.out
    assert attngraph("doctor", "--json").code == code


def test_version_names_torch_and_onnxruntime(attngraph: Any) -> None:
    ran = attngraph("--version")
    assert ran.code == 0
    assert metadata.version("torch") in ran.out
    assert "onnxruntime" in ran.out


def test_a_shell_completes_commands_and_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_ATTNGRAPH_COMPLETE", "complete_bash")
    for typed, completed in (("attngraph opt", "optimize"), ("attngraph verify --tar", "--target")):
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
        with pytest.raises(SystemExit) as ended:
            run([])
        assert (ended.value.code, capsys.readouterr().out.split()) == (0, [completed])


def test_help_keeps_its_brackets(attngraph: Any) -> None:
    ran = attngraph("optimize", "--help")
    assert ran.code == 0
    assert '"input_ids=int64[batch=2,seq=8]"' in ran.out
    (line,) = (line for line in ran.out.splitlines() if "--tune" in line)
    assert "bool" not in line


def test_the_report_names_the_kernel_and_the_runner_up(attngraph: Any) -> None:
    for site in _json(attngraph("explain", *ATTENTION, "--json"))["sites"]:
        kernel = site["kernel"]
        assert kernel["op"]
        assert kernel["kernel"]
        assert kernel["runner_up"]
        assert kernel["why_not"]
    ran = attngraph("explain", *ATTENTION, "--target", "cuda:sm80")
    assert "; kernel: Attention" in ran.out
    assert "; rather than " in ran.out


def test_an_onnxruntime_outside_the_kernel_table(
    attngraph: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxruntime.__version__", "1.19.2")
    for command in (["optimize", "-o", "out.onnx"], ["explain"]):
        ran = attngraph(command[0], *ATTENTION, *command[1:])
        assert ran.code == 7
        assert "no row for onnxruntime 1.19.2" in ran.sentence
    assert not (here / "out.onnx").exists()


def test_tuning_is_told_in_the_report(
    attngraph: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    command = ["optimize", "--factory", "user_models:attention", "-o", "out.onnx", "--tune"]
    found = _json(attngraph(*command, "--json"))
    assert found["sites"][0]["kernel"]["tuned"] is True
    assert found["parity"]["passed"] is True
    assert _json(attngraph(*command, "--json"))["sites"] == found["sites"]
    assert list((here / "cache" / "attngraph" / "kernels").glob("*.json"))


def test_an_assumption_that_nothing_needs_is_said(attngraph: Any) -> None:
    assume = ("--assume", "no-fully-masked-rows")
    ran = attngraph("optimize", *ATTENTION, "-o", "out.onnx", *assume)
    assert "No rewrite relies on the assumption no-fully-masked-rows." in ran.out
    notes = _json(attngraph("explain", *ATTENTION, "--json", *assume))["notes"]
    assert notes == ["No rewrite relies on the assumption no-fully-masked-rows."]


def test_an_unknown_assumption_is_an_error_that_names_the_known_ones(attngraph: Any) -> None:
    ran = attngraph("optimize", *ATTENTION, "-o", "out.onnx", "--assume", "luck")
    assert ran.code != 0
    assert "no-fully-masked-rows" in ran.sentence


def test_ignored_padding_is_told_and_known_to_verify(attngraph: Any) -> None:
    factory = ("--factory", "examples.bert:build")
    ran = attngraph("optimize", *factory, "-o", "out.onnx", "--ignore-padded-rows")
    assert (ran.code, ran.err) == (0, "")
    assert "run on the tokens that mask leaves unmasked" in " ".join(ran.out.split())
    assert attngraph("verify", *factory, "out.onnx").code == 0


def test_ignoring_padding_that_no_mask_tells_is_refused(attngraph: Any, here: Path) -> None:
    factory = ("--factory", "examples.nanogpt:build")
    ran = attngraph("optimize", *factory, "-o", "out.onnx", "--ignore-padded-rows")
    assert ran.code != 0
    assert "No attention hides keys by a mask that is an input" in " ".join(ran.err.split())
    assert not (here / "out.onnx").exists()


def test_ignoring_padding_is_not_for_decoding(attngraph: Any, here: Path) -> None:
    options = ("-o", "out.onnx", "--decode", "--ignore-padded-rows")
    ran = attngraph("optimize", "--factory", "examples.cached_gpt:build", *options)
    assert ran.code != 0
    assert "leave out --decode" in ran.err
    assert not (here / "out.onnx").exists()
