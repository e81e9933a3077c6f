"""`attngraph package --triton`: a model repository, and what Triton's Python backend runs of it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attngraph.errors import AttngraphError
from attngraph.export.files import save as files
from attngraph.export.lowering.lower import lower
from attngraph.export.target import parse_target
from attngraph.runtimes import triton
from attngraph.runtimes.triton_model import TritonPythonModel
from examples import cached_gpt
from tests.export.files.test_save import BODY
from tests.export.lowered import graph_of

ROOT = Path(__file__).parents[2]
USAGE, LOAD, OUTPUT = 2, 3, 9
STATIC = BODY.replace("batch, seq", "2, 5")
OTHER_FIRST = BODY.replace("return %y", "%z = aten.permute(%y) {dims = [1, 0, 2]}\n  return %z")
SQUARE = BODY.replace("[batch, seq, 32]", "[batch, batch, 32]")


def _write(path: Path, body: str = BODY, **options: Any) -> Path:
    weights = {"w": torch.randn(48, 32), "b": torch.randn(48)}
    files.save(lower(graph_of(body, weights)), path, **options)
    return path


def _at(place: Path) -> set[str]:
    return {str(item.relative_to(place)) for item in place.rglob("*") if item.is_file()}


def test_a_model_and_its_weights_are_put_into_a_repository(attngraph: Any, here: Path) -> None:
    (here / "out").mkdir()
    _write(here / "out" / "model.onnx", external_above=0)
    ran = attngraph("package", "out", "--triton", "models")
    assert ran.code == 0, ran.err
    assert _at(here / "models") == {
        "out/config.pbtxt", "out/1/model.onnx", "out/1/model.onnx_data"
    }  # fmt: skip
    text = (here / "models" / "out" / "config.pbtxt").read_text()
    assert 'input { name: "x" data_type: TYPE_FP32 dims: [-1, 32] }' in text
    assert "max_batch_size: 32" in text
    assert "dynamic_batching { }" in text
    again = attngraph("package", "out", "--triton", "models")
    assert again.code == OUTPUT
    assert "exists; choose another --name" in again.sentence


@pytest.mark.parametrize("body", [STATIC, OTHER_FIRST, SQUARE])
def test_rows_are_joined_where_the_first_dim_is_one_batch_alone(body: str, here: Path) -> None:
    found = triton.served(_write(here / "m.onnx", body), "m", parse_target("cpu"))
    assert (found.rows, found.backend) == (0, "onnxruntime")
    assert "dynamic_batching" not in found.config()


def test_static_sizes_on_cuda_are_replayed_by_our_own_session(here: Path) -> None:
    """Triton's onnxruntime backend hands each run other memory, which a replay would not read."""
    path = _write(here / "m.onnx", STATIC)
    found = triton.package(path, here / "models", None, parse_target("cuda:sm80"))
    assert (found.backend, found.cuda_graph, found.rows) == ("python", True, 0)
    assert "KIND_GPU" in found.config()
    assert _at(here / "models" / "m") == {"config.pbtxt", "1/model.onnx", "1/model.py"}


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("none.onnx",), LOAD, "There is no ONNX file 'none.onnx'"),
        (("empty",), LOAD, "There is no ONNX file in empty"),
        (("two",), USAGE, "package each file"),
        (("one.onnx", "--name", "a/b"), USAGE, "'a/b' is no name for a model"),
        (("one.onnx", "--target", "tpu"), USAGE, "There is no target 'tpu'"),
    ],
)
def test_what_is_no_one_model_is_refused(
    attngraph: Any, here: Path, arguments: tuple[str, ...], code: int, sentence: str
) -> None:
    for name in ("empty", "two"):
        (here / name).mkdir()
    for name in ("one.onnx", "two/encoder_model.onnx", "two/decoder_model.onnx"):
        _write(here / name)
    ran = attngraph("package", *arguments, "--triton", "models")
    assert ran.code == code
    assert sentence in ran.sentence
    assert not (here / "models").exists()


def test_nothing_is_left_of_a_model_that_could_not_be_copied(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = _write(here / "m.onnx")
    (here / "models").mkdir()
    monkeypatch.setattr(triton.shutil, "copyfile", fails)
    with pytest.raises(AttngraphError, match="No space left"):
        triton.package(path, here / "models", None, parse_target("cpu"))
    assert _at(here / "models") == set()


class _Tensor:
    def __init__(self, name: str, data: np.ndarray) -> None:
        self._name, self._data = name, data

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._data


def test_a_decoder_generates_in_the_python_backend(
    attngraph: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Triton's module stood in for. A request that fails is told why, and costs no other."""
    # The documentation's own commands.
    text = (ROOT / "docs" / "serving.md").read_text("utf-8")
    commands = re.findall(r"^attngraph (.+--decode.+|package gpt.+)$", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        ran = attngraph(*command.split())
        assert ran.code == 0, ran.err
    place = here / "models" / "gpt"
    config = (place / "config.pbtxt").read_text()
    assert 'backend: "python"' in config
    scope: dict[str, Any] = {}
    exec((place / "1" / "model.py").read_text(), scope)
    assert scope["TritonPythonModel"] is TritonPythonModel
    stand_in = SimpleNamespace(
        InferenceResponse=lambda tensors, error=None: (tensors, error),
        Tensor=_Tensor,
        TritonError=str,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in)
    said = dict(re.findall(r'key: "(\w+)" value \{ string_value: "([\w:]+)"', config))
    parameters = {key: {"string_value": value} for key, value in said.items()}
    model = TritonPythonModel()
    model.initialize(
        {
            "model_config": json.dumps({"parameters": parameters}),
            "model_repository": str(place),
            "model_version": "1",
            "model_instance_device_id": "0",
        }
    )
    module, (ids, _), _ = cached_gpt.build()
    given = [_Tensor("input_ids", ids.numpy()), _Tensor("max_new_tokens", np.array([6]))]
    requests = [SimpleNamespace(inputs=lambda: given), SimpleNamespace(inputs=lambda: given[:1])]
    (tensors, error), (_, missing) = model.execute(requests)
    model.finalize()
    assert error is None
    assert np.array_equal(tensors[0].as_numpy(), cached_gpt.generate(module, ids, 6).numpy())
    assert "max_new_tokens" in missing
