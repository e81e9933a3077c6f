"""Who reads a weight, what it weighs, and how one follows from others."""

from __future__ import annotations

import torch

from attngraph.analysis.values.weights import (
    Derivation,
    Owners,
    derived,
    is_known,
    is_power_of_two,
    keeps_digits,
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


def test_a_row_or_column_below_the_least_normal_number_loses_digits() -> None:
    matrix = torch.tensor([[1.0, 0.3], [0.2, 3e-6]]).double()
    assert keeps_digits(matrix, torch.float16)  # next to larger ones a small one is rounding
    row, column = torch.tensor([1.0, 3e-5]).double()[:, None], torch.tensor([1.0, 3e-5]).double()
    for scale in (row, column):
        assert not keeps_digits(matrix * scale, torch.float16)
        assert keeps_digits(matrix * scale, torch.bfloat16)
        assert keeps_digits(matrix * scale.eq(1), torch.float16)
        assert keeps_digits((matrix * scale)[..., None, None][:1, :1], torch.float16)
    assert not keeps_digits(matrix * 1e-39, torch.float32)
    exact = torch.tensor([[1.0, 2.0**-14], [2.0**-130, 0.0]]).double()
    assert keeps_digits(torch.tensor([[2.0**-20, 2.0**-24]]).double(), torch.float16)
    assert not keeps_digits(exact, torch.float32)  # where such a number may count as zero


def test_what_overflows_is_no_number_of_a_dtype() -> None:
    for shape in ((2,), (2, 1), (2, 1, 3)):
        numbers = torch.full(shape, 7e4).double()
        assert not keeps_digits(numbers, torch.float16)
        assert keeps_digits(numbers, torch.bfloat16)
        assert keeps_digits(numbers / 2, torch.float16)
    assert keeps_digits(torch.tensor([1e-7, 0.0]).double(), torch.float16)  # a bias
    assert keeps_digits(torch.zeros(0, 3).double(), torch.float16)
