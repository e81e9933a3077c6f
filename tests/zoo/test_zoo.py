"""Every example compiles, is right at three lengths, and becomes what its entry says.

Each is compiled once, for all that is asked of it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import pytest
import torch

import attngraph
from attngraph.compiling.pipeline import pipeline
from attngraph.errors import UsageError
from attngraph.export.lowering.lower import lower
from attngraph.frontend.capture import capture
from attngraph.optimized import Optimized
from attngraph.passes import run
from examples.ladder import build_rung
from examples.positions import build_way
from examples.zoo import ENTRIES, Entry

pytestmark = pytest.mark.wide


def _nodes(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Node]:
    for node in graph:
        yield node
        for held in node.attributes.values():
            if held.type == onnx_ir.AttributeType.GRAPH:
                yield from _nodes(held.as_graph())


@functools.cache
def _compiled(name: str) -> tuple[Any, tuple[Any, ...], Optimized]:
    """The module of an entry, its sample and what became of it."""
    module, args, shapes = next(entry for entry in ENTRIES if entry.name == name).build()
    return module, args, attngraph.optimize(module, args, dynamic_shapes=shapes)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_example_becomes_what_its_entry_says(entry: Entry) -> None:
    _, _, optimized = _compiled(entry.name)
    parity = optimized.report.parity
    assert parity is not None
    assert parity.passed
    found = [
        site.mask or site.code if site.status == "fused" else site.code
        for site in optimized.report.sites
    ]
    assert len(found) == len(entry.sites)
    for told, expected in zip(found, entry.sites, strict=True):
        assert told.startswith(expected)
    counts = Counter(node.op_type for node in _nodes(optimized.model.graph))
    assert all(counts[operator] == count for operator, count in entry.operators)


def _attentions_and_products(nodes: Iterable[Any]) -> tuple[int, int]:
    counts = Counter(node.op_type for node in nodes)
    attentions = [op for op in counts.elements() if op.endswith(("Attention", "Softmax"))]
    return len(attentions), counts["MatMul"] + counts["Gemm"]


@pytest.mark.parametrize("name", ["per_head", "per_head:build_summed"])
def test_separate_heads_have_one_attention_and_two_gemms_per_layer(
    name: str, tmp_path: Path
) -> None:
    """On the CPU the product of Q, K and V is three, as it would be copied where it is split."""
    module, args, optimized = _compiled(name)
    optimized.save(tmp_path / "model.onnx")
    layers = len(module.attentions)
    assert optimized.report.fused == 12 * layers
    assert {site.merged for site in optimized.report.sites} == {
        "12 attentions are one of 12 heads."
    }
    saved = onnx.load(tmp_path / "model.onnx").graph.node
    assert _attentions_and_products(saved) == (layers, 4 * layers)
    graph = capture(module, args).graph
    run(graph, pipeline())
    assert _attentions_and_products(lower(graph, target="cuda").graph) == (layers, 2 * layers)


@pytest.mark.parametrize("name", ["bert", "bahdanau", "transformer", "per_head"])
def test_rows_of_weights_sum_to_one(name: str) -> None:
    _, args, optimized = _compiled(name)
    views = optimized.attention(*args)
    assert [view.layer for view in views] == list(range(len(views)))
    for view in views:
        torch.testing.assert_close(view.weights.sum(-1), torch.ones(view.weights.shape[:-1]))
        assert view.checked or name == "per_head"


def test_a_layer_or_head_that_is_not_there_is_answered_with_what_there_is() -> None:
    _, args, optimized = _compiled("bert")
    with pytest.raises(UsageError, match=r"there are 0 \(blocks\.0\.attention\), 1"):
        optimized.attention(*args, layers=[2])
    with pytest.raises(UsageError, match="Attention 0 has no head 9; it has 0 to 3"):
        optimized.attention(*args, heads=[9])
    (view,) = optimized.attention(*args, layers=[1], heads=[3])
    assert view.weights.shape[1] == 1
    assert view.heads == (3,)


def _run(built: Any, x: torch.Tensor) -> torch.Tensor:
    module, args, shapes = built
    result: torch.Tensor = attngraph.optimize(module, args, dynamic_shapes=shapes)(x)
    return result


@pytest.mark.parametrize("rung", ["self", "head-by-head", "packed"])
def test_self_attention_is_equivariant_to_permutations(rung: str) -> None:
    x, order = torch.randn(2, 9, 48), torch.randperm(9)
    run = build_rung(rung)
    torch.testing.assert_close(_run(run, x[:, order]), _run(run, x)[:, order])


@pytest.mark.parametrize("way", ["sinusoidal", "rotary", "t5"])
def test_positions_break_the_equivariance(way: str) -> None:
    x, order = torch.randn(2, 9, 48), torch.arange(9).flip(0)
    run = build_way(way)
    moved, straight = _run(run, x[:, order]), _run(run, x)[:, order]
    assert (moved - straight).abs().max() > 1e-3


def _run_by_short_calls(graph: onnx_ir.Graph) -> int:
    """Nodes, without what only a long sequence takes."""
    branches = [node.attributes["then_branch"].as_graph() for node in graph if node.op_type == "If"]
    long = sum(1 for branch in branches for _ in _nodes(branch))
    return sum(1 for _ in _nodes(graph)) - long


@pytest.mark.parametrize("name", ["ladder: masked-self", "gopher", "attentive_decoder:build_dot"])
def test_a_short_call_runs_no_more_nodes_than_without_any_pass(name: str) -> None:
    module, args, optimized = _compiled(name)
    shapes = next(entry for entry in ENTRIES if entry.name == name).build()[2]
    plain = lower(capture(module, args, dynamic_shapes=shapes).graph)
    mine, theirs = (_run_by_short_calls(model.graph) for model in (optimized.model, plain))
    assert mine <= theirs, Counter(node.op_type for node in _nodes(optimized.model.graph))


@pytest.mark.parametrize("longest", [12, 64])
def test_a_short_length_takes_no_branch(longest: int) -> None:
    module, args, (shape,) = build_rung("masked-self")
    seq = torch.export.Dim("seq", max=longest)
    shapes = None if longest == args[0].shape[1] else ({**shape, 1: seq},)
    optimized = attngraph.optimize(module, args, dynamic_shapes=shapes, verify="off")
    counts = Counter(node.op_type for node in _nodes(optimized.model.graph))
    assert counts["Attention"] == 1
    assert not counts["If"]
    assert counts.total() <= 12
