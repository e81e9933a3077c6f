"""Numbers in graphs are read as their dtypes hold them."""

from __future__ import annotations

import math

import pytest

from attngraph.analysis.values.scalars import fill_of, uniform
from attngraph.ir import Graph, parse


def _graph(lines: str) -> Graph:
    return parse(
        "graph @main {\n  dim n = 3 in 1..\n  input %x : f16[n, 4]\n  input %m : bool[n, 4]\n"
        f"{lines}\n  return %y\n}}"
    )


@pytest.mark.parametrize(
    ("fill", "dtype", "expected"),
    [("-1e9", "f16", -math.inf), ("0.1", "f64", 0.1), ("2.5", "i64", 2.0), ("3", "bool", 1.0)],
)
def test_a_fill_is_what_its_dtype_holds(fill: str, dtype: str, expected: float) -> None:
    made = f"  %f = aten.full() {{size = [1], fill_value = {fill}, dtype = {dtype}}}\n"
    graph = _graph(f"{made}  %y = aten.expand(%f) {{size = [n]}}")
    assert uniform(graph.outputs[0]) == expected


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        ("aten.mul.Scalar(%f) {other = -1e9}", -math.inf),
        ("aten.add.Tensor(%f, %f) {alpha = 3}", 8.0),
        ("aten.rsqrt(%f)", 2.0**-0.5),
        ("aten.fill.Tensor(%f, %one)", 7.0),  # which takes a single number alone
        ("aten.add.Tensor(%f, %x)", None),
        ("aten.mul.Scalar(%f) {other = n}", None),
        ("aten.cumsum(%f) {dim = 0}", None),
    ],
)
def test_a_pointwise_function_of_numbers_is_one(computed: str, expected: float | None) -> None:
    """Ones times −1e9 are beyond a half; a number of each size, or of a place, is none."""
    made = "  %f = aten.full() {size = [n, 4], fill_value = 2, dtype = f16}\n"
    made += "  %one = aten.full() {size = [], fill_value = 7, dtype = f16}\n"
    found = uniform(_graph(f"{made}  %y = {computed}").outputs[0])
    assert found == (None if expected is None else pytest.approx(expected, rel=2**-11))


def test_a_residual_stream_is_not_followed_to_its_beginning() -> None:
    lines = "".join(f"  %s{at + 1} = aten.add.Tensor(%s{at}, %x)\n" for at in range(1, 2000))
    graph = _graph(f"  %s1 = aten.neg(%x)\n{lines}  %y = aten.neg(%s2000)")
    assert uniform(graph.outputs[0]) is None


@pytest.mark.parametrize(("operands", "keep"), [("%x, %f", True), ("%f, %x", False)])
def test_a_fill_stands_on_either_side_of_a_choice(operands: str, keep: bool) -> None:
    made = "  %f = aten.full() {size = [], fill_value = -1e9, dtype = f16}\n"
    graph = _graph(f"{made}  %y = aten.where.self(%m, {operands})")
    x, m = graph.inputs
    node = graph.outputs[0].producer
    assert node is not None
    assert fill_of(node) == (x, m, keep, -math.inf)


def test_a_choice_of_two_tensors_fills_nothing() -> None:
    node = _graph("  %y = aten.where.self(%m, %x, %x)").outputs[0].producer
    assert node is not None
    assert fill_of(node) is None
