"""What may do something else to other rows, or at other numbers of them, is named."""

from __future__ import annotations

import pytest

from attngraph.analysis.experts.reading import Mixture, choices, mixture_of
from attngraph.analysis.experts.uniform import is_sized, switch_in
from attngraph.ir import Graph, Value, parse

# Every expert on every row, with weights that are zero but for the chosen ones.
_DENSE = """graph @main {
  dim rows = 6 in 1..
  input %x : f32[rows, 8]
  parameter %gate : f32[4, 8]
  parameter %w1 : f32[4, 12, 8]
  parameter %w2 : f32[4, 8, 12]
  parameter %table : f32[4]
  parameter %many : f32[100]
  %scores = aten.linear(%x, %gate)
  %p = aten.softmax.int(%scores) {dim = 1}
  %best, %i = aten.topk(%p) {k = 2, dim = 1}
  %s = aten.sum.dim_IntList(%best) {dim = [1], keepdim = true}
  %w = aten.div.Tensor(%best, %s)
  %z = aten.full() {size = [rows, 4], fill_value = 0.0, dtype = f32}
  %spread = aten.scatter.src(%z, %i, %w) {dim = 1}
  %u = aten.einsum(%x, %w1) {equation = "th,eih->tei"}
  %h = aten.silu(%u)
  %d = aten.einsum(%h, %w2) {equation = "tei,ehi->teh"}
  %f = aten.alias(%d)
  %g = aten.alias(%spread)
  %y = aten.einsum(%f, %g) {equation = "teh,te->th"}
  return %y
}
"""
_F, _G, _SPREAD = "%f = aten.alias(%d)", "%g = aten.alias(%spread)", "aten.scatter.src(%z, %i, %w)"
_HOT = "%o = aten.one_hot(%i) {num_classes = 4}\n"
ALIKE: dict[str, tuple[str, str]] = {
    "as it is": (_F, _F),
    "a factor": (_G, "%g = aten.mul.Scalar(%spread) {other = 2.5}"),
    "a number of each expert": (_G, "%g = aten.mul.Tensor(%spread, %table)"),
    "by one-hot rows": (
        _G,
        f"{_HOT}%of = aten._to_copy(%o) {{dtype = f32}}\n%w3 = aten.unsqueeze(%w) {{dim = 2}}\n"
        "%m = aten.mul.Tensor(%of, %w3)\n%g = aten.sum.dim_IntList(%m) {dim = [1]}",
    ),
    "a cast to more bits and back": (
        _F,
        "%c = aten._to_copy(%d) {dtype = f64}\n%f = aten._to_copy(%c) {dtype = f32}",
    ),
    "numbers of experts that are cut where none is": (
        _SPREAD,
        "aten.scatter.src(%z, %ic, %w)",
    ),
}
SWITCHING: dict[str, tuple[str, str, str]] = {
    "a weight that is cut": (
        _G, "%g = aten.clamp(%spread) {min = 1e-9}", "aten.clamp"),
    "a weight that is compared": (
        _G, "%q = aten.gt.Scalar(%spread) {other = 1e-9}\n%g = aten.where.self(%q, %spread, %z)",
        "aten.gt.Scalar"),
    "a weight that is squared": (
        _G, "%g = aten.mul.Tensor(%spread, %spread)", "aten.mul.Tensor"),
    "a result that is cut": (
        _F, "%f = aten.clamp(%d) {min = -1e6, max = 1e6}", "aten.clamp"),
    "a result that is squashed": (_F, "%f = aten.tanh(%d)", "aten.tanh"),
    "a result in halves": (
        _F, "%c = aten._to_copy(%d) {dtype = f16}\n%f = aten._to_copy(%c) {dtype = f32}",
        "aten._to_copy"),
    "a result without NaN": (_F, "%f = aten.nan_to_num(%d)", "aten.nan_to_num"),
    "a result plus a size": (_F, "%f = aten.add.Scalar(%d) {other = rows}", "aten.add.Scalar"),
    "a weight by a size": (_G, "%g = aten.div.Scalar(%spread) {other = rows}", "aten.div.Scalar"),
    "a quotient by a weight": (_G, "%g = aten.div.Tensor(%table, %spread)", "aten.div.Tensor"),
    "a capacity": (
        _G,
        f"{_HOT}%n = aten.sum.dim_IntList(%o) {{dim = [1]}}\n%c = aten.cumsum(%n) {{dim = 0}}\n"
        "%q = aten.le.Scalar(%c) {other = 40}\n%g = aten.where.self(%q, %spread, %z)",
        "aten.le.Scalar"),
    "a count as a factor": (
        _G,
        f"{_HOT}%n = aten.sum.dim_IntList(%o) {{dim = [0, 1]}}\n"
        "%c = aten._to_copy(%n) {dtype = f32}\n%g = aten.mul.Tensor(%spread, %c)",
        "aten.mul.Tensor"),
    "numbers of experts that are shifted": (
        _SPREAD, "aten.scatter.src(%z, %ia, %w)", "aten.add.Scalar"),
    "numbers of experts that are cut": (_SPREAD, "aten.scatter.src(%z, %il, %w)", "aten.clamp"),
    "the first rows alone": (
        _G, "%c = aten.slice.Tensor(%spread) {dim = 0, start = 0, end = 1}\n"
        "%g = aten.expand(%c) {size = [rows, 4]}", "aten.slice.Tensor"),
}  # fmt: skip
_NUMBERS = {
    "%ic": "%ic = aten.clamp(%i) {min = 0, max = 3}",
    "%il": "%il = aten.clamp(%i) {min = 0, max = 2}",
    "%ia": "%ia0 = aten.add.Scalar(%i) {other = 1}\n%ia = aten.remainder.Scalar(%ia0) {other = 4}",
}


