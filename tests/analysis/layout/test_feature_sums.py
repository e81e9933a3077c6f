"""Features of y as sums of products of features of x and of tables: computed again from these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from attngraph.analysis.layout.axes import Operand
from attngraph.analysis.layout.columns import known
from attngraph.analysis.layout.feature_sums import Reading, Term, region
from attngraph.ir import Graph, Value, parse
from tests.analysis.masks.graphs import numbers

S, WIDTH = 3, 4
HEAD = f"""graph @main {{
  input %x : f32[{S}, {WIDTH}]
  input %c : f32[{S}, {WIDTH}]
  input %d : f32[{S}, 2]
  parameter %turn : f32[{WIDTH}, {WIDTH}]
  %a = aten.slice.Tensor(%x) {{dim = 1, start = 0, end = 2}}
  %b = aten.slice.Tensor(%x) {{dim = 1, start = 2, end = 4}}
  %n = aten.neg(%b)
"""
TURN = torch.tensor([[0.0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 2], [0, 0, 1, 0]])
READABLE = {
    "a rotation of halves": (
        "%r = aten.cat(%n, %a) {dim = -1}\n%s = aten.mul.Tensor(%r, %c)\n"
        "%t = aten.mul.Tensor(%x, %c)\n%y = aten.add.Tensor(%t, %s)"
    ),
    "a difference, scaled": (
        "%t = aten.mul.Tensor(%x, %c)\n%s = aten.sub.Tensor(%t, %x) {alpha = 3}\n"
        "%y = aten.mul.Scalar(%s) {other = 0.5}"
    ),
    "a product with a matrix": "%y = aten.matmul(%x, %turn)",
    "two tables": "%t = aten.mul.Tensor(%c, %x)\n%y = aten.mul.Tensor(%t, %c)",
    "halves by themselves": (
        "%s = aten.mul.Tensor(%a, %d)\n%t = aten.mul.Tensor(%b, %d)\n"
        "%y = aten.cat(%s, %t) {dim = 1}"
    ),
    "a shift of features": "%y = aten.roll(%x) {shifts = [1], dims = [1]}",
}
UNREADABLE = {
    "a square": "%y = aten.mul.Tensor(%x, %x)",
    "a function": "%s = aten.tanh(%x)\n%y = aten.add.Tensor(%s, %x)",
    "nothing of x": "%y = aten.mul.Tensor(%c, %c)",
    "a table beside": "%y = aten.add.Tensor(%x, %c)",
}


def _read(line: str) -> tuple[Graph, Value, Reading, list[Term] | None]:
    graph = parse(f"{HEAD}  {line}\n  return %y\n}}", {"turn": TURN})
    (y,) = graph.outputs
    reading = Reading(y, graph.inputs[0], WIDTH)
    return graph, y, reading, reading.sums(2)


def _columns(operand: Operand, count: int, data: torch.Tensor) -> torch.Tensor:
    """(S, count): the elements of a tensor, whose first dim is the row, at each place."""
    places = known(operand.axes[-1], count)
    assert places is not None
    return data[:, list(places)]


def _sum(terms: Sequence[Term], x: Value, found: dict[str, torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(S, WIDTH)
    for term in terms:
        count = len(term.places)
        part = term.factor * _columns(Operand(x, term.source), count, found["x"])
        for table in term.tables:
            part = part * _columns(table, count, found[table.value.name])
        total[:, list(term.places)] += part
    return total


@pytest.mark.parametrize("name", READABLE)
def test_a_value_is_the_sum_of_its_terms(name: str) -> None:
    graph, y, reading, terms = _read(READABLE[name])
    assert terms is not None
    draw = torch.Generator().manual_seed(0)
    shapes = {"x": (S, WIDTH), "c": (S, WIDTH), "d": (S, 2)}
    given = {key: torch.randn(*shape, generator=draw) for key, shape in shapes.items()}
    tables = {table.value for term in terms for table in term.tables} - set(graph.inputs)
    found = numbers(graph, y, *tables, **given)
    torch.testing.assert_close(_sum(terms, reading.x, found), found["y"])


@pytest.mark.parametrize("name", UNREADABLE)
def test_anything_else_is_not_read(name: str) -> None:
    assert _read(UNREADABLE[name])[3] is None


def test_zeros_of_a_matrix_make_no_terms() -> None:
    _, _, _, terms = _read(READABLE["a product with a matrix"])
    assert terms is not None
    assert sorted((term.factor, term.places) for term in terms) == [
        (-1.0, (0,)),
        (1.0, (1,)),
        (1.0, (2,)),
        (2.0, (3,)),
    ]


def test_sums_of_more_terms_end_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a dense matrix, each feature would be one of all: as many steps as it has entries."""
    steps: list[Operand] = []
    own = Reading._terms

    def terms(self: Reading, operand: Operand, places: tuple[int, ...]) -> Iterator[Term]:
        steps.append(operand)
        return own(self, operand, places)

    monkeypatch.setattr(Reading, "_terms", terms)
    dense = torch.arange(1.0, 1 + WIDTH * WIDTH).reshape(WIDTH, WIDTH)
    graph = parse(
        f"{HEAD}  %y = aten.matmul(%x, %turn)\n  return %y\n}}", {"turn": dense.contiguous()}
    )
    (y,) = graph.outputs
    assert Reading(y, graph.inputs[0], WIDTH).sums(2) is None
    assert len(steps) < WIDTH * WIDTH
    steps.clear()
    found = Reading(y, graph.inputs[0], WIDTH).sums(WIDTH)
    assert found is not None
    assert len(found) == WIDTH * WIDTH


def test_a_region_needs_a_product() -> None:
    _, y, reading, _ = _read(READABLE["a rotation of halves"])
    found = region(y)
    assert found[0] is y
    assert reading.x in found
    assert region(_read("%y = aten.add.Tensor(%x, %c)")[1]) == []
