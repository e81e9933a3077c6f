"""The normal form: what brings a graph into it, and what the suite finds between passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from attngraph.errors import IRError
from attngraph.ir import Builder, Graph, Remark, Value, interpret, parse
from attngraph.passes import make, run
from attngraph.passes.canonical.normal_form import FORMS, check_normal_form, deviations
from tests.passes.spellings import SPELLINGS, spelled

OWN_FORM = {"aten._to_copy"}
"""Ops of the normal form without an argument that could be written otherwise."""

GRAPH = """graph @main {
  dim batch = 3 in 1..
  input %x : f32[batch, 24]
  %y = aten.relu(%x)
  return %y
}"""


@dataclass(frozen=True)
class Spells:
    """Writes a transpose as nobody does behind canonicalize."""

    name: ClassVar[str] = "spells"
    exact: ClassVar[bool] = True

    def run(self, graph: Graph) -> list[Remark]:
        (y,) = graph.outputs
        build = Builder(graph)
        turned = build("aten.transpose.int", y, dim0=0, dim1=1)
        graph.replace_uses(y, build("aten.permute", turned, dims=[1, 0]))
        graph.set_inputs(turned.producer, [y])
        return []


@dataclass(frozen=True)
class Mistypes:
    """Leaves a value with a type that its node doesn't have."""

    name: ClassVar[str] = "mistypes"
    exact: ClassVar[bool] = True

    def run(self, graph: Graph) -> list[Remark]:
        (y,) = graph.outputs
        (x,) = graph.inputs
        wrong = graph.create("aten.abs", [x], types=[y.type, y.type])
        graph.replace_uses(y, wrong.outputs[0])
        return []


def test_another_spelling_behind_canonicalize_is_found() -> None:
    with pytest.raises(AssertionError, match=r"After spells: aten\.transpose\.int is not in"):
        run(parse(GRAPH), [*make("canonicalize"), Spells()])


def test_what_stands_before_canonicalize_is_free() -> None:
    graph = parse(GRAPH)
    run(graph, [Spells(), *make("canonicalize")])
    check_normal_form(graph)


def test_a_node_of_another_type_is_found() -> None:
    with pytest.raises(AssertionError, match="After mistypes: "):
        run(parse(GRAPH), [Mistypes()])


def test_the_check_names_the_node_and_the_rule() -> None:
    text = GRAPH.replace("%y = aten.relu(%x)", "%y = aten.view(%x) {size = [-1, 24]}")
    with pytest.raises(IRError, match=r"aten\.view is not in normal form: reshape .*\n.*> %y = "):
        check_normal_form(parse(text))


def test_every_spelling_has_an_example() -> None:
    assert set(SPELLINGS) == {op for rule in FORMS for op in rule.ops} - OWN_FORM


@pytest.mark.parametrize("op", SPELLINGS)
def test_a_spelling_becomes_the_normal_form_and_keeps_every_bit(op: str) -> None:
    graph, before = spelled(op), spelled(op)
    assert [node.op for node, _ in deviations(graph)] == [op]
    run(graph, "canonicalize")
    check_normal_form(graph)
    inputs = [draw(value) for value in graph.inputs]
    for old, new in zip(interpret(before, inputs), interpret(graph, inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


def draw(value: Value) -> torch.Tensor:
    """Seeded numbers for an input, at n = 3."""
    shape = [dim if isinstance(dim, int) else 3 for dim in value.shape]
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return numbers > 0 if value.dtype == torch.bool else numbers.to(value.dtype)