def _graph(old: str, new: str) -> Graph:
    assert old in _DENSE
    text = _DENSE.replace(old, new)
    for name, lines in _NUMBERS.items():
        if f"{name}," in new:
            text = text.replace("  %spread =", f"  {lines}\n  %spread =")
    return parse(text)


def _mixture(graph: Graph) -> tuple[Mixture, Value]:
    (choice,) = choices(graph)
    found = mixture_of(graph, choice)
    assert isinstance(found, Mixture)
    (weights,) = (value for node in graph for value in node.outputs if value.name == "w")
    return found, weights


@pytest.mark.parametrize(("old", "new"), ALIKE.values(), ids=ALIKE)
def test_what_does_the_same_to_all_rows_has_no_switch(old: str, new: str) -> None:
    mixture, weights = _mixture(_graph(old, new))
    assert switch_in(mixture, mixture.given(), weights) is None


@pytest.mark.parametrize(("old", "new", "op"), SWITCHING.values(), ids=SWITCHING)
def test_what_may_switch_is_named(old: str, new: str, op: str) -> None:
    mixture, weights = _mixture(_graph(old, new))
    found = switch_in(mixture, mixture.given(), weights)
    assert found is not None
    assert found.op == op


def test_a_gate_has_its_experts_numbers_already() -> None:
    mixture, _ = _mixture(_graph(_F, _F))
    gates = {value.name: value for value in mixture.gates()}
    assert switch_in(mixture, mixture.given(), gates["spread"], is_gate=True) is None


def test_a_size_among_numbers_is_found() -> None:
    graph = parse(
        "graph @main {\n  dim n = 3 in 1..\n  input %x : f32[n]\n"
        "  %a = aten.mul.Scalar(%x) {other = n}\n  %b = aten.mul.Scalar(%a) {other = 2.0}\n"
        "  return %b\n}"
    )
    assert [is_sized(node) for node in graph] == [True, False]
    assert [is_sized(node, ("alpha",)) for node in graph] == [False, False]
