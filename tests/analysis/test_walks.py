"""A walk visits each place once, nearest first, and ends; `origin` follows what matters."""

from __future__ import annotations

from attngraph.analysis.walks import FAR, made_of, origin, readers, walk
from attngraph.ir import Graph, Node, parse

DIAMOND = """
graph @main {
  input %x : f32[2, 3]
  input %row : f32[3]
  parameter %w : f32[2, 3]
  %a = aten.neg(%x)
  %b = aten.exp(%a)
  %c = aten.abs(%a)
  %d = aten.add.Tensor(%c, %b)
  %e = aten.add.Tensor(%row, %d)
  %f = aten.mul.Tensor(%w, %e)
  return %f
}
"""


def _node(graph: Graph, name: str) -> Node:
    return next(node for node in graph if node.output.name == name)


def test_each_place_once_and_nearest_first() -> None:
    edges = {0: [2, 1], 1: [3], 2: [3, 0], 3: [4], 4: []}
    assert list(walk([0], lambda at: edges[at])) == [0, 2, 1, 3, 4]


def test_a_walk_ends_at_its_limit_and_without_one_where_nothing_is_left() -> None:
    assert list(walk([0], lambda at: [at + 1])) == list(range(FAR))
    assert list(walk([0], lambda at: [at + 1] * (at < 2 * FAR), limit=None)) == list(
        range(2 * FAR + 1)
    )


def test_what_leads_on_is_asked_no_earlier_than_needed() -> None:
    asked: list[int] = []
    next(iter(walk([0], lambda at: asked.append(at) or [])))
    assert not asked


def test_readers_see_what_they_do_not_pass() -> None:
    graph = parse(DIAMOND)
    start = _node(graph, "a")
    names = [node.output.name for node in readers(start, lambda node: node.op == "aten.exp")]
    assert names == ["b", "c", "d"]
    assert [n.output.name for n in readers(start, lambda node: False)] == ["b", "c"]


def test_origin_goes_by_the_activation_of_most_dims() -> None:
    graph = parse(DIAMOND)
    value = _node(graph, "f").output
    sums = frozenset(["aten.mul.Tensor", "aten.add.Tensor"])
    # Not the constant weight, and not the row that broadcasts; of equals the first.
    assert origin(value, lambda node: node.op in sums).name == "c"
    assert origin(value, lambda node: False) is value
    assert origin(value, lambda node: True) is graph.inputs[0]


def test_what_a_value_is_made_of_has_no_end_but_its_inputs() -> None:
    lines = "\n".join(f"  %v{n + 1} = aten.relu(%v{n})" for n in range(3 * FAR))
    graph = parse(
        f"graph @main {{\n  input %v0 : f32[2]\n  input %other : f32[2]\n{lines}\n"
        f"  %y = aten.add.Tensor(%v{3 * FAR}, %v0)\n  return %y\n}}"
    )
    found = list(made_of(graph.outputs[0]))
    assert len(found) == len(set(found)) == 3 * FAR + 2
    assert found[0] is graph.outputs[0]
    assert graph.inputs[0] in found
    assert graph.inputs[1] not in found
