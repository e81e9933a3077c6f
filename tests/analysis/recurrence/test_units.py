"""What adds unlike things is found, as a number that happens to be small can't hide it."""

from __future__ import annotations

import pytest

from attngraph.analysis.recurrence.units import Unit, units_of, units_of_general, unlike
from attngraph.ir import Value, parse


def _unlike(lines: str) -> str | None:
    """The op of the node that adds unlike things, in what is computed of q, k and v."""
    graph = parse(
        "graph @main {\ninput %q : f32[2, 8]\ninput %k : f32[2, 8]\ninput %v : f32[2, 8]\n"
        f"{lines}\nreturn %y\n}}"
    )
    found = unlike(graph.outputs, units_of(*graph.inputs))
    return None if found is None else found.op


@pytest.mark.parametrize(
    "lines",
    [
        "%a = aten.mul.Tensor(%q, %k)\n%y = aten.mul.Tensor(%a, %v)",
        "%a = aten.mul.Tensor(%q, %k)\n%b = aten.mul.Tensor(%k, %q)\n%y = aten.add.Tensor(%a, %b)",
        "%a = aten.mul.Scalar(%q) {other = 3.0}\n%y = aten.sub.Tensor(%a, %q)",
        "%a = aten.div.Tensor(%q, %q)\n%b = aten.exp(%a)\n%y = aten.mul.Tensor(%b, %k)",
        "%a = aten.square(%q)\n%b = aten.mul.Tensor(%q, %q)\n%y = aten.add.Tensor(%a, %b)",
        "%y = aten.masked_fill.Scalar(%q, %m) {value = 0.0}",
    ],
)
def test_what_is_of_one_unit_may_be_added(lines: str) -> None:
    if "%m" in lines:
        lines = "%m = aten.gt.Tensor(%v, %v)\n" + lines
        assert _unlike(lines) == "aten.gt.Tensor"  # a comparison is of numbers
        return
    assert _unlike(lines) is None


@pytest.mark.parametrize(
    ("lines", "op"),
    [
        ("%y = aten.add.Tensor(%q, %k)", "aten.add.Tensor"),
        # 1e-12 · q³ shows on no drawn number beside q
        (
            "%a = aten.pow.Tensor_Scalar(%q) {exponent = 3}\n%b = aten.mul.Scalar(%a) "
            "{other = 1e-12}\n%y = aten.add.Tensor(%q, %b)",
            "aten.add.Tensor",
        ),
        ("%a = aten.mul.Tensor(%q, %k)\n%y = aten.exp(%a)", "aten.exp"),
        ("%y = aten.add.Scalar(%v) {other = 1e-9}", "aten.add.Scalar"),
        ("%y = aten.cat(%q, %v) {dim = 1}", "aten.cat"),
    ],
)
def test_what_adds_unlike_things_is_named(lines: str, op: str) -> None:
    assert _unlike(lines) == op


def test_a_number_of_zero_is_of_every_unit() -> None:
    assert _unlike("%y = aten.add.Scalar(%v) {other = 0.0}") is None


def test_operands_have_the_units_that_a_recurrence_gives_them() -> None:
    graph = parse(
        "graph @main {\ninput %q : f32[2, 8]\ninput %k : f32[2, 8]\ninput %v : f32[2, 8]\n"
        "input %b : f32[2, 1]\ninput %s : f32[8, 8]\nreturn %q\n}"
    )
    query, key, value, beta, state = graph.inputs
    units = units_of(query, key, value, beta=beta, state=state)
    assert units[beta] == (0, -2, 0, 0, 0, 0)  # β k kᵀ is a number
    assert units[state] == (0, -1, 1, 0, 0, 0)  # kᵀ S is a value
    assert units_of(query, key, value, state=state)[state] == (0, 1, 1, 0, 0, 0)  # k ⊗ v


def test_factors_of_a_slope_make_a_number() -> None:
    graph = parse(
        "graph @main {\ninput %k : f32[2, 8]\ninput %v : f32[2, 8]\ninput %a : f32[2, 8]\n"
        "input %b : f32[2, 8]\ninput %r : f32[2, 1]\ninput %s : f32[8, 8]\nreturn %k\n}"
    )
    key, value, a, b, rate, state = graph.inputs

    def units(*factors: Value, rate: Value | None = None) -> dict[Value, Unit] | None:
        return units_of_general(None, key, value, factors, rate=rate, decay=None, state=state)

    found = units(a, b)
    assert found is not None
    assert (found[a], found[b]) == ((0, 0, 0, 0, 1, 0), (0, 0, 0, 0, -1, 0))
    assert found[state] == (0, 1, 1, 0, 0, 0)
    found = units(key, key, rate, rate=rate)  # the value's rate is the correction's
    assert found is not None
    assert (found[rate], found[state]) == ((0, -2, 0, 0, 0, 0), (0, -1, 1, 0, 0, 0))
    assert units(key, key) is None  # a key that has to be a number
    assert units(a, a) is None
