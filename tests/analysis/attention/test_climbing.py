"""Steps up from an operand: each gives the elements that it says, held against torch."""

from __future__ import annotations

import itertools

import pytest
import torch

from attngraph.analysis.attention.climbing import (
    at_places,
    chosen_part,
    factored,
    past_layout,
    softmax_of,
    summed_over,
)
from attngraph.analysis.layout.axes import Atom, Operand, fresh_axes, sides_of
from attngraph.ir import Graph, Value, interpret, parse

HEAD = """graph @main {
  input %x : f32[2, 3, 4]
  input %z : f32[2, 3, 4]
  input %h : f16[2, 3, 4]
  input %row : f32[3, 1]
"""


def _graph(lines: str) -> Graph:
    return parse(f"{HEAD}{lines}\n  return %y\n}}")


def _operand(value: Value) -> Operand:
    return Operand(value, fresh_axes(value.shape))


def _seen(graph: Graph) -> dict[Value, torch.Tensor]:
    """The numbers of all values."""
    random = torch.Generator().manual_seed(0)
    x, z = (torch.randn(2, 3, 4, generator=random) for _ in range(2))
    given = [x, z, x.half(), torch.randn(3, 1, generator=random)]
    seen: dict[Value, torch.Tensor] = dict(zip(graph.inputs, given, strict=True))
    interpret(graph, given, observe=lambda value, found: seen.update({value: found}))
    return seen


def _at(operand: Operand, data: torch.Tensor, places: dict[Atom, int]) -> torch.Tensor:
    """The element of an operand at one place of its atoms."""
    index = []
    for dim in operand.dims:
        place = 0
        for atom in dim:
            here = atom.const if atom.const is not None else places[atom]
            place = place * int(atom.size) + here
        index.append(place)
    return data[tuple(index)]


def _is_same(one: Operand, other: Operand, seen: dict[Value, torch.Tensor]) -> bool:
    """Whether both have the same elements, at each place of the axes."""
    atoms = list(dict.fromkeys([*one.atoms, *other.atoms]))
    return all(
        _at(one, seen[one.value], places).double() == _at(other, seen[other.value], places).double()
        for at in itertools.product(*(range(int(atom.size)) for atom in atoms))
        for places in [dict(zip(atoms, at, strict=True))]
    )


PAST = {
    "a permutation": ("%y = aten.permute(%x) {dims = [2, 0, 1]}", True),
    "a part": ("%y = aten.slice.Tensor(%x) {dim = 2, start = 2, end = 4}", True),
    "a cast to more bits": ("%y = aten._to_copy(%h) {dtype = f32}", True),
    "the 0 that sum begins with": ("%y = aten.add.Scalar(%x) {other = 0}", True),
    "a cast to fewer bits": ("%y = aten._to_copy(%x) {dtype = f16}", False),
    "next to nothing": ("%y = aten.add.Scalar(%x) {other = 1e-30}", False),
    "a product with 1": ("%y = aten.mul.Scalar(%x) {other = 2.0}", False),
    "an uneven part": ("%y = aten.slice.Tensor(%x) {dim = 2, start = 1, end = 4}", False),
}


@pytest.mark.parametrize(("lines", "passes"), PAST.values(), ids=PAST)
def test_past_layout_are_the_same_numbers(lines: str, passes: bool) -> None:
    graph = _graph(lines)
    own = _operand(graph.outputs[0])
    found = past_layout(own)
    assert (found is not None) == passes
    if found is not None:
        assert _is_same(own, found, _seen(graph))
    assert past_layout(_operand(graph.inputs[0])) is None


@pytest.mark.parametrize(("dim", "axis"), [(-1, 2), (0, 0), (1, 1)])
def test_a_softmax_and_its_axis(dim: int, axis: int) -> None:
    graph = _graph(f"%y = aten.softmax.int(%x) {{dim = {dim}}}")
    found = softmax_of(_operand(graph.outputs[0]))
    assert found is not None
    assert (found[0].value.name, found[1]) == ("x", axis)


@pytest.mark.parametrize(
    "line",
    [
        "%y = aten.softmax.int(%h) {dim = 1, dtype = f32}",  # not in the scores' own dtype
        "%y = aten.log_softmax.int(%x) {dim = 1}",
        "%y = aten._safe_softmax(%x) {dim = 1}",  # 0 in rows without keys
    ],
)
def test_what_is_another_softmax_is_none(line: str) -> None:
    assert softmax_of(_operand(_graph(line).outputs[0])) is None


