"""What docs/onnxruntime.md says of torch and onnxruntime, which our code works around.

A test that fails here after an upgrade says that a workaround may go.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from torch.torch_version import TorchVersion

FLOAT = onnx.TensorProto.FLOAT


def _session(
    node: onnx.NodeProto, inputs: list[str], outputs: list[str]
) -> onnxruntime.InferenceSession:
    graph = helper.make_graph(
        [node],
        "fact",
        [helper.make_tensor_value_info(name, FLOAT, None) for name in inputs],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)


@pytest.mark.parametrize(
    ("fill", "in_onnxruntime", "in_torch"),
    [
        (torch.finfo(torch.float32).min, "zero", "mean"),
        (-1e30, "mean", "mean"),
        (-1e29, "mean", "mean"),
        (float("-inf"), "zero", "zero"),
    ],
)
def test_a_fully_masked_row(fill: float, in_onnxruntime: str, in_torch: str) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 4), torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    mask = torch.full((2, 3), fill)
    expected = {"zero": torch.zeros(1, 2, 4), "mean": value.mean(1, keepdim=True).expand(1, 2, 4)}
    eager = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    node = helper.make_node("Attention", list("qkvm"), ["y"], q_num_heads=1, kv_num_heads=1)
    feeds = {"q": query, "k": key, "v": value, "m": mask}
    (result,) = _session(node, list("qkvm"), ["y"]).run(
        None, {n: t.numpy() for n, t in feeds.items()}
    )
    torch.testing.assert_close(eager, expected[in_torch])
    torch.testing.assert_close(torch.from_numpy(result), expected[in_onnxruntime])


def test_skip_layer_norm_takes_the_shape_of_a_smaller_input() -> None:
    node = helper.make_node(
        "SkipLayerNormalization", ["x", "skip", "w"], ["y"], domain="com.microsoft", epsilon=1e-5
    )
    random = np.random.default_rng(0)
    x, skip = (random.normal(size=(batch, 5, 8)).astype(np.float32) for batch in (1, 2))
    feeds = {"x": x, "skip": skip, "w": np.ones(8, np.float32)}
    (result,) = _session(node, ["x", "skip", "w"], ["y"]).run(None, feeds)
    assert result.shape == (1, 5, 8)


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13", reason="torch 2.11 goes by the content of the file"
)
def test_torch_load_goes_by_the_extension(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2)}
    torch.save(weights, tmp_path / "w.pt")
    torch.save(weights, tmp_path / "w.safetensors")
    assert torch.load(tmp_path / "w.pt", weights_only=True).keys() == weights.keys()
    with pytest.raises(Exception, match="header"):
        torch.load(tmp_path / "w.safetensors", weights_only=True)


@pytest.mark.skipif(onnxruntime.__version__ >= "1.32", reason="1.32 takes them")
def test_onnxruntime_rejects_bools_of_torch() -> None:
    with pytest.raises(RuntimeError, match="Unsupported code"):
        onnxruntime.OrtValue.from_dlpack(torch.ones(3, dtype=torch.bool))


def test_an_input_that_is_an_output_is_the_same_memory() -> None:
    session = _session(helper.make_node("Identity", ["x"], ["y"]), ["x"], ["x", "y"])
    x = torch.ones(3)
    same, other = session.run_with_ort_values(
        ["x", "y"], {"x": onnxruntime.OrtValue.from_dlpack(x)}
    )
    assert same.data_ptr() == x.data_ptr()
    assert other.data_ptr() != x.data_ptr()
