"""A model is written whole or not at all, and reads back the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from attngraph.checks.check import Check
from attngraph.cli import run
from attngraph.errors import OutputError
from attngraph.export.files import save as save_module
from attngraph.export.files.save import save, to_session
from attngraph.export.files.staged import Staged
from attngraph.export.lowering.lower import lower
from attngraph.export.parity.budget import OutputParity, Parity
from attngraph.export.target import Target
from tests.export.lowered import graph_of

FAILED = Parity((OutputParity("y", (1,), 1.0, 0.0, 0.0, passed=False),), "fp32")
BODY = """
  input %x : f32[batch, seq, 32]
  parameter %w : f32[48, 32]
  parameter %b : f32[48]
  %y = aten.linear(%x, %w, %b)
  return %y
"""


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(48, 32), "b": torch.randn(48)}


@pytest.fixture
def model(weights: dict[str, torch.Tensor]) -> ir.Model:
    return lower(graph_of(BODY, weights))


def _run(path: Path, x: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


@pytest.mark.parametrize(
    ("limit", "files"), [(1 << 30, ["m.onnx"]), (0, ["m.onnx", "m.onnx_data"])]
)
def test_a_saved_model_runs(
    limit: int, files: list[str], model: ir.Model, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    save(model, path, external_above=limit)
    assert sorted(file.name for file in tmp_path.iterdir()) == files
    onnx.checker.check_model(str(path))
    x = torch.randn(2, 5, 32)
    expected = torch.nn.functional.linear(x, weights["w"], weights["b"])
    torch.testing.assert_close(_run(path, x), expected)
    assert isinstance(model.graph.initializers["w.T"].const_value, ir.Tensor)


@pytest.mark.parametrize("limit", [1 << 30, 0])
def test_saving_twice_gives_the_same_bytes(limit: int, model: ir.Model, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    written = []
    for _ in range(2):
        save(model, path, external_above=limit)
        written.append([file.read_bytes() for file in sorted(tmp_path.iterdir())])
    assert written[0] == written[1]


def test_large_weights_go_beside_the_file_unless_it_is_to_be_one(
    model: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = save_module._weight_bytes(model)
    monkeypatch.setattr(save_module, "EXTERNAL_ABOVE", large)
    save(model, tmp_path / "small.onnx")
    monkeypatch.setattr(save_module, "EXTERNAL_ABOVE", large - 1)
    save(model, tmp_path / "large.onnx")
    save_module.in_one_file(model)
    save(model, tmp_path / "one.onnx")
    written = sorted(file.name for file in tmp_path.iterdir())
    assert written == ["large.onnx", "large.onnx_data", "one.onnx", "small.onnx"]
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "small.onnx").read_bytes()
    x = torch.randn(2, 5, 32)
    assert torch.equal(_run(tmp_path / "large.onnx", x), _run(tmp_path / "one.onnx", x))
    with to_session(model, Target("cpu"), external_above=0) as session:
        torch.testing.assert_close(session.run([x])[0], _run(tmp_path / "one.onnx", x))


def test_what_does_not_fit_into_one_file_is_a_sentence(
    model: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.onnx").write_bytes(b"old")
    monkeypatch.setattr(save_module, "_LARGEST", 5000)
    save_module.in_one_file(model)
    with pytest.raises(OutputError, match=r"one ONNX file can hold 2: leave out --single-file"):
        save(model, tmp_path / "m.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_bytes() == b"old"


def test_one_file_holds_what_protobuf_would_write(model: ir.Model, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    save(model, path)
    written, expected = onnx.load(path), ir.to_proto(model)
    for proto in (written, expected):
        proto.graph.initializer.sort(key=lambda each: each.name)
    assert written == expected
    assert path.stat().st_size == len(expected.SerializeToString())


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 1 << 31])
def test_lengths_are_written_as_protobuf_does(number: int) -> None:
    proto = onnx.ModelProto(ir_version=number)
    tag = bytes([onnx.ModelProto.DESCRIPTOR.fields_by_name["ir_version"].number << 3])
    assert proto.SerializeToString() == tag + save_module._varint(number)


def test_no_room_for_a_temporary_file_is_a_sentence(
    model: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_module, "_parts", full)
    with pytest.raises(OutputError, match=r"temporary file: .*No space left.* TMPDIR"):
        to_session(model, Target("cpu"), external_above=0)


def test_a_session_needs_no_file(model: ir.Model, weights: dict[str, torch.Tensor]) -> None:
    x = torch.randn(2, 5, 32)
    expected = torch.nn.functional.linear(x, weights["w"], weights["b"])
    for limit in (1 << 30, 0):
        with to_session(model, Target("cpu"), external_above=limit) as session:
            torch.testing.assert_close(session.run([x])[0], expected)


def test_a_new_file_has_the_usual_permissions(model: ir.Model, tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    save(model, tmp_path / "m.onnx", external_above=0)
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize("place", ["missing/m.onnx", "folder", "file/m.onnx"])
def test_a_place_that_cannot_be_written(place: str, model: ir.Model, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match=place.split("/")[0]):
        save(model, tmp_path / place)


def test_a_full_disk_leaves_the_old_file(
    model: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")

    def full(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match="No space left"):
        save(model, path, external_above=0)
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("moment", ["weights", "rename"])
def test_an_interrupt_leaves_nothing(
    moment: str, model: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    target: tuple[object, str] = (os, "replace")
    if moment == "weights":
        target = (save_module, "_parts")
    monkeypatch.setattr(*target, interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(model, tmp_path / "m.onnx", external_above=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.int8])
@pytest.mark.parametrize("arrange", [torch.Tensor.t, torch.Tensor.contiguous, lambda w: w[:, ::2]])
def test_weights_keep_their_bits(
    dtype: torch.dtype,
    arrange: Callable[[torch.Tensor], torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(save_module, "_CHUNK", 640)  # strips of several rows, the last shorter
    data = arrange(torch.randint(0, 2, (64, 64)).to(dtype))
    kind = {"torch.float16": "f16", "torch.bfloat16": "bf16", "torch.bool": "bool"}
    shape = ", ".join(map(str, data.shape))
    name = kind.get(str(dtype), "i8")
    graph = graph_of(
        f'  input %x : {name}[64]\n  parameter %w : {name}[{shape}]\n  return %w as "copy", %x',
        {"w": data},
    )
    for limit in (1 << 30, 0):
        save(lower(graph), tmp_path / "m.onnx", external_above=limit)
        read = ir.load(tmp_path / "m.onnx").graph.initializers["w"].const_value
        assert read is not None
        assert read.tobytes() == data.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files of weights as they are written; every weight goes into one."""
    monkeypatch.setattr(save_module, "EXTERNAL_ABOVE", 0)
    found: list[str] = []
    real = save_module._write_weights

    def counted(file: Any, *rest: Any) -> None:
        found.append(file.name)
        real(file, *rest)

    monkeypatch.setattr(save_module, "_write_weights", counted)
    return found


