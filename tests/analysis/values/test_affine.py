"""The algebra of affine maps, against the maps applied one after the other."""

from __future__ import annotations

import itertools

import pytest
import torch

from attngraph.analysis.values.affine import Affine, numbers, product_above, read_linear
from attngraph.ir import Graph, Node, Value, parse
from attngraph.passes import make

OUT, MIDDLE, IN = 3, 4, 5


def constant(*shape: int, dtype: torch.dtype = torch.float32) -> Value:
    return Graph().add_constant("w", torch.randn(*shape).to(dtype))


def applied(item: Affine, x: torch.Tensor) -> torch.Tensor:
    """The map on one vector, as its docstring says."""
    if item.factor is not None:
        factor = numbers(item.factor)
        x = factor * x if factor.dim() == 1 else factor @ x
    return x if item.shift is None else x + numbers(item.shift)


def of(rows: int, columns: int, kind: str, shifted: bool) -> Affine:
    data = {"matrix": constant(rows, columns), "scale": torch.randn(rows).double(), "one": None}
    return Affine(data[kind], constant(rows) if shifted else None)


@pytest.mark.parametrize("shifts", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("inner", ["matrix", "scale", "one"])
@pytest.mark.parametrize("outer", ["matrix", "scale", "one"])
def test_after_is_one_map_behind_the_other(
    outer: str, inner: str, shifts: tuple[bool, bool]
) -> None:
    rows = MIDDLE if inner == "matrix" else IN
    second = of(OUT if outer == "matrix" else rows, rows, outer, shifts[0])
    first = of(rows, IN, inner, shifts[1])
    x = torch.randn(IN).double()
    torch.testing.assert_close(applied(second.after(first), x), applied(second, applied(first, x)))


@pytest.mark.parametrize("shifts", list(itertools.product([False, True], repeat=2)))
def test_plus_is_the_sum(shifts: tuple[bool, bool]) -> None:
    left, right = (of(OUT, IN, "matrix", shifted) for shifted in shifts)
    x = torch.randn(IN).double()
    found = left.plus(right, -0.5)
    torch.testing.assert_close(applied(found, x), applied(left, x) - 0.5 * applied(right, x))
    assert not found.is_exact


def test_what_no_law_touches_stays_the_stored_constant() -> None:
    weight = Graph().add_constant("w", torch.empty(OUT, IN, device="meta"))
    shifted = Affine(None, torch.ones(OUT).double()).after(Affine(weight))
    assert shifted.factor is weight  # which has no numbers to read
    assert shifted.is_exact
    bias = constant(OUT)
    scaled = Affine(constant(OUT, IN), bias).after(Affine(torch.full((IN,), 2.0).double()))
    assert scaled.shift is bias


POWERS = torch.tensor([2.0, 0.25, -1.0]).double()


def test_powers_of_two_are_exact_on_either_side() -> None:
    weight, bias = constant(OUT, 3), constant(OUT)
    assert Affine(POWERS).after(Affine(weight, bias)).is_exact
    assert Affine(weight, bias).after(Affine(POWERS)).is_exact


def test_other_factors_and_sums_are_not_exact() -> None:
    weight, bias = constant(OUT, 3), constant(OUT)
    assert not Affine(POWERS * 3).after(Affine(weight)).is_exact
    assert not Affine(weight).after(Affine(POWERS * 3)).is_exact
    assert not Affine(None, POWERS).after(Affine(weight, bias)).is_exact
    assert not Affine(weight).after(Affine(POWERS, POWERS)).is_exact
    assert not Affine(weight).after(Affine(constant(3, IN))).is_exact


@pytest.mark.parametrize("where", ["weight", "bias"])
@pytest.mark.parametrize("exponent", [-30, 30])
def test_a_power_of_two_that_leaves_the_dtype_is_not_exact(where: str, exponent: int) -> None:
    data = {"weight": torch.ones(OUT, IN), "bias": torch.ones(OUT)}
    data[where] *= 1.5 * 2.0**10
    graph = Graph()
    weight, bias = (graph.add_constant(name, item.half()) for name, item in data.items())
    far = torch.full((OUT,), 2.0**exponent).double()
    near = torch.full((OUT,), 2.0**-1).double()
    assert Affine(near).after(Affine(weight, bias)).is_exact
    assert not Affine(far).after(Affine(weight, bias)).is_exact


def test_under_exact_a_bias_that_would_underflow_stays() -> None:
    text = f"""graph @main {{
  dim rows = 3 in 1..
  input %x : f32[rows, {IN}]
  parameter %w : f32[{OUT}, {IN}]
  parameter %b : f32[{OUT}]
  %y = aten.linear(%x, %w, %b)
  %z = aten.mul.Scalar(%y) {{other = {2.0**-20}}}
  return %z
}}
"""
    for bias, folds in ((torch.ones(OUT), True), (torch.full((OUT,), 3 * 2.0**-140), False)):
        graph = parse(text, {"w": torch.randn(OUT, IN), "b": bias})
        for item in make("fold-scales"):
            type(item)(exact_only=True).run(graph)
        assert ("aten.mul.Scalar" not in [node.op for node in graph]) is folds


def node_of(op: str, graph: Graph) -> Node:
    return next(node for node in graph if node.op == op)


def test_a_linear_is_read_with_its_bias_and_nothing_else_is() -> None:
    graph = parse("""graph @main {
  input %x : f32[2, 4, 6]
  parameter %w : f32[4, 6]
  parameter %v : f32[6]
  parameter %k : f32[8, 4, 3]
  parameter %b : f32[4]
  input %c : f32[4]
  %linear = aten.linear(%x, %w, %b)
  %vector = aten.linear(%x, %v)
  %computed = aten.linear(%x, %w, %c)
  %conv = aten.conv1d(%x, %k)
  return %linear, %vector, %computed, %conv
}
""")
    whole, vector, computed, convolution = list(graph)
    linear = read_linear(whole)
    assert linear is not None
    assert (linear.source, linear.width) == (graph.inputs[0], 4)
    assert [linear.weight.name, linear.bias and linear.bias.name] == ["w", "b"]
    assert read_linear(vector) is None  # (6,) has no features to scale
    assert read_linear(computed) is None
    assert read_linear(convolution) is None
    assert read_linear(convolution, or_convolution=True) is not None


def test_the_product_above_is_found_through_layouts_that_nobody_else_reads() -> None:
    text = """graph @main {
  dim batch = 3 in 1..
  input %x : f32[batch, 4, 6]
  parameter %w : f32[8, 6]
  %y = aten.linear(%x, %w)
  %h = aten.reshape(%y) {shape = [batch, 4, 2, 4]}
  %p = aten.permute(%h) {dims = [0, 2, 1, 3]}
  %s = aten.neg(%p)
  return %s
}
"""
    graph = parse(text)
    reader = node_of("aten.neg", graph)
    assert reader.inputs[0] is not None
    laid = product_above(graph, reader.inputs[0], reader)
    assert laid is not None
    assert [node.op for node in laid.path] == ["aten.linear", "aten.reshape", "aten.permute"]
    assert [atom.size for atom in laid.features] == [2, 4]
    graph = parse(text.replace("return %s", "return %s, %h"))
    reader = node_of("aten.neg", graph)
    assert reader.inputs[0] is not None
    assert product_above(graph, reader.inputs[0], reader) is None
