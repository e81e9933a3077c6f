"""The verifier names each broken invariant, at the node's source line."""

from __future__ import annotations

import pytest
import torch

from attngraph.errors import IRError
from attngraph.ir import Graph, Node, TensorType, Value, parse, verify
from attngraph.ir.dims import symbol

TEXT = """
graph @main {
  dim seq = 5 in 2..
  input %x : f32[seq, 4]
  constant %w = [1.0, 2.0, 3.0, 4.0] : f32[4]
  %a = aten.mul.Tensor(%x, %w) : f32[seq, 4] @ "model.py":7 "block"
  %b = aten.exp(%a) : f32[seq, 4]
  %c = aten.add.Tensor(%b, %a) : f32[seq, 4]
  return %c
}
"""


@pytest.fixture
def graph() -> Graph:
    return parse(TEXT)


@pytest.fixture
def nodes(graph: Graph) -> list[Node]:
    return list(graph)


def test_a_good_graph_passes(graph: Graph) -> None:
    verify(graph)


def test_a_use_that_the_value_does_not_know(graph: Graph, nodes: list[Node]) -> None:
    nodes[1].inputs = (graph.inputs[0],)
    with pytest.raises(IRError, match="%x doesn't know this use"):
        verify(graph)


def test_a_use_that_is_no_longer_there(graph: Graph, nodes: list[Node]) -> None:
    graph.inputs[0]._uses[(nodes[1], 0)] = None
    with pytest.raises(IRError, match="%x lists a use that isn't there"):
        verify(graph)


def test_a_read_before_the_definition(graph: Graph, nodes: list[Node]) -> None:
    graph._unlink(nodes[1])
    graph._link(nodes[1], nodes[0])
    with pytest.raises(IRError, match="%a is read before it is defined"):
        verify(graph)


def test_a_value_of_another_graph(graph: Graph, nodes: list[Node]) -> None:
    graph.set_inputs(nodes[1], [parse(TEXT).inputs[0]])
    with pytest.raises(IRError, match="%x is read before it is defined"):
        verify(graph)


@pytest.mark.parametrize("name", ["x", "w", "b"])
def test_a_name_given_twice(graph: Graph, nodes: list[Node], name: str) -> None:
    nodes[0].output.name = name
    with pytest.raises(IRError, match=f"%{name} is defined twice"):
        verify(graph)


def test_an_input_and_a_constant_of_one_name(graph: Graph) -> None:
    graph.inputs[0].name = "w"
    with pytest.raises(IRError, match="%w is defined twice"):
        verify(graph)


def test_an_output_of_another_producer(graph: Graph, nodes: list[Node]) -> None:
    nodes[0].output.producer = nodes[1]
    with pytest.raises(IRError, match="%a names another producer"):
        verify(graph)


def test_a_dim_that_nobody_defines(graph: Graph, nodes: list[Node]) -> None:
    graph.create(
        "aten.full",
        [],
        {"size": [symbol("heads")], "fill_value": 1.0},
        types=[TensorType(torch.float32, (symbol("heads"),))],
    )
    with pytest.raises(IRError, match="Dim heads is used before it is known"):
        verify(graph)


def test_an_output_that_the_graph_does_not_define(graph: Graph) -> None:
    graph.set_outputs([Value("z", TensorType(torch.float32, ()))])
    with pytest.raises(IRError, match="returns %z, which it doesn't define"):
        verify(graph)


def test_a_constant_that_is_not_of_its_type(graph: Graph) -> None:
    graph.constants["w"].data = torch.ones(5)
    with pytest.raises(IRError, match=r"%w is declared f32\[4\] but holds f32\[5\]"):
        verify(graph)


@pytest.mark.parametrize(
    "type",
    [
        TensorType(torch.float64, (symbol("seq"), 4)),
        TensorType(torch.float32, (symbol("seq"), 5)),
        TensorType(torch.float32, (symbol("seq") + 1, 4)),
        TensorType(torch.float32, (symbol("seq"),)),
    ],
    ids=str,
)
def test_a_type_that_evaluation_does_not_give(
    graph: Graph, nodes: list[Node], type: TensorType
) -> None:
    graph.set_outputs([nodes[0].output])
    for node in reversed(nodes[1:]):
        graph.erase(node)
    nodes[0].output.type = type
    with pytest.raises(IRError, match=r"%a is declared .* but is f32\[seq, 4\]"):
        verify(graph)


def test_equal_sizes_may_be_written_differently() -> None:
    verify(
        parse(
            "graph @main {\n dim seq = 5 in 2..\n input %x : f32[seq, 4]\n"
            " %a = aten.reshape(%x) {shape = [2, -1]} : f32[2, seq + seq]\n return %a\n}"
        )
    )


def test_a_missing_output(graph: Graph, nodes: list[Node]) -> None:
    pair = TensorType(torch.float32, (symbol("seq"), 2))
    attrs = {"split_size": 2, "dim": 1}
    graph.create("aten.split.Tensor", [graph.inputs[0]], attrs, types=[pair])
    with pytest.raises(IRError, match=r"aten\.split\.Tensor has 2 outputs, not 1"):
        verify(graph)


def test_an_op_that_rejects_its_inputs(graph: Graph, nodes: list[Node]) -> None:
    graph.create("aten.matmul", [graph.inputs[0]] * 2, types=[graph.inputs[0].type])
    with pytest.raises(IRError, match=r"aten\.matmul\(%x: f32\[seq, 4\].*is rejected"):
        verify(graph)


def test_only_the_asked_types_are_inferred_again(graph: Graph, nodes: list[Node]) -> None:
    nodes[0].output.type = TensorType(torch.float32, (9,))
    verify(graph, types_of=[])
    with pytest.raises(IRError, match="%a is declared"):
        verify(graph, types_of=[nodes[0]])


def test_the_error_shows_the_source_line_and_the_node(graph: Graph, nodes: list[Node]) -> None:
    nodes[0].output.type = TensorType(torch.float64, (symbol("seq"), 4))
    with pytest.raises(IRError, match=r"At model\.py:7 \(block\):\n> %a = aten\.mul"):
        verify(graph)
