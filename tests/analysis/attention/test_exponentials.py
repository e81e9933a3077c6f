"""The parts of a softmax by hand: what is exponentiated, what sums it, and what is not its sum."""

from __future__ import annotations

import pytest

from attngraph.analysis.attention.exponentials import (
    added,
    read_exponent,
    read_total,
    reciprocal_of,
    unshifted,
)
from attngraph.analysis.layout.axes import Operand, fresh_axes
from attngraph.ir import Graph, Value, parse

HEAD = """
graph @main {
  input %x : f32[2, 3, 7]
  input %m : bool[2, 3, 7]
  %zero = aten.full() {size = [], fill_value = 0.0, dtype = f32}
  %one = aten.full() {size = [], fill_value = 1.0, dtype = f32}
  %high = aten.amax(%x) {dim = [-1], keepdim = true}
  %low = aten.sub.Tensor(%x, %high)
  %e = aten.exp(%low)
  %s = aten.sum.dim_IntList(%e) {dim = [-1], keepdim = true}
"""


def _value(body: str, name: str = "y") -> Value:
    graph: Graph = parse(f"{HEAD}{body}\n  return %y\n}}")
    return next(value for node in graph for value in node.outputs if value.name == name)


@pytest.mark.parametrize(
    ("made", "masked", "normalised"),
    [
        ("aten.exp(%x)", False, False),
        ("aten.where.self(%m, %e, %zero)", True, False),
        ("aten.tril(%e)", True, False),
        ("aten.softmax.int(%x) {dim = -1}", False, True),
    ],
)
def test_exponentials_are_read_past_their_mask(made: str, masked: bool, normalised: bool) -> None:
    found = read_exponent(_value(f"  %y = {made}"), (2,))
    assert found is not None
    assert (found.is_masked, found.is_normalised) == (masked, normalised)


@pytest.mark.parametrize(
    "made",
    [
        "aten.softmax.int(%x) {dim = 1}",
        "aten.where.self(%m, %e, %one)",
        "aten.neg(%e)",
    ],
)
def test_what_is_no_exponential_along_the_keys_is_none(made: str) -> None:
    assert read_exponent(_value(f"  %y = {made}"), (2,)) is None


@pytest.mark.parametrize(
    ("made", "is_total"),
    [
        ("aten.add.Scalar(%s) {other = 1e-9}", True),  # s ≥ 1: it vanishes in rounding
        ("aten.clamp_min(%s) {min = 1e-9}", True),
        ("aten.add.Scalar(%s) {other = 1e-3}", False),
        ("aten.expand(%s) {size = [2, 3, 7]}", True),
    ],
)
def test_a_sum_is_read_past_what_vanishes_beside_it(made: str, is_total: bool) -> None:
    value = _value(f"  %y = {made}")
    found = read_total(Operand(value, fresh_axes(value.shape)))
    assert (found is not None and found.dims == (2,)) is is_total


def test_the_maximum_of_a_row_is_taken_off_and_that_of_another_axis_is_not() -> None:
    low = _value("  %y = aten.neg(%low)", "low")
    source, how = unshifted(low, (2,))
    assert (source.name, how) == ("x", "maximum")
    assert unshifted(low, (1,)) == (low, "")


def test_reciprocals_and_small_numbers_are_seen_in_each_spelling() -> None:
    for made in ("aten.reciprocal(%s)", "aten.pow.Tensor_Scalar(%s) {exponent = -1}"):
        found = reciprocal_of(_value(f"  %y = {made}").producer)
        assert found is not None
        assert found.name == "s"
    assert (
        reciprocal_of(_value("  %y = aten.pow.Tensor_Scalar(%s) {exponent = -2}").producer) is None
    )
    small = _value("  %y = aten.clamp_min(%s) {min = 0.5}").producer
    assert small is not None
    assert added(small) == 0.5
