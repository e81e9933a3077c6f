"""An ONNX file reads its weights from its own folder, or isn't opened."""

from __future__ import annotations

from pathlib import Path

import numpy
import onnx
import pytest
from onnx import TensorProto, helper

from attngraph.errors import LoadError
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target


def _write(path: Path, location: str, more: dict[str, int]) -> None:
    """y = x · W, where W (4, 4) lies at `location`."""
    weight = TensorProto(
        name="w",
        data_type=TensorProto.FLOAT,
        dims=[4, 4],
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in {"location": location, **more}.items():
        weight.external_data.add(key=key, value=str(value))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy"]
    product = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([product], "g", ends[:1], ends[1:], [weight])
    opsets = [helper.make_opsetid("", 20)]
    onnx.save_model(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


@pytest.mark.parametrize(
    ("location", "more"),
    [
        ("../secret", {}),
        ("{folder}/secret", {}),
        ("link", {}),
        ("missing", {}),
        ("weights", {"offset": -4}),
        ("weights", {"offset": 2**62}),
        ("weights", {"length": 2**62}),
    ],
)
def test_weights_elsewhere_are_not_read(
    location: str, more: dict[str, int], tmp_path: Path
) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    for path in (tmp_path / "secret", inside / "weights"):
        path.write_bytes(numpy.ones(16, numpy.float32).tobytes())
    (inside / "link").symlink_to(tmp_path / "secret")
    path = inside / "model.onnx"
    _write(path, "weights", {})
    Session.open(path, Target("cpu")).close()  # the control
    _write(path, location.format(folder=tmp_path), more)
    with pytest.raises(LoadError, match=r"can't open the ONNX file .*model\.onnx"):
        Session.open(path, Target("cpu"))
