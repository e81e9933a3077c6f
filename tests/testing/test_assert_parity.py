"""What is for the tests of users: it passes for the model's own file, and fails for another's."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import UsageError
from attngraph.testing import assert_parity

pytest_plugins = ["pytester"]


class Model(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(8, 8), scale

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return self.linear(x).masked_fill(~mask[..., None], 0) * self.scale


ARGS = (torch.randn(2, 5, 8),)
KWARGS = {"mask": torch.ones(2, 5, dtype=torch.bool)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    batch, seq = Dim("batch", max=9), Dim("seq", max=40)
    shapes = {"x": {0: batch, 1: seq}, "mask": {0: batch, 1: seq}}
    made = attngraph.optimize(Model(), ARGS, kwargs=KWARGS, dynamic_shapes=shapes)
    found = tmp_path_factory.mktemp("testing") / "model.onnx"
    made.save(found)
    return found


def test_a_file_is_held_against_its_model_at_the_sizes_that_it_declares(path: Path) -> None:
    (found,) = assert_parity(Model(), path, ARGS, KWARGS)
    cases = {output.case for output in found.parity.outputs}
    assert len(cases) > 2
    assert any("seq=" in case for case in cases)


def test_a_model_that_went_on_is_another(path: Path) -> None:
    with pytest.raises(AssertionError, match="doesn't compute what Model does"):
        assert_parity(Model(scale=1.01), path, ARGS, KWARGS)
    with pytest.raises(UsageError):
        assert_parity(nn.Bilinear(8, 8, 3), path, (ARGS[0], ARGS[0]))


def test_a_file_says_what_it_was_made_of(path: Path) -> None:
    said = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert said["attngraph.model"] == "Model"
    assert json.loads(said["attngraph.versions"])["torch"] == version("torch")
    assert json.loads(said["attngraph.ranges"])["dims"] == {"batch": [1, 9], "seq": [1, 40]}


def test_the_fixture_compiles_and_compares(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("pytest_plugins = ['attngraph.testing.plugin']")
    pytester.makepyfile("""
        import torch

        class Drawn(torch.nn.Module):
            def forward(self, x):
                return x + torch.rand(())

        def test_it_is_compiled(onnx_parity):
            assert onnx_parity(torch.nn.Linear(4, 4), (torch.randn(2, 4),)).exists()

        def test_it_is_not(onnx_parity):
            onnx_parity(Drawn(), (torch.randn(2, 4),))
    """)
    pytester.runpytest_inprocess("-p", "no:xdist").assert_outcomes(passed=1, failed=1)
