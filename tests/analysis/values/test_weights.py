"""Who reads a weight, what it weighs, and how one follows from others."""

from __future__ import annotations

import torch

from attngraph.analysis.values.weights import (
    Derivation,
    Owners,
    derived,
    is_known,
    is_power_of_two,
    weight_bytes,
)
from attngraph.ir import Graph, parse

TEXT = """graph @main {
  input %x : f32[2, 4]
  parameter %once : f32[4, 4]
  parameter %twice : f32[4, 4]
  parameter %returned : f32[4, 4]
  parameter %tied : f32[4, 4]
  parameter %other : f32[4, 4]
  %a = aten.linear(%x, %once)
  %b = aten.linear(%a, %twice)
  %c = aten.linear(%b, %twice)
  %d = aten.linear(%c, %returned)
  %e = aten.linear(%d, %tied)
  %f = aten.linear(%e, %other)
  return %f, %returned
}
"""
NAMES = ("once", "twice", "returned", "tied", "other")


def graph_of() -> Graph:
    weights = {name: torch.randn(4, 4) for name in NAMES}
    weights["other"] = weights["tied"].view(4, 4)
    return parse(TEXT, weights)


def test_a_weight_is_its_readers_own_unless_it_is_read_returned_or_tied_elsewhere() -> None:
    graph = graph_of()
    owners = Owners(graph)
    assert [name for name in NAMES if owners.is_sole(graph.constants[name])] == ["once"]
    assert not owners.is_sole(graph.inputs[0])
    constants = [graph.constants[name] for name in NAMES]
    assert owners.freed([*constants, constants[0], None]) == weight_bytes(torch.float32, (4, 4))


def test_without_data_names_decide() -> None:
    graph = parse(TEXT)
    owners = Owners(graph)
    assert [name for name in NAMES if owners.is_sole(graph.constants[name])] == [
        "once",
        "tied",
        "other",
    ]


def test_a_derivation_has_numbers_where_all_of_its_sources_do() -> None:
    graph = graph_of()
    sources = (graph.constants["once"], graph.constants["twice"])
    both = Derivation(sources, lambda data: torch.cat(list(data)))
    found = both.data()
    assert found is not None
    assert torch.equal(
        found, torch.cat([source.data for source in sources if source.data is not None])
    )
    sources[1].data = None
    assert both.data() is None


def test_known_are_floating_point_constants_with_numbers() -> None:
    graph = Graph()
    assert is_known(graph.add_constant("a", torch.zeros(2)))
    assert not is_known(graph.add_constant("b", torch.zeros(2, dtype=torch.int64)))
    assert not is_known(graph.add_constant("c", torch.zeros(2, device="meta")))
    assert not is_known(None)


def test_names_keep_one_suffix() -> None:
    graph = Graph()
    once = derived(graph.add_constant("w", torch.zeros(2)), ".scaled")
    assert once == "w.scaled"
    assert derived(graph.add_constant(once, torch.zeros(2)), ".scaled") == "w.scaled"


def test_powers_of_two_have_one_bit() -> None:
    assert is_power_of_two(torch.tensor([1.0, -0.25, 2.0**100]).double())
    for other in (0.0, 3.0, 0.1):
        assert not is_power_of_two(torch.tensor([1.0, other]).double())