@pytest.mark.parametrize("verify", ["final", "off"])
@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["--decode"], marks=pytest.mark.wide),
        pytest.param(["--weights", "int8"], marks=pytest.mark.wide),
    ],
)
def test_the_weights_that_were_checked_are_those_that_are_kept(
    verify: str, options: list[str], written: list[str], tmp_path: Path
) -> None:
    """Written once for each graph that is checked; with quantized weights that is two."""
    place, plain = tmp_path / "place", tmp_path / "plain"
    for folder in (place, plain):
        folder.mkdir()
    model = ["optimize", "--factory", "examples.cached_gpt:build", *options, "--verify"]
    assert run([*model, verify, "-o", str(place / "m.onnx")]) == 0
    assert len(written) == (2 if "--weights" in options and verify == "final" else 1)
    assert sorted(file.name for file in place.iterdir()) == ["m.onnx", "m.onnx_data"]
    assert run([*model, "off", "-o", str(plain / "m.onnx")]) == 0
    for name in ("m.onnx", "m.onnx_data"):
        assert (place / name).read_bytes() == (plain / name).read_bytes()


def test_a_result_out_of_budget_leaves_nothing(
    written: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Check, "held", lambda check, reference, outputs, tensors: FAILED)
    model = ["optimize", "--factory", "examples.cached_gpt:build"]
    assert run([*model, "-o", str(tmp_path / "m.onnx")]) == 8
    assert written
    assert not list(tmp_path.iterdir())


def test_weights_without_room_beside_the_output_are_a_sentence(
    written: list[str], monkeypatch: pytest.MonkeyPatch, model: ir.Model, tmp_path: Path
) -> None:
    def full(*unused: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_module, "_write_weights", full)
    path = tmp_path / "m.onnx"
    with Staged(path) as staged, pytest.raises(OutputError, match=f"^{path} can't be written"):
        staged.session(model, Target("cpu"))
    assert not list(tmp_path.iterdir())


def test_a_staged_model_may_be_opened_again_and_saved_elsewhere(
    written: list[str], model: ir.Model, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    x, path = torch.randn(2, 5, 32), tmp_path / "m.onnx"
    other = lower(graph_of(BODY, weights))
    with Staged(path) as staged:
        first = staged.session(model, Target("cpu"))
        again = staged.session(model, Target("cpu"))
        assert len(written) == 1
        assert torch.equal(first.run([x])[0], again.run([x])[0])
        assert staged.data_of(other, path) is None
        assert staged.data_of(model, tmp_path / "n.onnx") is None
        save(model, path, data=staged.data_of(model, path))
        assert len(written) == 1
        assert staged.data_of(model, path) is None, "it is elsewhere now"
        third = staged.session(model, Target("cpu"))
        assert len(written) == 2
    for session in (first, again, third):
        assert torch.equal(session.run([x])[0], first.run([x])[0])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.onnx", "m.onnx_data"]
    torch.testing.assert_close(_run(path, x), first.run([x])[0])
