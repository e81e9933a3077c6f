"""One step of a loop as a function of rows: as many as are asked for, whatever its batch."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.recurrence.steps import Step, known_data, read_step
from attngraph.ir import Graph, parse

_LINES = """%a = aten.linear(%x, %w)
%s = aten.add.Tensor(%a, %h)
%y = aten.tanh(%s)"""


def _graph(batch: str, lines: str = _LINES) -> Graph:
    dim = "dim batch = 3 in 1..\n" if batch == "batch, " else ""
    return parse(
        f"graph @step {{\n{dim}input %h : f32[{batch}3]\ninput %x : f32[{batch}2]\n"
        f"input %w : f32[3, 2]\ninput %there : bool[{batch}3]\n{lines}\nreturn %y\n}}"
    )


W = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))


def _step(graph: Graph) -> Step | None:
    h, x = graph.inputs[:2]
    return read_step([h], [x], graph.outputs, lambda value: W if value.name == "w" else value.data)


@pytest.mark.parametrize("batch", ["batch, ", "3, ", "1, ", ""])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 300, 513])
def test_any_number_of_rows_is_run(batch: str, rows: int) -> None:
    step = _step(_graph(batch))
    assert step is not None
    assert (step.hidden, step.widths) == (3, [2])
    x, h = torch.randn(rows, 2).double(), torch.randn(rows, 3).double()
    found = step.run(step.results, x, [h])
    assert found is not None
    torch.testing.assert_close(found[0], torch.tanh(x @ W.double().T + h), rtol=0, atol=1e-14)


def test_each_node_is_shown_in_its_order() -> None:
    step = _step(_graph("batch, "))
    assert step is not None
    shown: list[tuple[str, bool]] = []
    x, h = torch.ones(2, 2).double(), torch.ones(2, 3).double()
    step.run(
        step.results, x, [h], lambda node, given, made: shown.append((node.op, made[0] is given[0]))
    )
    assert shown == [
        ("aten.linear", False),
        ("aten.add.Tensor", False),
        ("aten.tanh", False),
    ]


def test_only_what_has_the_type_of_a_state_may_be_a_gate() -> None:
    step = _step(_graph("batch, ", f"%is = aten.gt.Tensor(%h, %h)\n{_LINES}"))
    assert step is not None
    assert [value.name for value in step.values()] == ["a", "s", "y"]


@pytest.mark.parametrize(
    "lines",
    [
        "%y = aten.where.self(%there, %h, %h)",  # by an input that is no row of numbers
        "%y = aten.linear(%x, %x)",  # of another width
        "%y = aten._to_copy(%h) {dtype = f64}",
        "%y = aten.gt.Tensor(%h, %h)",
    ],
)
def test_what_is_no_function_of_rows_and_constants_is_no_step(lines: str) -> None:
    assert _step(_graph("2, ", lines)) is None


def test_weights_that_nothing_gives_are_unknown() -> None:
    graph = _graph("batch, ")
    h, x = graph.inputs[:2]
    assert read_step([h], [x], graph.outputs, lambda value: None) is None
    assert read_step([h], [x], graph.outputs, lambda value: W.to("meta")) is None


def test_an_op_that_fails_gives_nothing() -> None:
    step = _step(_graph("batch, ", f"{_LINES.replace('%y', '%t')}\n%y = aten.roll(%t) {{shifts = "
    "[1], dims = [0]}"))  # fmt: skip
    assert step is not None
    assert step.run(step.results, torch.ones(2, 2), [torch.ones(2, 4)]) is None


def _known(lines: str) -> torch.Tensor | None:
    graph = parse(
        "graph @main {\ninput %x : f32[2]\nconstant %a = [1.0, 2.0] : f32[2]\n"
        f"{lines}\nreturn %y\n}}"
    )
    return known_data(graph.outputs[0])


def test_numbers_of_constants_are_known() -> None:
    lines = "%n = aten.full() {size = [2], fill_value = 3.0, dtype = f32}\n"
    found = _known(f"{lines}%y = aten.mul.Tensor(%a, %n)")
    assert found is not None
    assert found.tolist() == [3.0, 6.0]
    assert known_data(None) is None


@pytest.mark.parametrize(
    "lines",
    [
        "%y = aten.mul.Tensor(%a, %x)",
        "%y = aten.rand_like(%a)",  # other numbers in each run
        "%r = aten.rand() {size = [2], dtype = f32}\n%y = aten.mul.Tensor(%a, %r)",
    ],
)
def test_what_differs_from_run_to_run_is_not(lines: str) -> None:
    assert _known(lines) is None
