"""The graph's own methods keep its order, its names, its use lists and its epoch right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attngraph.errors import IRError
from attngraph.ir import Builder, Graph, Loc, Node, TensorType, Value, verify
from attngraph.ir.loc import UNKNOWN, fuse_locs

PAIR = TensorType(torch.float32, (2,))


def _relu(graph: Graph, value: Value, before: Node | None = None, name: str = "relu") -> Node:
    return graph.create("aten.relu", [value], types=[PAIR], names=[name], before=before)


@pytest.fixture
def graph() -> Graph:
    """x → a → b, returning b."""
    graph = Graph()
    a = _relu(graph, graph.add_input("x", PAIR), name="a")
    graph.set_outputs([_relu(graph, a.output, name="b").output])
    return graph


def _names(graph: Graph) -> list[str]:
    return [node.output.name for node in graph]


def test_a_node_goes_where_it_is_told(graph: Graph) -> None:
    first, second = graph
    _relu(graph, graph.inputs[0], before=second, name="between")
    _relu(graph, graph.inputs[0], before=first, name="first")
    _relu(graph, graph.inputs[0], name="last")
    assert _names(graph) == ["first", "a", "between", "b", "last"]
    assert [node.output.name for node in reversed(graph)] == _names(graph)[::-1]
    assert len(graph) == 5


def test_a_taken_name_gets_a_free_number(graph: Graph) -> None:
    names = [graph.add_input(name, PAIR).name for name in ("x", "x_2", "x", "x")]
    assert names == ["x_1", "x_2", "x_3", "x_4"]


def test_an_erased_name_is_free_again(graph: Graph) -> None:
    node = _relu(graph, graph.inputs[0], name="c")
    graph.erase(node)
    assert _relu(graph, graph.inputs[0], name="c").output.name == "c"


def test_replacing_a_value_reaches_every_reader_and_the_outputs(graph: Graph) -> None:
    x, (a, b) = graph.inputs[0], graph
    twice = graph.create("aten.add.Tensor", [a.output, a.output], types=[PAIR])
    graph.set_outputs([a.output, b.output], ["first", "second"])
    epoch = graph.epoch
    graph.replace_uses(a.output, x)
    assert twice.inputs == (x, x)
    assert graph.outputs == (x, b.output)
    assert graph.output_names == ("first", "second")
    assert not a.output.uses
    assert x.uses == ((a, 0), (b, 0), (twice, 0), (twice, 1))
    assert x.users == (a, b, twice)
    assert graph.epoch > epoch
    verify(graph)


def test_replacing_a_value_by_itself_changes_nothing(graph: Graph) -> None:
    epoch = graph.epoch
    graph.replace_uses(graph.inputs[0], graph.inputs[0])
    a, _ = graph
    graph.set_inputs(a, list(a.inputs))
    assert graph.epoch == epoch


def test_rewiring_moves_the_use(graph: Graph) -> None:
    x, (a, b) = graph.inputs[0], graph
    graph.set_inputs(b, [x])
    assert not a.output.uses
    assert (b, 0) in x.uses
    verify(graph)


def test_what_is_read_cannot_be_erased(graph: Graph) -> None:
    a, b = graph
    weight = graph.add_constant("w", torch.ones(2))
    graph.create("aten.mul.Tensor", [b.output, weight], types=[PAIR])
    with pytest.raises(IRError, match="%a is still read"):
        graph.erase(a)
    with pytest.raises(IRError, match="%b is still read"):
        graph.erase(b)
    with pytest.raises(IRError, match="%w is still read"):
        graph.erase_constant(weight)


def test_nodes_erased_during_iteration_are_skipped(graph: Graph) -> None:
    graph.set_outputs([graph.inputs[0]])
    seen = []
    for node in reversed(graph):
        seen.append(node)
        for other in reversed(graph):
            graph.erase(other)
    assert len(seen) == 1
    assert len(graph) == 0


def test_a_node_of_another_graph_is_no_anchor(graph: Graph) -> None:
    other = Graph("other")
    with pytest.raises(IRError, match="not in graph other"):
        _relu(other, other.add_input("x", PAIR), before=next(iter(graph)))


def test_a_constant_shares_its_data(graph: Graph) -> None:
    data = torch.ones(2)
    assert graph.add_constant("w", data).data is data
    with pytest.raises(IRError, match="needs data or a type"):
        graph.add_constant("v", None)


def test_a_list_that_changes_behind_a_node_is_not_its_attribute(graph: Graph) -> None:
    size = [3, 2]
    made = Builder(graph)("aten.expand", graph.inputs[0], size=size)
    size[0:2] = [6]
    assert made.producer is not None
    assert made.producer.attrs["size"] == [3, 2]


def test_one_output_is_asked_of_one_output_only(graph: Graph) -> None:
    node = graph.create("aten.unbind.int", [graph.inputs[0]], types=[PAIR, PAIR])
    with pytest.raises(IRError, match="2 outputs where one is expected"):
        _ = node.output


def test_fused_locations_are_distinct_flat_and_led_by_the_anchor(graph: Graph) -> None:
    a, b = graph
    one, two, three = (Loc("model.py", line, "layers.0") for line in (1, 2, 3))
    a.loc, b.loc = one, Loc("model.py", 2, "layers.0", (two, three))
    assert fuse_locs([a, b], b) == Loc("model.py", 2, "layers.0", (one, two, three))
    b.loc = one
    assert fuse_locs([a, b], b) == one
    b.loc = UNKNOWN
    assert fuse_locs([a, b], b) == one
    assert str(one) == "model.py:1 (layers.0)"


@given(st.data())
def test_any_sequence_of_mutations_leaves_a_graph_that_verifies(data: st.DataObject) -> None:
    graph = Graph()
    graph.add_input("x", PAIR)
    for _ in range(data.draw(st.integers(1, 30))):
        nodes = list(graph)
        values = list(graph.values())
        action = data.draw(st.sampled_from(["create", "create", "constant", "rewire", "erase"]))
        if action == "create":
            pair = [data.draw(st.sampled_from(values)) for _ in range(2)]
            graph.create("aten.add.Tensor", pair, types=[PAIR])
        elif action == "constant":
            graph.add_constant("w", torch.ones(2))
        elif nodes:
            index = data.draw(st.integers(0, len(nodes) - 1))
            earlier = [*graph.inputs, *(node.output for node in nodes[:index])]
            value = nodes[index].output
            graph.replace_uses(value, data.draw(st.sampled_from(earlier)))
            if action == "erase":
                graph.erase(nodes[index])
        graph.set_outputs([data.draw(st.sampled_from(list(graph.values())))])
        verify(graph, types_of=[])
        names = [value.name for value in graph.values()]
        assert len(set(names)) == len(names)
        assert len(list(graph)) == len(graph)


def test_what_is_erased_is_not_read_again(graph: Graph) -> None:
    gone = _relu(graph, graph.inputs[0], name="gone")
    graph.erase(gone)
    with pytest.raises(IRError, match="reads %gone, which is gone"):
        _relu(graph, gone.output)


def test_a_node_that_needs_its_own_result_has_no_order(graph: Graph) -> None:
    first, second = graph
    graph.set_inputs(first, [second.output])
    with pytest.raises(IRError, match="needs its own result"):
        graph.sort()
    assert _names(graph) == ["a", "b"]
