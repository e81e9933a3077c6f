"""The Python surface: the names of the package, and the steps one by one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

import attngraph
from attngraph.errors import CaptureError, ParityError, UsageError


class Attention(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return torch.softmax(query @ key.transpose(-1, -2) / 4.0, dim=-1) @ key


def _args() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 16, generator=random), torch.randn(2, 5, 16, generator=random)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, attngraph; assert attngraph.__version__ and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_runs_from_its_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where nothing can be installed: its version is then not known."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("attngraph.versions.version", version)
    optimized = attngraph.optimize(Attention(), _args(), verify="off")
    assert optimized.model.producer_version == "0+source"


def test_the_dialect_is_known_to_the_ir_alone() -> None:
    code = "from attngraph.ir.ops import op_def; assert op_def('attn.attention').doc"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", attngraph.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(attngraph, name) is not None
    assert name in dir(attngraph)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(attngraph, "optimise")
    assert not hasattr(attngraph.export, "to_tflite")


def test_the_steps_make_what_optimize_makes(tmp_path: Path) -> None:
    graph = attngraph.capture(Attention(), _args())
    results = attngraph.passes.run(graph, "canonicalize,fuse-attention,dce")
    assert [result.name for result in results] == ["canonicalize", "fuse-attention", "dce"]
    assert [node.op for node in graph].count("attn.attention") == 1
    model = attngraph.export.to_onnx(graph)
    optimized = attngraph.optimize(Attention(), _args())
    assert [node.op_type for node in model.graph] == [
        node.op_type for node in optimized.model.graph
    ]
    optimized.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), _args(), strict=True)}
    direct = optimized(*_args())
    assert isinstance(direct, torch.Tensor)
    assert torch.equal(torch.from_numpy(session.run(None, feeds)[0]), direct)


class Filled(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = (query @ key.transpose(-1, -2)).masked_fill(~mask, torch.finfo(query.dtype).min)
        return torch.softmax(scores, dim=-1) @ key


def test_an_assumption_that_the_sample_breaks_is_an_error() -> None:
    mask = torch.ones(2, 3, 5, dtype=torch.bool).tril()
    assume = ["no-fully-masked-rows"]
    optimized = attngraph.optimize(Filled(), (*_args(), mask), assume=assume)
    assert any("at 1 attention." in note for note in optimized.report.notes)
    mask[0, 1] = False
    with pytest.raises(ParityError, match="Assumed no-fully-masked-rows"):
        attngraph.optimize(Filled(), (*_args(), mask), assume=assume)
    assert attngraph.optimize(Filled(), (*_args(), mask)).report.parity.passed


class Positions(torch.nn.Module):
    """Adds positions of which the first 8 are at hand, as a table that an earlier call left."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        table = self.table if length <= 8 else torch.arange(float(length))
        return x + table[:length]


def test_samples_are_a_tuple_and_a_model_is_a_module() -> None:
    pair: Any = torch.randn(2, 3, 16)  # whose rows are not a query and a key
    steps: tuple[Callable[..., Any], ...] = (
        attngraph.capture,
        attngraph.optimize,
        attngraph.optimize_decoder,
    )
    for step in steps:
        with pytest.raises(UsageError, match="give a tuple of the inputs, such as"):
            step(Attention(), pair)
        with pytest.raises(UsageError, match="A function is no torch"):
            step(lambda x: x, (pair,))
    with pytest.raises(UsageError, match="give a list of names, such as"):
        attngraph.optimize(Attention(), _args(), assume="no-fully-masked-rows")


def test_autocast_is_refused() -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(UsageError, match="Autocast is on, and a trace doesn't have it"),
    ):
        attngraph.optimize(Attention(), _args())


def test_several_threads_may_compile() -> None:
    with ThreadPoolExecutor(4) as pool:
        graphs = list(pool.map(lambda _: attngraph.capture(Attention(), _args()), range(8)))
    assert {len(graph) for graph in graphs} == {5}
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_report_prints_in_a_line_for_each_thing() -> None:
    optimized = attngraph.optimize(Attention(), _args())
    first, site, parity = str(optimized.report).splitlines()
    assert first == "Attention for cpu in fp32: 5 → 1 nodes"
    assert "fused into attn.attention: " in site
    assert parity.startswith("parity passed")


class Table(torch.nn.Module):
    """Adds positions of which there are 8."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length <= 8:
            return x + self.table[:length]
        raise ValueError("too long")


def test_positions_beyond_those_at_hand_are_computed_at_every_size() -> None:
    """The sample alone leads to a table of 8; at a longer one the model computes any number."""
    asked = ({1: torch.export.Dim("seq", min=2, max=64)},)
    optimized = attngraph.optimize(Positions(), (torch.zeros(2, 5),), dynamic_shapes=asked)
    assert optimized.report.dims == {"seq": (1, 64)}
    for length in (2, 5, 8, 9, 12, 64):
        found = optimized.run([torch.zeros(2, length)])[0]
        assert (found == torch.arange(float(length))).all()


def test_a_size_out_of_the_range_that_was_compiled_is_an_error() -> None:
    x = torch.zeros(2, 5)
    asked = ({1: torch.export.Dim("seq", min=2, max=64)},)
    with pytest.raises(CaptureError, match=r"can't be 2\.\.64: .* seq is at most 8 at"):
        attngraph.optimize(Table(), (x,), dynamic_shapes=asked)
    optimized = attngraph.optimize(Table(), (x,), dynamic_shapes=({1: torch.export.Dim("seq")},))
    (note,) = optimized.report.notes
    assert note.startswith("Dim 'seq' is at most 8: the model demands it at ")
    assert "if length <= 8" in note
    assert optimized.report.dims == {"seq": (1, 8)}
    assert (optimized.run([torch.zeros(2, 8)])[0] == torch.arange(8.0)).all()
    with pytest.raises(UsageError, match="x's axis 1 is 9; dim 'seq' was compiled for at most 8"):
        optimized(torch.zeros(2, 9))
