"""Windows of keys: read from modules that lay them out in several ways, and not from near ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attngraph.analysis.attention.window_reading import may_be_windows, read_windows
from attngraph.analysis.attention.windows import FEATURE, Windows
from attngraph.compiling.pipeline import pipeline
from attngraph.frontend.capture import capture
from attngraph.ir import Graph
from attngraph.passes.attention.block_windows import _sizes
from tests.parity.formulations import FORMULATIONS

SIZES = [{"b": 2, "s": 24}, {"b": 3, "s": 1}, {"b": 1, "s": 9}]


def _graph(name: str, *, dynamic: bool = False) -> Graph:
    formulation = FORMULATIONS[name]
    shapes = formulation.dynamic_shapes if dynamic else None
    module: nn.Module = formulation.module()
    graph = capture(module, formulation.args(), dynamic_shapes=shapes).graph
    for each in pipeline():
        if each.name == "block-windows":
            break
        each.run(graph)
    return graph


def _read(name: str, *, dynamic: bool = False) -> Windows | None:
    graph = _graph(name, dynamic=dynamic)
    (softmax,) = (node for node in graph if node.op == "aten.softmax.int")
    assert may_be_windows(softmax)
    return read_windows(softmax, SIZES if dynamic else [{}], set())


@pytest.mark.parametrize(
    ("name", "offsets"),
    [
        ("Shifted", range(-2, 3)),
        ("ShiftedToThePast", range(-2, 1)),
        ("Dilated", range(-4, 5, 2)),
        ("Diagonals", range(-2, 3)),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_offsets_are_read(name: str, offsets: range, dynamic: bool) -> None:
    found = _read(name, dynamic=dynamic)
    assert found is not None
    assert found.offsets == offsets
    (scores,) = found.scores
    assert scores.query is not None
    assert scores.factor == pytest.approx(6**-0.5)
    # One packed projection, of which each part is cut: (b, s, (3 h, d)).
    assert scores.query.value is scores.key.value is found.value.value
    starts = [placed.dims[2][0].start for placed in (scores.query, scores.key, found.value)]
    assert starts == [0, 3, 6]


@pytest.mark.parametrize("name", ["Chunked", "Overlapping", "PaddedRows"])
def test_blocks_are_read(name: str) -> None:
    found = _read(name)
    assert found is not None
    assert found.offsets == range(-2, 3)
    assert len(found.cleared) == (name == "PaddedRows")
    assert [each.query is None for each in found.scores] == [False, True][: len(found.scores)]
    assert set(found.order) == {0, 1, 2, FEATURE}


@pytest.mark.parametrize(
    "name", ["ValuesOfNeighbours", "FlippedWeights", "SeenEnds", "LastRowAlone", "AnotherKeyOnce"]
)
def test_near_misses_are_not(name: str) -> None:
    assert _read(name) is None


def test_a_layout_that_holds_at_one_size_alone_is_not_read() -> None:
    """At 5 tokens the keys that are never off the end are those of the window."""

    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            padded = nn.functional.pad(x, (0, 0, 1, 1))
            shifts = [padded[:, n : n + x.shape[1]] for n in range(3)]
            scores = torch.stack([(x * each).sum(-1) for each in shifts], -1)
            places = torch.arange(x.shape[1])[:, None] + torch.arange(-1, 2)
            hidden = (places < 0) | (places >= 5) | (places >= x.shape[1])
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()
            return (weights[..., None] * torch.stack(shifts, 2)).sum(2)

    shapes = ({1: torch.export.Dim("s", min=2)},)
    graph = capture(Fixed(), (torch.randn(2, 5, 4),), dynamic_shapes=shapes).graph
    for each in pipeline():
        if each.name == "block-windows":
            break
        each.run(graph)
    (softmax,) = (node for node in graph if node.op == "aten.softmax.int")
    assert read_windows(softmax, [{"s": 5}, {"s": 9}], set()) is None


def test_a_start_that_another_size_sets_is_not_read() -> None:
    """The keys begin behind as many places of a cache as another input is long."""

    class Behind(nn.Module):
        def forward(self, x: torch.Tensor, cache: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
            keys = cache[:, past.shape[0] :][:, : x.shape[1]]
            padded = nn.functional.pad(keys, (0, 0, 1, 1))
            shifts = [padded[:, n : n + x.shape[1]] for n in range(3)]
            scores = torch.stack([(x * each).sum(-1) for each in shifts], -1)
            places = torch.arange(x.shape[1])[:, None] + torch.arange(-1, 2)
            hidden = (places < 0) | (places >= x.shape[1])
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            return (weights[..., None] * torch.stack(shifts, 2)).sum(2)

    args = torch.randn(2, 5, 4), torch.randn(2, 40, 4), torch.zeros(3)
    shapes = (None, None, {0: torch.export.Dim("p", min=2, max=30)})
    graph = capture(Behind(), args, dynamic_shapes=shapes).graph
    for each in pipeline():
        if each.name == "block-windows":
            break
        each.run(graph)
    (softmax,) = (node for node in graph if node.op == "aten.softmax.int")
    assert read_windows(softmax, [{"p": 3}], set()) is not None
    assert read_windows(softmax, _sizes(graph, softmax), set()) is None


@pytest.mark.parametrize("which", ["one value", "one query"])
def test_what_has_no_place_along_the_sequence_is_not_read(which: str) -> None:
    class One(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            length = k.shape[1]
            q = q[:, :1].expand(-1, length, -1) if which == "one query" else q
            keys, values = (nn.functional.pad(a, (0, 0, 1, 0)) for a in (k, v))
            scores = torch.stack([(q * keys[:, n : n + length]).sum(-1) for n in range(2)], -1)
            first = (torch.arange(length) < 1)[:, None] & (torch.arange(2) < 1)
            weights = scores.masked_fill(first, -torch.inf).softmax(-1)
            taken = [values[:, n : n + length] for n in range(2)]
            if which == "one value":
                taken = [v[:, :1].expand(-1, length, -1)] * 2
            return (weights[..., None] * torch.stack(taken, 2)).sum(2)

    graph = capture(One(), tuple(torch.randn(2, 7, 4) for _ in range(3))).graph
    for each in pipeline():
        if each.name == "block-windows":
            break
        each.run(graph)
    (softmax,) = (node for node in graph if node.op == "aten.softmax.int")
    assert may_be_windows(softmax)
    assert read_windows(softmax, [{}], set()) is None


def test_layers_alike_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _graph("Overlapping")
    (softmax,) = (node for node in graph if node.op == "aten.softmax.int")
    known: set[object] = set()
    assert read_windows(softmax, [{}], known) is not None
    assert len(known) == 1
    reads = []
    from attngraph.analysis.attention import window_reading

    original = window_reading._alike
    monkeypatch.setattr(
        window_reading, "_alike", lambda *args: reads.append(args[-1]) or original(*args)
    )
    assert read_windows(softmax, [{}], known) is not None
    assert len(reads) == 1
    assert len(known) == 1
