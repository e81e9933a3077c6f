"""Which number a value has for the experts that a row doesn't take."""

from __future__ import annotations

import math

import pytest

from attngraph.analysis.experts.gates import is_gate, others_in
from attngraph.analysis.experts.reading import choices, thresholds
from attngraph.ir import Graph, parse

_ZEROS = "%z = aten.full() {size = [rows, 8], fill_value = 0, dtype = f32}"
_LOW = "%z = aten.full() {size = [rows, 8], fill_value = -inf, dtype = f32}"
_ONES = f"{_ZEROS}\n%m = aten.scatter.value(%z, %i) {{dim = 1, value = 1.0}}"
_ABOVE = f"{_ONES}\n%k = aten.gt.Scalar(%m) {{other = 0}}"
_TIMES = f"{_ONES}\n%k = aten.mul.Tensor(%scores, %m)"
_HIDDEN = f"{_LOW}\n%h = aten.scatter.src(%z, %i, %v) {{dim = 1}}"
_COUNTED = (
    "%o = aten.one_hot(%i) {num_classes = 8}\n%n = aten.sum.dim_IntList(%o) {dim = [1]}\n"
    "%m = aten._to_copy(%n) {dtype = f32}"
)


def _graph(lines: str) -> Graph:
    return parse(
        "graph @main {\ndim rows = 5 in 1..\ninput %scores : f32[rows, 8]\n"
        "input %places : i64[rows, 2]\n%v, %i = aten.topk(%scores) {k = 2, dim = 1}\n"
        f"{lines}\n%read = aten.add.Scalar(%i) {{other = 1}}\nreturn %g, %read\n}}"
    )


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        (f"{_ONES}\n%g = aten.mul.Tensor(%scores, %m)", 0.0),
        (f"{_COUNTED}\n%g = aten.mul.Tensor(%scores, %m)", 0.0),
        (f"{_HIDDEN}\n%g = aten.softmax.int(%h) {{dim = 1}}", 0.0),
        (f"{_HIDDEN}\n%g = aten.neg(%h)", math.inf),
        (f"{_ONES}\n%g = aten.rsub.Scalar(%m) {{other = 1}}", 1.0),
        (f"{_ABOVE}\n%g = aten._to_copy(%k) {{dtype = f32}}", 0.0),
        (f"{_ABOVE}\n%g = aten.where.self(%k, %scores, %z)", 0.0),
        (f"{_TIMES}\n%g = aten.add.Scalar(%k) {{other = 2}}", 2.0),
    ],
)
def test_others_have_one_number(lines: str, number: float) -> None:
    graph = _graph(lines)
    (choice,) = choices(graph)
    assert others_in(choice, graph.outputs[0]) == number
    assert is_gate(choice, graph.outputs[0]) == (number == 0)


@pytest.mark.parametrize(
    "lines",
    [
        # at other places than the choice's
        f"{_ONES.replace('%i)', '%places)')}\n%g = aten.mul.Tensor(%scores, %m)",
        # along the rows
        f"{_ONES.replace('dim = 1', 'dim = 0')}\n%g = aten.mul.Tensor(%scores, %m)",
        # the softmax of rows
        f"{_HIDDEN}\n%g = aten.softmax.int(%h) {{dim = 0}}",
        # a fill that a score may pass
        f"{_HIDDEN.replace('-inf', '-1e9')}\n%g = aten.softmax.int(%h) {{dim = 1}}",
        # counted at other places
        f"{_COUNTED.replace('(%i)', '(%places)')}\n%g = aten.mul.Tensor(%scores, %m)",
        # ~0 is -1 of whole numbers
        f"{_COUNTED.replace('%m =', '%k =')}\n%c = aten.bitwise_not(%n)\n"
        "%d = aten.add.Scalar(%c) {other = -1}\n%g = aten._to_copy(%d) {dtype = f32}",
        # 0 / 0
        f"{_ONES}\n%g = aten.div.Tensor(%scores, %m)",
        f"{_ONES}\n%g = aten.add.Tensor(%scores, %m)",
        f"{_TIMES}\n%g = aten.roll(%k) {{shifts = [1], dims = [1]}}",
    ],
)
def test_what_may_have_any_number_is_no_gate(lines: str) -> None:
    graph = _graph(lines)
    (choice,) = choices(graph)
    assert not is_gate(choice, graph.outputs[0])


def test_a_threshold_is_no_choice() -> None:
    graph = parse(
        "graph @main {\ndim rows = 5 in 1..\ninput %scores : f32[rows, 8]\n"
        "%v, %i = aten.topk(%scores) {k = 2, dim = 1}\n"
        "%least = aten.slice.Tensor(%v) {dim = 1, start = 1, end = 2}\n"
        "%k = aten.ge.Tensor(%scores, %least)\nreturn %k\n}"
    )
    assert not list(choices(graph))
    ((choice, comparison),) = thresholds(graph)
    assert (choice.count, comparison.op) == (2, "aten.ge.Tensor")
