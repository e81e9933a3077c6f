"""cse merges constants by where their elements lie and by what they are."""

from __future__ import annotations

import torch

from attngraph.ir import Builder, Graph, TensorType, interpret, parse, verify
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


def test_conditions_of_sizes_that_become_one_are_rewritten() -> None:
    graph = parse(
        """
graph @main {
  dim n = 4 in 1..
  dim u0 = 2 in 0..
  dim u1 = 2 in 0..
  input %x : i64[n]
  %first = aten.sum(%x) : i64[]
  %a = aten.item(%first) : int(u0)
  %second = aten.sum(%x) : i64[]
  %b = aten.item(%second) : int(u1)
  %few = aten.full() {size = [], fill_value = u1 > 2, dtype = bool} : bool[]
  return %few as "few"
}
"""
    )
    run(graph, "cse")
    verify(graph)
    for x, few in ((torch.tensor([1, 1]), False), (torch.tensor([1, 2]), True)):
        assert bool(interpret(graph, (x,))[0]) == few
    assert graph.dims.keys() == {"n", "u0"}
