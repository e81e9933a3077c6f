"""Which nodes are affine or analytic in their operands: held against numbers."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.recurrence.uniform import is_affine, is_analytic
from attngraph.ir import Graph, interpret, parse

HEAD = """graph @main {
  input %x : f32[3, 4]
  input %y : f32[3, 4]
  input %m : bool[3, 4]
"""
# (a node of x, y and m; whether it is affine in x; whether it is analytic, m being known)
NODES = [
    ("aten.add.Tensor(%x, %y)", True, True),
    ("aten.sub.Tensor(%y, %x)", True, True),
    ("aten.rsub.Scalar(%x) {other = 2.0}", True, True),
    ("aten.neg(%x)", True, True),
    ("aten.mul.Scalar(%x) {other = 3.0}", True, True),
    ("aten.mul.Tensor(%x, %y)", True, True),
    ("aten.mul.Tensor(%x, %x)", False, True),
    ("aten.div.Tensor(%x, %y)", True, True),
    ("aten.div.Tensor(%y, %x)", False, True),
    ("aten.div.Tensor(%x, %x)", False, True),
    ("aten.sum.dim_IntList(%x) {dim = [1]}", True, True),
    ("aten.permute(%x) {dims = [1, 0]}", True, True),
    ("aten.cat(%x, %y) {dim = 0}", True, True),
    ("aten.exp(%x)", False, True),
    ("aten.pow.Tensor_Scalar(%x) {exponent = 2.0}", False, True),
    ("aten.cumsum(%x) {dim = 0}", False, True),
    ("aten.where.self(%m, %x, %y)", False, True),
    ("aten._to_copy(%x) {dtype = f64}", True, True),
    ("aten._to_copy(%x) {dtype = f16}", False, False),
    ("aten._to_copy(%x) {dtype = bf16}", False, False),
    ("aten._to_copy(%x) {dtype = i64}", False, False),
    ("aten.relu(%x)", False, False),
    ("aten.abs(%x)", False, False),
    ("aten.clamp(%x) {min = -1.0}", False, False),
    ("aten.maximum(%x, %y)", False, False),
    ("aten.amax(%x) {dim = [1]}", False, False),
    ("aten.round(%x)", False, False),
]


def _graph(line: str) -> Graph:
    return parse(f"{HEAD}  %z = {line}\n  return %z\n}}")


@pytest.mark.parametrize(("line", "affine", "analytic"), NODES, ids=[line for line, *_ in NODES])
def test_what_a_node_is_in_its_operands(line: str, affine: bool, analytic: bool) -> None:
    graph = _graph(line)
    node = graph.outputs[0].producer
    assert node is not None
    x, _, m = graph.inputs
    assert is_analytic(node, {m}, torch.float32) == analytic
    if analytic:
        assert is_affine(node, {x}) == affine
    if affine:
        a, b, other = torch.randn(3, 3, 4, dtype=torch.float64)
        seen = torch.rand(3, 4) > 0.5

        def run(given: torch.Tensor) -> torch.Tensor:
            (z,) = interpret(graph, (given, other.abs() + 1, seen))
            assert isinstance(z, torch.Tensor)
            return z

        torch.testing.assert_close(run(a * 0.3 + b * 0.7), run(a) * 0.3 + run(b) * 0.7)


def test_a_product_of_two_of_the_states_is_not_affine() -> None:
    for line in ("aten.mul.Tensor(%x, %y)", "aten.matmul(%x, %t)"):
        graph = parse(
            f"{HEAD}  %t = aten.permute(%y) {{dims = [1, 0]}}\n  %z = {line}\n  return %z\n}}"
        )
        node = graph.outputs[0].producer
        assert node is not None
        assert not is_affine(node, {value for value in node.inputs if value is not None})


def test_a_choice_by_what_isnt_known_may_switch() -> None:
    node = _graph("aten.where.self(%m, %x, %y)").outputs[0].producer
    assert node is not None
    assert not is_analytic(node, set(), torch.float32)
