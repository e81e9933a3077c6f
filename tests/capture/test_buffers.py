"""Buffers that a model writes: layers may share them, and a compile leaves them as they were."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.frontend.capture import from_program
from attngraph.ir import interpret

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
DIMS = ({0: Dim("batch"), 1: Dim("seq", max=64)},)


class Table(nn.Module):
    """Angles of positions, kept in a buffer as rotary embeddings keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.speeds = nn.Parameter(torch.rand(4))
        self.register_buffer("kept", torch.zeros(64, 4), persistent=False)

    def forward(self, length: int) -> Tensor:
        self.kept[:length] = self.kept[:length] + (torch.arange(length)[:, None] * self.speeds)
        return self.kept[:length].cos()


class Shared(nn.Module):
    """Two layers with one table: the second adds to what the first has written."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleDict({"table": Table(), "linear": nn.Linear(4, 4)})
        self.second = nn.ModuleDict({"table": self.first["table"], "linear": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer["linear"](x) * layer["table"](x.shape[1])
        return x.softmax(-1)


def test_a_buffer_that_layers_share_is_one() -> None:
    model = Shared().requires_grad_(False).eval()
    compiled = attngraph.optimize(copy.deepcopy(model), (X,), dynamic_shapes=DIMS)
    for batch, length in ((1, 1), (3, 9), (2, 64)):
        x = torch.randn(batch, length, 4)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), copy.deepcopy(model)(x))


def test_a_shared_buffer_of_a_file_is_one(tmp_path: Path) -> None:
    """Read from a file its names are of two tensors over one memory."""
    model = Shared().requires_grad_(False).eval()
    program = torch.export.export(copy.deepcopy(model), (X,), dynamic_shapes=DIMS)
    torch.export.save(program, tmp_path / "model.pt2")
    graph = from_program(torch.export.load(tmp_path / "model.pt2")).graph
    for batch, length in ((1, 1), (3, 9)):
        x = torch.randn(batch, length, 4)
        torch.testing.assert_close(interpret(graph, [x])[0], copy.deepcopy(model)(x))


class Caches(nn.Module):
    """Writes a part of a buffer, and attends over what is written."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4, tokens, 16))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        self.kept[:batch, :seq] = x
        keys = self.kept[:batch, :seq]
        return (x @ keys.mT).softmax(-1) @ keys


@pytest.mark.parametrize("tokens", [12, 1 << 15])
def test_a_compile_leaves_buffers_as_they_were(tokens: int) -> None:
    """Large ones as well: runs that settle which sizes a trace is right for have their own."""
    module, x = Caches(tokens).eval(), torch.randn(2, 5, 16)
    optimized = attngraph.optimize(module, (x,), dynamic_shapes=({0: "batch", 1: "seq"},))
    assert not module.kept.any()
    for batch, seq in ((1, 1), (3, 9), (4, 12)):
        x = torch.randn(batch, seq, 16)
        torch.testing.assert_close(optimized(x), copy.deepcopy(module)(x))
