"""From the probabilities down to the values: what may lie between, and what is remembered of it."""

from __future__ import annotations

import pytest

from attngraph.analysis.attention.refusals import Declined, Refusal
from attngraph.analysis.attention.weighted_sum import Below, find_below, guarded
from attngraph.ir import Graph, Node, parse

HEAD = """
graph @main {
  input %w : f32[2, 3, 5, 7]
  input %v : f32[2, 3, 7, 4]
  input %m : bool[2, 1, 5, 7]
  input %row : f32[2, 3, 5, 1]
  %zero = aten.full() {size = [], fill_value = 0.0, dtype = f32}
  parameter %mix : f32[3, 3]
  %p = aten.softmax.int(%w) {dim = -1}
"""


def _graph(body: str) -> Graph:
    return parse(f"{HEAD}{body}\n  return %y\n}}")


def _node(graph: Graph, name: str) -> Node:
    return next(node for node in graph if node.output.name == name)


def _below(body: str) -> Below | Declined | None:
    return find_below(_node(_graph(body), "p").output, 3)


def test_a_product_over_the_keys_is_found_past_layout_and_factors() -> None:
    found = _below("""
  %a = aten.mul.Scalar(%p) {other = 0.5}
  %b = aten.mul.Tensor(%a, %row)
  %c = aten.permute(%b) {dims = [0, 1, 3, 2]}
  %d = aten.permute(%c) {dims = [0, 1, 3, 2]}
  %y = aten.matmul(%d, %v)""")
    assert isinstance(found, Below)
    assert (found.root.output.name, found.value.value.name) == ("y", "v")
    assert found.gain == 0.5
    (gain,) = found.gains
    assert gain.operand is not None
    assert gain.operand.value.name == "row"
    assert found.guard is None


def test_a_guard_is_remembered_and_a_fill_with_zeros_is_a_mask() -> None:
    guard = _below("  %g = aten.nan_to_num(%p) {nan = 0.0}\n  %y = aten.matmul(%g, %v)")
    assert isinstance(guard, Below)
    assert guard.guard is not None
    assert not guard.refills
    fill = _below("  %z = aten.where.self(%m, %zero, %p)\n  %y = aten.matmul(%z, %v)")
    assert isinstance(fill, Below)
    (mask,) = fill.refills
    assert (mask.operand.value.name, mask.keep, mask.fill) == ("m", False, 0.0)


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        (
            '  %y = aten.einsum(%p, %mix) {equation = "bhst,hg->bgst"}',
            Refusal.WEIGHTS_MIXED,
        ),
        (
            "  %t = aten.permute(%p) {dims = [0, 1, 3, 2]}\n"
            "  %u = aten.slice.Tensor(%v) {dim = 2, start = 0, end = 5}\n"
            "  %y = aten.matmul(%t, %u)",
            Refusal.OTHER_AXIS,
        ),
    ],
)
def test_a_product_over_another_axis_is_named(body: str, refusal: Refusal) -> None:
    graph = _graph(body)
    assert find_below(_node(graph, "p").output, 3) == refusal.at(_node(graph, "y"))


@pytest.mark.parametrize("op", ["aten.exp(%p)", "aten.cumsum(%p) {dim = -1}"])
def test_nothing_is_found_past_another_function(op: str) -> None:
    assert _below(f"  %e = {op}\n  %y = aten.matmul(%e, %v)") is None


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ("aten.nan_to_num(%p) {nan = 0.0}", True),
        ("aten.nan_to_num(%p) {nan = 1.0}", False),
        ("aten.where.self(%test, %zero, %p)", True),
        ("aten.where.self(%test, %zero, %w)", False),
        ("aten.where.self(%m, %zero, %p)", False),
    ],
)
def test_a_guard_replaces_nan_of_its_own_input_by_zero(guard: str, expected: bool) -> None:
    graph = _graph(f"  %test = aten.isnan(%p)\n  %y = {guard}")
    assert (guarded(_node(graph, "y")) is not None) is expected
