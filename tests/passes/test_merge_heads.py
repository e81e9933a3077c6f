"""What a fixture can't show of merge-heads: its size, the order of operands, and the report."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attngraph.analysis import branches
from attngraph.ir import Builder, Graph, Remark, TensorType, Value, interpret, verify
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


def _matrix(graph: Graph) -> Value:
    """One for all heads."""
    known = graph.constants.get("matrix")
    return known or graph.add_constant("matrix", torch.arange(16.0).reshape(4, 4) / 8)


_BETWEEN: dict[str, Callable[[Builder, Value], Value]] = {
    "softmax": lambda build, x: build("aten.softmax.int", x, dim=-1),
    "over-positions": lambda build, x: build("aten.cumsum", x, dim=1),
    "over-batch": lambda build, x: build("aten.log_softmax.int", x, dim=0),
    "less-the-first": lambda build, x: build(
        "aten.sub.Tensor", x, build("aten.slice.Tensor", x, dim=1, start=0, end=1)
    ),
    "less-the-mean": lambda build, x: build(
        "aten.sub.Tensor", x, build("aten.mean.dim", x, dim=[-1], keepdim=True)
    ),
    "rotated": lambda build, x: build(
        "aten.cat",
        *build.node("aten.split_with_sizes", x, split_sizes=[3, 1], dim=-1).outputs[::-1],
        dim=-1,
    ),
    "reshaped": lambda build, x: build(
        "aten.reshape",
        build("aten.softmax.int", build("aten.reshape", x, shape=[2, 5, 2, 2]), dim=-2),
        shape=[2, 5, 4],
    ),
    "permuted": lambda build, x: build(
        "aten.permute",
        build("aten.cumsum", build("aten.permute", x, dims=[0, 2, 1]), dim=1),
        dims=[0, 2, 1],
    ),
    "times-a-matrix": lambda build, x: build("aten.matmul", x, _matrix(build.graph)),
}


@pytest.mark.parametrize("between", _BETWEEN.values(), ids=_BETWEEN)
def test_what_lies_between_runs_by_its_batching_rule(
    between: Callable[[Builder, Value], Value],
) -> None:
    """In front of each head and behind it; the heads' axis is the last but one."""
    torch.manual_seed(0)
    graph = Graph()
    build = Builder(graph)
    x = graph.add_input("x", TensorType(torch.float32, (2, 5, 8)))
    contexts = []
    for _ in range(3):
        qkv = [
            build("aten.linear", x, graph.add_constant("weight", torch.randn(4, 8) / 2))
            for _ in "qkv"
        ]
        qkv[0] = between(build, qkv[0])
        node = build.node("attn.attention", *qkv, heads=1, kv_heads=1, scale=0.3)
        contexts.append(between(build, node.outputs[0]))
    graph.set_outputs([build("aten.cat", *contexts, dim=-1)])
    sample = torch.randn(2, 5, 8)
    (before,) = interpret(graph, [sample])
    make("merge-heads")[0].run(graph)
    make("dce")[0].run(graph)
    verify(graph)
    assert _attentions(graph) == [3]
    torch.testing.assert_close(interpret(graph, [sample])[0], before, rtol=1e-5, atol=1e-5)


def test_each_head_stays_a_site_and_names_what_it_is_part_of() -> None:
    graph = _model(layers=1, heads=3)
    names = [node.outputs[0].name for node in graph if node.op == "attn.attention"]
    fused = [Remark("fused", "attention", "1 head", op="attn.attention", node=n) for n in names]
    with recorded(graph) as found:
        remarks = make("merge-heads")[0].run(graph)
    sites = sites_of([PassResult("all", 0.0, 0, 0, True, fused + remarks, found)], {})
    assert [site.merged for site in sites] == ["3 attentions are one of 3 heads."] * 3
