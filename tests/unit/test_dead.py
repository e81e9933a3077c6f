"""What nothing reads goes, and the memory of a constant with it."""

from __future__ import annotations

import pytest
import torch

from attngraph.ir import Graph, Node, parse
from attngraph.ir.dead import discard, eliminate_dead_code, erase_dead

TEXT = """graph @main {
  input %x : f32[3, 4]
  parameter %w : f32[4, 4]
  parameter %kept : f32[4, 4]
  parameter %unread : f32[4]
  %a = aten.linear(%x, %kept)
  %b = aten.linear(%a, %w)
  %c = aten.relu(%b)
  %d = aten.add.Tensor(%a, %x)
  return %d
}"""


def _graph() -> Graph:
    weights = {"w": torch.ones(4, 4), "kept": torch.ones(4, 4), "unread": torch.ones(4)}
    return parse(TEXT, weights)


def _node(graph: Graph, name: str) -> Node:
    return next(node for node in graph if node.outputs[0].name == name)


def test_all_that_is_unread_goes() -> None:
    graph = _graph()
    eliminate_dead_code(graph)
    assert [node.outputs[0].name for node in graph] == ["a", "d"]
    assert list(graph.constants) == ["kept"]


def test_what_only_the_erased_read_goes_with_them() -> None:
    graph = _graph()
    erase_dead(graph, [_node(graph, "c")])
    assert [node.outputs[0].name for node in graph] == ["a", "d"]
    assert set(graph.constants) == {"kept", "unread"}


def test_what_is_read_or_older_stays() -> None:
    graph = _graph()
    erase_dead(graph, [_node(graph, "a"), None])
    assert len(graph) == 4
    since = _node(graph, "b").number
    erase_dead(graph, [_node(graph, "c")], since=since)
    assert [node.outputs[0].name for node in graph] == ["a", "b", "d"]


@pytest.mark.parametrize("how", ["eliminate", "erase", "discard"])
def test_the_memory_of_an_erased_constant_is_let_go(how: str) -> None:
    """An erased node still refers to its constants, until both are collected."""
    graph = _graph()
    w, b = graph.constants["w"], _node(graph, "b")
    if how == "eliminate":
        eliminate_dead_code(graph)
    elif how == "erase":
        erase_dead(graph, [_node(graph, "c")])
    else:
        graph.erase(_node(graph, "c"))
        graph.erase(b)
        discard(graph, [w, graph.constants["kept"]])
    assert b.inputs[1] is w
    assert w.data is None
    assert graph.constants["kept"].data is not None
