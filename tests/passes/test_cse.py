"""cse merges constants by where their elements lie and by what they are."""

from __future__ import annotations

import torch

from attngraph.ir import Builder, Graph, TensorType, verify
from attngraph.passes import run


def _kept(dtype: torch.dtype, data: dict[str, torch.Tensor]) -> list[str]:
    """The constants that are left of these, each added to an input of four elements."""
    graph = Graph("main")
    x = graph.add_input("x", TensorType(dtype, (4,)))
    build = Builder(graph)
    outputs = [build("aten.add.Tensor", x, build.constant(data[name], name)) for name in data]
    graph.set_outputs(outputs, list(data))
    run(graph, "cse")
    verify(graph)
    return list(graph.constants)


def test_views_of_what_was_merged_are_merged_with_what_it_became() -> None:
    shared = torch.zeros(8)[:4]
    data = {"first": torch.zeros(4), "second": shared, "third": shared}
    assert _kept(torch.float32, data) == ["first"]


def test_one_element_that_was_expanded_is_compared_by_what_it_is() -> None:
    data = {"first": torch.tensor([3]), "second": torch.tensor(3).expand(1)}
    assert _kept(torch.int64, data) == ["first"]
    other = {"first": torch.tensor([3]), "second": torch.tensor(4).expand(1)}
    assert _kept(torch.int64, other) == ["first", "second"]
