"""cse merges constants by where their elements lie and by what they are."""

from __future__ import annotations

import torch

from attngraph.ir import Builder, Graph, TensorType, verify
from attngraph.passes import run


def test_views_of_what_was_merged_are_merged_with_what_it_became() -> None:
    graph = Graph("main")
    x = graph.add_input("x", TensorType(torch.float32, (4,)))
    shared = torch.zeros(8)[:4]
    data = {"first": torch.zeros(4), "second": shared, "third": shared}
    build = Builder(graph)
    outputs = [build("aten.add.Tensor", x, build.constant(data[name], name)) for name in data]
    graph.set_outputs(outputs, list(data))
    run(graph, "cse")
    verify(graph)
    assert list(graph.constants) == ["first"]
