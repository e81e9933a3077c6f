"""Regions: graphs that nodes hold, such as the body of a loop."""

from __future__ import annotations

import json

import pytest
import torch

from attngraph.errors import IRError
from attngraph.ir import Graph, Node, TensorType, clone, parse, verify
from attngraph.ir.hashing import hashable
from attngraph.ir.printer import format_graph
from attngraph.passes import make

STEP = """graph @step {
  dim batch = 3 in 1..64
  input %state : f32[batch, 4]
  input %x : f32[batch, 4]
  input %w : f32[4, 4]
  constant %half = 0.5 : f32[]
  %y = aten.linear(%x, %w)
  %z = aten.mul.Tensor(%y, %half)
  %next = aten.FUNCTION(%z)
  return %next, %z
}
"""
LOOP = """graph @main {
  dim batch = 3 in 1..64
  dim seq = 5 in 1..64
  input %h : f32[batch, 4]
  input %x : f32[seq, batch, 4]
  parameter %w : f32[4, 4]
  %last, %all = attn.scan(%h, %x, %w) {body = BODY, carried = 1, scanned = 1}
  %other, %same = attn.scan(%h, %x, %w) {body = SECOND, carried = 1, scanned = 1}
  return %all, %same
}
"""


def _loops(first: str = STEP, second: str = STEP) -> Graph:
    text = LOOP.replace("BODY", json.dumps(first)).replace("SECOND", json.dumps(second))
    return parse(text.replace("FUNCTION", "tanh"), {"w": torch.eye(4)})


def _scans(graph: Graph) -> list[Node]:
    return [node for node in graph if node.op == "attn.scan"]


def test_a_region_is_a_graph_whose_text_parses_back() -> None:
    graph = _loops()
    (body,) = _scans(graph)[0].regions
    assert [node.op for node in body] == ["aten.linear", "aten.mul.Tensor", "aten.tanh"]
    text = format_graph(graph)
    again = parse(text, {"w": torch.eye(4)})
    assert format_graph(again) == text
    assert _scans(again)[0].regions != (body,)


def test_a_walk_enters_regions() -> None:
    ops = [node.op for node in _loops().walk()]
    assert ops == ["attn.scan", "aten.linear", "aten.mul.Tensor", "aten.tanh"] * 2


def test_a_region_that_a_node_holds_is_frozen_and_a_clone_is_not() -> None:
    """Clones of the graph around it share it, so a change would reach them unseen."""
    graph = _loops()
    (body,) = _scans(graph)[0].regions
    assert _scans(clone(graph))[0].regions == (body,)
    with pytest.raises(IRError, match="change a clone"):
        body.set_outputs(body.outputs[:1])
    with pytest.raises(IRError, match="change a clone"):
        body.create("aten.relu", [body.inputs[0]], types=[body.inputs[0].type])
    free = clone(body)
    free.add_input("more", TensorType(torch.float32, (2,)))


def test_loops_are_one_where_their_regions_are() -> None:
    same, other = _loops(), _loops(second=STEP.replace("0.5", "0.25"))
    keys = [[hashable(node.attrs) for node in _scans(graph)] for graph in (same, other)]
    assert keys[0][0] == keys[0][1] == keys[1][0] != keys[1][1]
    for graph, count in ((same, 1), (other, 2)):
        make("cse")[0].run(graph)
        make("dce")[0].run(graph)
        assert len(_scans(graph)) == count


def test_the_data_of_a_region_that_its_text_leaves_out_tells_it_apart() -> None:
    """Constants of more than 16 elements are printed by name and type alone."""
    keys = set()
    for seed in (0, 1):
        body = Graph("step")
        data = torch.full((5, 5), float(seed))
        body.set_outputs([body.add_constant("table", data)], ["table"])
        keys.add(hashable({"body": body}))
    assert len(keys) == 2


def test_a_region_is_verified() -> None:
    graph = _loops()
    verify(graph)
    (body,) = _scans(graph)[0].regions
    body.outputs[0].type = TensorType(torch.float32, (1, 4))
    with pytest.raises(IRError, match=r"%next is declared f32\[1, 4\]"):
        verify(graph)


def test_a_clone_may_bind_inputs_and_free_constants() -> None:
    (body,) = _scans(_loops())[0].regions
    weight, half = body.inputs[2], body.constants["half"]
    bound = clone(body, bound={weight: torch.eye(4)})
    assert [value.name for value in bound.inputs] == ["state", "x"]
    assert list(bound.constants) == ["w", "half"]
    freed = clone(bound, freed=bound.constants.values())
    assert [value.name for value in freed.inputs] == ["state", "x", "w", "half"]
    assert [value.name for value in clone(body, freed=[half]).inputs] == ["state", "x", "w", "half"]
