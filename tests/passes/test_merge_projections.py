"""What a fixture can't show of merge-projections: the memory behind the weights."""

from __future__ import annotations

import weakref

import pytest
import torch

from attngraph.compiling.pipeline import pipeline
from attngraph.ir import Graph, format_graph, parse
from attngraph.mapped import LARGE
from attngraph.passes import run
from attngraph.passes.weights.merge_projections import MergeProjections

QKV = """graph @main {
  dim seq = 5 in 1..
  input %x : f32[1, seq, 8]
  parameter %q.weight : f32[8, 8]
  parameter %k.weight : f32[8, 8]
  parameter %v.weight : f32[8, 8]
  parameter %table : f32[8, 8]
  %q = aten.linear(%x, %q.weight)
  %k = aten.linear(%x, %k.weight)
  %v = aten.linear(%x, %v.weight)
  %o = attn.attention(%q, %k, %v) {heads = 2, kv_heads = 2, scale = 0.5}
  %p = aten.matmul(%o, %table)
  return %p
}
"""
WEIGHTS = ("q.weight", "k.weight", "v.weight", "table")


def _merged(graph: Graph) -> list[str]:
    run(graph, "merge-projections")
    return [name for name in graph.constants if "-" in name]


def test_each_weight_is_stored_once() -> None:
    weights = {name: torch.randn(8, 8) for name in WEIGHTS}
    graph = parse(QKV, weights)
    old = [weakref.ref(weights[name]) for name in WEIGHTS[:3]]
    expected = torch.cat([weights[name] for name in WEIGHTS[:3]])
    weights.clear()
    assert _merged(graph) == ["q-k-v.weight"]
    assert set(graph.constants) == {"q-k-v.weight", "table"}
    assert torch.equal(graph.constants["q-k-v.weight"].data, expected)
    assert [reference() for reference in old] == [None, None, None]


def test_a_weight_tied_under_another_name_stays() -> None:
    weights = {name: torch.randn(8, 8) for name in WEIGHTS}
    weights["table"] = weights["v.weight"].view(8, 8)
    assert _merged(parse(QKV, weights)) == ["q-k.weight"]


def test_weights_without_data_merge_by_type() -> None:
    graph = parse(QKV)
    assert _merged(graph) == ["q-k-v.weight"]
    merged = graph.constants["q-k-v.weight"]
    assert merged.data is None
    assert merged.shape == (24, 8)
    assert format_graph(parse(format_graph(graph))) == format_graph(graph)


def test_weights_on_the_meta_device_merge() -> None:
    weights = {name: torch.empty(8, 8, device="meta") for name in WEIGHTS}
    assert _merged(parse(QKV, weights)) == ["q-k-v.weight"]


@pytest.mark.parametrize(("more", "merges"), [(0, False), (1, True)])
def test_the_projections_of_a_large_model_stay_apart_on_a_cpu(more: int, merges: bool) -> None:
    graph = parse(QKV)  # of four weights
    (item,) = (item for item in pipeline(apart=True) if isinstance(item, MergeProjections))
    assert item.apart_from == LARGE
    MergeProjections(apart_from=4 * 8 * 8 * 4 + more).run(graph)
    assert any("-" in name for name in graph.constants) == merges
    assert all(item.apart_from is None for item in pipeline() if isinstance(item, MergeProjections))