JOINED = {
    "cat": ("%y = aten.cat(%x, %z) {dim = 2}", 8),
    "of the last axis": ("%y = aten.cat(%x, %z) {dim = -1}", 8),
    "stack": ("%y = aten.stack(%x, %z) {dim = 1}", 2),
    "a part of size 1": (
        "%a = aten.slice.Tensor(%z) {dim = 1, start = 1, end = 2}\n"
        "%y = aten.cat(%a, %x, %a) {dim = 1}",
        5,
    ),
    "an empty part": (
        "%a = aten.slice.Tensor(%z) {dim = 1, start = 0, end = 0}\n%y = aten.cat(%a, %x) {dim = 1}",
        3,
    ),
}


@pytest.mark.parametrize(("lines", "places"), JOINED.values(), ids=JOINED)
def test_a_place_lies_in_one_part(lines: str, places: int) -> None:
    graph = _graph(lines)
    (y,), seen = graph.outputs, _seen(graph)
    assert y.producer is not None
    dim = int(y.producer.attrs["dim"]) % len(y.shape)
    every = at_places(_operand(y), dim)
    assert len(every) == places
    for at, operand in enumerate(every):
        found = chosen_part(operand)
        assert found is not None
        assert found.value is not y
        assert _is_same(operand, found, seen)
        (atom,) = operand.dims[dim]
        assert atom.const == at


def test_no_place_no_part() -> None:
    graph = _graph("%y = aten.cat(%x, %z) {dim = 2}")
    assert chosen_part(_operand(graph.outputs[0])) is None  # all places
    assert chosen_part(_operand(graph.inputs[0])) is None
    head = "graph @main {\n  dim n = 3 in 1..\n  input %x : f32[n]\n  input %z : f32[4]\n"
    (y,) = parse(f"{head}  %y = aten.cat(%x, %z) {{dim = 0}}\n  return %y\n}}").outputs
    place = Operand(y, ((Atom(y.shape[0], 1),),))
    assert chosen_part(place) is None  # what comes second depends on n
    assert at_places(_operand(y), 0) == []


def test_only_few_places_are_told_one_by_one() -> None:
    for size, count in ((1, 0), (2, 2), (32, 32), (33, 0)):
        graph = parse(f"graph @main {{\n  input %x : f32[2, {size}]\n  return %x\n}}")
        assert len(at_places(_operand(graph.inputs[0]), 1)) == count


@pytest.mark.parametrize(
    ("dims", "keepdim", "axis"),
    [("[1]", "false", 1), ("[-2]", "true", 1), ("[0]", "true", 0), ("[-1]", "false", 2)],
)
def test_a_sum_is_of_one_axis(dims: str, keepdim: str, axis: int) -> None:
    graph = _graph(f"%y = aten.sum.dim_IntList(%x) {{dim = {dims}, keepdim = {keepdim}}}")
    (y,), seen = graph.outputs, _seen(graph)
    assert y.producer is not None
    own = _operand(y)
    found = summed_over(y.producer, own.axes)
    assert found is not None
    operand, at = found
    assert at == axis
    (summed,) = operand.axes[at]
    for places in itertools.product(*(range(int(atom.size)) for atom in own.atoms)):
        known = dict(zip(own.atoms, places, strict=True))
        terms = [
            _at(operand, seen[operand.value], {**known, summed: n}) for n in range(summed.size)
        ]
        torch.testing.assert_close(torch.stack(terms).sum(), _at(own, seen[y], known))


@pytest.mark.parametrize("dims", ["[0, 1]", "[]"])
def test_a_sum_of_several_axes_is_none(dims: str) -> None:
    graph = _graph(f"%y = aten.sum.dim_IntList(%x) {{dim = {dims}}}")
    (y,) = graph.outputs
    assert y.producer is not None
    assert summed_over(y.producer, fresh_axes(y.shape)) is None


def test_sides_broadcast_and_a_quotient_has_one_order() -> None:
    product, quotient = (
        _graph(f"%y = aten.{op}.Tensor(%x, %row)").outputs[0] for op in ("mul", "div")
    )
    own, node = _operand(product), product.producer
    assert node is not None
    left, right = sides_of(node, own.axes)
    assert left.axes == own.axes
    assert right.axes == (own.axes[1], ())
    assert [(a.value.name, b.value.name, power) for a, b, power in factored(node, own.axes)] == [
        ("x", "row", 1),
        ("row", "x", 1),
    ]
    divided = quotient.producer
    assert divided is not None
    sides = factored(divided, _operand(quotient).axes)
    assert [(a.value.name, b.value.name, power) for a, b, power in sides] == [("x", "row", -1)]
