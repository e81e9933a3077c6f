"""config.pbtxt, read by tritonclient's own protobuf."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import text_format

import attngraph
from attngraph.export.target import parse_target
from attngraph.runtimes.triton import package
from tests.runtimes.conftest import Record
from tests.runtimes.encoders import MODELS
from tests.runtimes.families import decoder


def read(path: Path) -> Any:
    """Its package wants grpc, which its messages don't need: so their file is loaded alone."""
    client = importlib.util.find_spec("tritonclient")
    assert client is not None
    assert client.submodule_search_locations is not None
    file = Path(client.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return text_format.Parse(path.read_text(), module.ModelConfig())


def _named(message: Any, field: str) -> str:
    """The name of an enum's value."""
    values = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number
    return str(values[getattr(message, field)].name)


@pytest.mark.parametrize("target", ["cpu", "cuda:sm80"])
def test_an_encoder(target: str, tmp_path: Path, record: Record) -> None:
    torch.manual_seed(0)
    module, args, shapes = MODELS["BERT"]()
    made = attngraph.optimize(module.eval(), args, dynamic_shapes=shapes, verify="off")
    made.save(tmp_path / "bert.onnx")
    package(tmp_path / "bert.onnx", tmp_path / "models", None, parse_target(target))
    config = read(tmp_path / "models" / "bert" / "config.pbtxt")
    assert (config.name, config.backend, config.max_batch_size) == ("bert", "onnxruntime", 16)
    said = {port.name: (_named(port, "data_type"), list(port.dims)) for port in config.input}
    assert said == dict.fromkeys(("input_ids", "attention_mask"), ("TYPE_INT64", [-1]))
    assert [(port.name, list(port.dims)) for port in config.output] == [("logits", [2])]
    assert config.HasField("dynamic_batching")
    kind = _named(config.instance_group[0], "kind")
    assert kind == ("KIND_CPU" if target == "cpu" else "KIND_GPU")
    record("tritonclient", "BERT", f"config.pbtxt for {target}")


def test_a_decoder(tmp_path: Path, record: Record) -> None:
    made = attngraph.optimize_decoder(decoder("Llama"), verify="off")
    (tmp_path / "out").mkdir()
    made.save(tmp_path / "out" / "model.onnx")
    package(tmp_path / "out", tmp_path / "models", "llama", parse_target("cpu"))
    config = read(tmp_path / "models" / "llama" / "config.pbtxt")
    assert (config.backend, config.max_batch_size) == ("python", 0)
    assert [port.name for port in config.input if port.optional] == ["attention_mask"]
    assert config.parameters["target"].string_value == "cpu"
    record("tritonclient", "Llama", "config.pbtxt for cpu")
