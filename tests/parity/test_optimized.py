"""A compiled module is called by position or name, from threads, and after it was saved."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.errors import UsageError
from attngraph.export.files.save import save, to_session
from attngraph.export.target import Target
from attngraph.optimized import Optimized
from tests.parity.block import WIDTH, build, tensor_of


def _pickled(found: Optimized) -> Optimized:
    again: Optimized = pickle.loads(pickle.dumps(found))
    return again


@pytest.fixture(scope="module")
def optimized() -> Optimized:
    module, args = build()
    return attngraph.optimize(module, args, verify="off")


def test_inputs_go_by_position_or_by_name(optimized: Optimized) -> None:
    _, (x, mask) = build()
    expected = tensor_of(optimized(x, mask))
    for output in (optimized(x, mask=mask), optimized(mask=mask, x=x), optimized.run([x, mask])[0]):
        assert torch.equal(tensor_of(output), expected)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda f, x, m: f(x, m, m), "3 inputs were given; there are x, mask"),
        (lambda f, x, m: f(x), "takes the inputs x, mask; got x"),
        (lambda f, x, m: f(x, x=m), "The input x was given twice"),
        (lambda f, x, m: f(x, padding=m), "takes the inputs x, mask; got x, padding"),
        (lambda f, x, m: f(x.double(), m), "'x' is float64; the model takes float32"),
        (lambda f, x, m: f(x, m.long()), "'mask' is int64; the model takes bool"),
        (lambda f, x, m: f(x[:, :, :8], m), r"'x' has shape \(3, 7, 8\)"),
        (lambda f, x, m: f(x[0], m), r"'x' has shape \(7, 16\)"),
        (lambda f, x, m: f(x, m.numpy()), "'mask' must be a torch.Tensor, not ndarray"),
    ],
)
def test_wrong_inputs_get_a_sentence(
    call: Callable[[Optimized, Tensor, Tensor], object], reason: str, optimized: Optimized
) -> None:
    _, (x, mask) = build()
    with pytest.raises(UsageError, match=reason) as caught:
        call(optimized, x, mask)
    assert str(caught.value).endswith(".")


def test_threads_share_one_session() -> None:
    module, (x, mask) = build()
    optimized = attngraph.optimize(module, (x, mask), verify="off")  # its session isn't open yet
    outputs: list[Tensor | None] = [None] * 8
    start = threading.Barrier(len(outputs))

    def work(index: int) -> None:
        start.wait()
        for _ in range(10):
            outputs[index] = tensor_of(optimized((index + 1) * x, mask))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(outputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, output in enumerate(outputs):
        assert output is not None
        assert torch.equal(output, tensor_of(optimized((index + 1) * x, mask)))


def test_threads_may_call_it_at_different_shapes() -> None:
    """While the main thread opens it anew, with other options."""
    module, args = build()
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    optimized = attngraph.optimize(module, args, dynamic_shapes=(dims, dims), verify="off")
    inputs = []
    for index in range(6):
        x = torch.randn(1 + index % 3, 2 + index, WIDTH)
        inputs.append((x, torch.ones(x.shape[:2], dtype=torch.bool)))
    expected = [tensor_of(optimized(*pair)) for pair in inputs]
    outputs: list[list[Tensor]] = [[] for _ in inputs]

    def work(index: int) -> None:
        for _ in range(20):
            outputs[index].append(tensor_of(optimized(*inputs[index])))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for _ in range(5):
        optimized.open(spinning=False)
    for thread in threads:
        thread.join()
    for found, wanted in zip(outputs, expected, strict=True):
        assert len(found) == 20
        for output in found:
            torch.testing.assert_close(output, wanted)


def test_it_opens_with_options_and_after_a_close(optimized: Optimized) -> None:
    _, (x, mask) = build()
    expected = optimized(x, mask)
    before = optimized.session
    opened = optimized.open(threads=1, graph_optimization="off")
    assert optimized.session is opened
    torch.testing.assert_close(optimized(x, mask), expected)
    with pytest.raises(UsageError, match="has no option 'device_id'"):
        optimized.open(provider_options={"device_id": 0})
    assert optimized.session is opened
    assert before.run([x, mask])  # whoever still has it may finish
    optimized.close()
    assert optimized.session is not opened
    torch.testing.assert_close(optimized(x, mask), expected)


@pytest.mark.parametrize("external_above", [1 << 30, 0])
def test_a_saved_file_gives_the_same_output(
    external_above: int, optimized: Optimized, tmp_path: Path
) -> None:
    _, (x, mask) = build()
    expected = tensor_of(optimized(x, mask)).numpy()
    path = tmp_path / "model.onnx"
    save(optimized.model, path, external_above=external_above)
    files = ["model.onnx"] + ["model.onnx_data"] * (external_above == 0)
    assert sorted(file.name for file in tmp_path.iterdir()) == files
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [put.name for put in session.get_inputs()] == ["x", "mask"]
    (output,) = session.run(None, {"x": x.numpy(), "mask": mask.numpy()})
    np.testing.assert_array_equal(output, expected)
    with to_session(optimized.model, Target("cpu"), external_above=external_above) as opened:
        np.testing.assert_array_equal(opened.run([x, mask])[0].numpy(), expected)


def test_saving_by_name_is_saving_whole(optimized: Optimized, tmp_path: Path) -> None:
    optimized.save(tmp_path / "a.onnx")
    save(optimized.model, tmp_path / "b.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


@pytest.mark.parametrize("made", [copy.deepcopy, copy.copy, _pickled])
def test_a_copy_opens_a_session_of_its_own(
    optimized: Optimized, made: Callable[[Optimized], Optimized]
) -> None:
    _, (x, mask) = build()
    expected = tensor_of(optimized(x, mask))
    again = made(optimized)
    assert torch.equal(tensor_of(again(x, mask)), expected)
    assert again.session is not optimized.session
    optimized.close()
    assert torch.equal(tensor_of(again(x, mask)), expected)


def test_a_pickled_model_is_called_as_the_model_is() -> None:
    """The holes of its signature, where tensors go, are told by what they are."""

    class Scales(torch.nn.Module):
        def forward(self, x: Tensor, *, factor: float) -> dict[str, Any]:
            return {"scaled": (x * factor).softmax(-1), "factor": factor}

    x = torch.randn(2, 3)
    found = _pickled(attngraph.optimize(Scales(), (x,), kwargs={"factor": 2.0}))(x, factor=2.0)
    assert found["factor"] == 2.0
    torch.testing.assert_close(found["scaled"], (x * 2).softmax(-1))


@pytest.mark.parametrize("made", [copy.deepcopy, pickle.dumps])
def test_a_session_is_not_copied(optimized: Optimized, made: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match="can't be copied or pickled"):
        made(optimized.session)
