"""What a fixture can't show of merge-heads: its size, the order of operands, and the report."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis import branches
from attngraph.ir import Builder, Graph, Remark, TensorType, Value, verify
from attngraph.passes import PassResult, make
from attngraph.passes.rewriting.findings import recorded
from attngraph.reports.report import sites_of

_DEPTH = 32


def _model(layers: int, heads: int) -> Graph:
    """Layers of single heads over (2, 5, heads · depth), each with a residual."""
    graph, width = Graph(), heads * _DEPTH
    build = Builder(graph)
    x = graph.add_input("x", TensorType(torch.float32, (2, 5, width)))

    def weight(*shape: int) -> Value:
        return graph.add_constant("weight", torch.randn(shape))

    for _ in range(layers):
        contexts = []
        for _ in range(heads):
            qkv = [build("aten.linear", x, weight(_DEPTH, width)) for _ in "qkv"]
            node = build.node("attn.attention", *qkv, heads=1, kv_heads=1, scale=0.3, causal=True)
            contexts.append(node.outputs[0])
        joined = build("aten.cat", *contexts, dim=-1)
        x = build("aten.add.Tensor", x, build("aten.linear", joined, weight(width, width)))
    graph.set_outputs([x])
    return graph


def _attentions(graph: Graph) -> list[int]:
    return [node.attrs["heads"] for node in graph if node.op == "attn.attention"]


def test_every_layer_merges_its_own_heads() -> None:
    graph = _model(layers=3, heads=4)
    make("merge-heads")[0].run(graph)
    verify(graph)
    assert _attentions(graph) == [4, 4, 4]


def test_isomorphism_is_searched_only_where_operands_are_swapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search is what could take long: 32 layers of 16 equal heads need none of it."""
    monkeypatch.delattr(branches, "DiGraphMatcher")
    graph = _model(layers=2, heads=8)
    make("merge-heads")[0].run(graph)
    assert _attentions(graph) == [8, 8]


def test_sums_with_swapped_operands_are_alike() -> None:
    graph = Graph()
    build = Builder(graph)
    q, k = (graph.add_input(name, TensorType(torch.float32, (2, 5, 8))) for name in "qk")
    contexts = []
    for head in range(2):
        cut = build("aten.slice.Tensor", q, dim=2, start=4 * head, end=4 * head + 4)
        bias = graph.add_constant("bias", torch.randn(4))
        pair = (cut, bias) if head else (bias, cut)
        key = build("aten.slice.Tensor", k, dim=2, start=4 * head, end=4 * head + 4)
        query = build("aten.add.Tensor", *pair)
        node = build.node("attn.attention", query, key, key, heads=1, kv_heads=1, scale=0.3)
        contexts.append(node.outputs[0])
    graph.set_outputs([build("aten.cat", *contexts, dim=-1)])
    make("merge-heads")[0].run(graph)
    make("dce")[0].run(graph)
    assert _attentions(graph) == [2]


def test_each_head_stays_a_site_and_names_what_it_is_part_of() -> None:
    graph = _model(layers=1, heads=3)
    names = [node.outputs[0].name for node in graph if node.op == "attn.attention"]
    fused = [Remark("fused", "attention", "1 head", op="attn.attention", node=n) for n in names]
    with recorded(graph) as found:
        remarks = make("merge-heads")[0].run(graph)
    sites = sites_of([PassResult("all", 0.0, 0, 0, True, fused + remarks, found)], {})
    assert [site.merged for site in sites] == ["3 attentions are one of 3 heads."] * 3
