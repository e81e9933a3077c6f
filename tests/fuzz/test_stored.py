"""Files with weights in few bits are taken apart, and what is wrong with one part is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from attngraph.compiling.compiler import optimize
from tests.fuzz.oracle import Forward, Oracle, Rounding
from tests.fuzz.stored import _put_back, differs, taken_apart

BITS = pytest.mark.parametrize("weights", ["int8", "int4"])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A model, and a folder with its file in floats and in few bits."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(40, 32), nn.Tanh(), nn.Linear(32, 32)).requires_grad_(False)
    folder, x = tmp_path_factory.mktemp("stored"), torch.randn(3, 40)
    optimize(module, (x,), verify="off").save(folder / "floats.onnx")
    for weights in ("int8", "int4"):
        found = optimize(module, (x,), verify="off", weights=weights)  # type: ignore[arg-type]
        found.save(folder / f"{weights}.onnx")
    return module, folder


def run_of(path: Path) -> Forward:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    [name] = [value.name for value in session.get_inputs()]
    return lambda x: [torch.from_numpy(session.run(None, {name: x.numpy()})[0])]


def told(module: nn.Module, folder: Path, file: Path) -> str:
    """What is wrong with a file, as a trial tells it."""
    parts, said = taken_apart(file, folder / "floats.onnx", module)
    if said:
        return said
    back, *held = map(run_of, parts)
    oracle = Oracle(module, _doubled(module), Rounding())
    x: Tensor = torch.randn(3, 40)
    return oracle.differs(back, (x,), "back") or differs(run_of(file), held, (x,), "held")


def _doubled(module: nn.Module) -> nn.Module:
    other = nn.Sequential(nn.Linear(40, 32), nn.Tanh(), nn.Linear(32, 32)).double()
    other.load_state_dict(module.state_dict())
    return other.requires_grad_(False)


def _changed(file: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    model = onnx.load(file)
    change(model)
    path = file.with_name("changed.onnx")
    onnx.save(model, path)
    return path


def _tensor(model: onnx.ModelProto, place: int) -> onnx.TensorProto:
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    return next(t for t in model.graph.initializer if t.name == node.input[place])


@BITS
def test_a_right_file_has_nothing_wrong(compiled: tuple[nn.Module, Path], weights: str) -> None:
    module, folder = compiled
    assert not told(module, folder, folder / f"{weights}.onnx")


@BITS
def test_a_code_that_is_not_the_nearest_is_told(
    compiled: tuple[nn.Module, Path], weights: str
) -> None:
    """One step further than rounding takes it: no float64 bound could see this in int4."""
    module, folder = compiled

    def change(model: onnx.ModelProto) -> None:
        tensor = _tensor(model, 1)
        codes = numpy_helper.to_array(tensor).copy()
        codes[0, 0, 0] ^= 1
        tensor.CopyFrom(numpy_helper.from_array(codes, tensor.name))

    assert "half a step" in told(module, folder, _changed(folder / f"{weights}.onnx", change))


@BITS
def test_a_bias_that_is_slightly_off_is_told(
    compiled: tuple[nn.Module, Path], weights: str
) -> None:
    module, folder = compiled

    def change(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.dims == [32] and t.data_type == 1)
        moved = numpy_helper.to_array(tensor) + np.float32(1e-4)
        tensor.CopyFrom(numpy_helper.from_array(moved, tensor.name))

    assert "back: output 0" in told(module, folder, _changed(folder / f"{weights}.onnx", change))


def test_a_run_that_is_not_of_its_codes_is_told(compiled: tuple[nn.Module, Path]) -> None:
    module, folder = compiled
    parts, _ = taken_apart(folder / "int4.onnx", folder / "floats.onnx", module)
    held, x = [run_of(part) for part in parts[1:]], torch.randn(3, 40)
    assert not differs(run_of(folder / "int4.onnx"), held, (x,), "held")
    assert differs(lambda t: [module(t)], held, (x,), "held")


def test_a_column_that_two_matrices_have_is_of_the_one_that_codes_fit_in_most() -> None:
    """A weight as it is, and scaled by a norm that is near 1 for one feature."""
    draw, step = np.random.default_rng(0), np.full((16, 8), 0.1, np.float32)
    own = draw.standard_normal((16, 8)).astype(np.float32)
    scaled = own * np.linspace(2, 3, 8, dtype=np.float32)
    scaled[:, 5] = own[:, 5] + 0.01
    codes = (scaled / 0.1).round() * np.float32(0.1)
    codes[:, 5] = own[:, 5]
    found = _put_back(codes, step, np.zeros((16, 8), bool), [own, scaled, own[:, :3]])
    assert found is not None
    assert (found == scaled).all()
