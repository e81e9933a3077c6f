"""What stands around a softmax is named by its shape, whatever lies between, and not by accident.

The fixtures of fuse-attention hold what each name is given to; these are the near misses.
"""

from __future__ import annotations

import pytest

from attngraph.analysis.attention.activations import is_product
from attngraph.analysis.attention.refusals import Declined, Refusal
from attngraph.analysis.attention.shapes import additive, divisions, escapes, reused, without_values
from attngraph.analysis.attention.without_softmax import without_softmax
from attngraph.ir import Graph, Node, Value, parse

HEAD = """
graph @main {
  input %q : f32[2, 3, 5, 4]
  input %k : f32[2, 3, 7, 4]
  input %v : f32[2, 3, 7, 4]
  input %m : bool[2, 1, 5, 7]
  parameter %p : f32[1, 4]
  %kt = aten.transpose.int(%k) {dim0 = -2, dim1 = -1}
"""
PRODUCT = "  %s = aten.matmul(%q, %kt)\n"
SUM = """  %rows = aten.unsqueeze(%q) {dim = 3}
  %columns = aten.unsqueeze(%k) {dim = 2}
  %sum = aten.add.Tensor(%rows, %columns)
"""


def _graph(body: str) -> Graph:
    return parse(f"{HEAD}{body}\n}}")


def _value(graph: Graph, name: str) -> Value:
    return next(value for node in graph for value in node.outputs if value.name == name)


def _node(graph: Graph, name: str) -> Node:
    node = _value(graph, name).producer
    assert node is not None
    return node


def _named(body: str) -> list[Declined]:
    return [declined for _, declined in without_softmax(_graph(body))]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ("aten.mul.Scalar(%s) {other = 2}", True),
        ("aten.where.ScalarOther(%m, %s) {other = -9}", True),
        ("aten.permute(%s) {dims = [0, 2, 1, 3]}", True),
        ("aten.relu(%s)", True),
        ("aten.softmax.int(%s) {dim = -1}", False),
        ("aten.cumsum(%s) {dim = -1}", False),
    ],
)
def test_a_product_is_seen_past_what_keeps_each_score_by_itself(made: str, expected: bool) -> None:
    graph = _graph(f"{PRODUCT}  %y = {made}\n  return %y")
    assert is_product(_value(graph, "y")) is expected


def test_a_product_with_a_weight_is_none_of_scores() -> None:
    graph = _graph("  %y = aten.linear(%q, %p)\n  return %y")
    assert not is_product(_value(graph, "y"))


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ("%t = aten.tanh(%sum)\n%l = aten.linear(%t, %p)", True),
        (
            "%t = aten.relu(%sum)\n%u = aten.mul.Tensor(%t, %p)\n%l = aten.linear(%u, %p)",
            True,
        ),
        # A tanh above which nothing is summed with weights is a softcap.
        ("%w = aten.linear(%sum, %p)\n%l = aten.tanh(%w)", False),
        # A sum without a nonlinear function is a sum of projections.
        ("%l = aten.linear(%sum, %p)", False),
        ("%t = aten.tanh(%rows)\n%l = aten.linear(%t, %p)", False),
    ],
)
def test_additive_attention_is_a_weighted_nonlinear_sum(logits: str, expected: bool) -> None:
    graph = _graph(f"{SUM}{logits}\n%w9 = aten.softmax.int(%l) {{dim = 3}}\n  return %w9")
    assert (additive(_node(graph, "w9")) is not None) is expected


def test_divisions_are_found_behind_a_small_number() -> None:
    graph = _graph(
        PRODUCT + "  %t = aten.sum.dim_IntList(%s) {dim = [-1], keepdim = true}\n"
        "  %e = aten.add.Scalar(%t) {other = 1e-6}\n  %y = aten.div.Tensor(%s, %e)\n  return %y"
    )
    assert divisions(_node(graph, "t")) == [_node(graph, "y")]


def test_scores_escape_by_an_output_and_not_by_their_softmax() -> None:
    body = PRODUCT + "  %w = aten.softmax.int(%s) {dim = -1}\n  %y = aten.matmul(%w, %v)\n"
    inside = _graph(f"{body}  return %y")
    until = {_node(inside, "w"), _node(inside, "y")}
    assert not escapes(_node(inside, "s"), until)
    outside = _graph(f"{body}  %z = aten.neg(%s)\n  return %y, %z")
    until = {_node(outside, "w"), _node(outside, "y")}
    assert escapes(_node(outside, "s"), until)


def test_scores_that_are_added_to_themselves_are_no_residual_attention() -> None:
    body = PRODUCT + "  %w = aten.softmax.int(%s) {dim = -1}\n  %y = aten.matmul(%w, %v)\n"
    twice = _graph(f"{body}  %r = aten.relu(%s)\n  %z = aten.add.Tensor(%s, %r)\n  return %y, %z")
    found = reused(_node(twice, "s"), _node(twice, "w"))
    assert found == Refusal.READ_ELSEWHERE.at(_node(twice, "s"))


@pytest.mark.parametrize("cast", ["", "  %g = aten._to_copy(%f) {dtype = f32}\n"])
def test_weights_of_another_function_are_named_by_it(cast: str) -> None:
    last = "g" if cast else "f"
    found = _named(
        f"{PRODUCT}  %f = aten.sigmoid(%s)\n{cast}  %y = aten.matmul(%{last}, %v)\n  return %y"
    )
    assert [declined.code for declined in found] == ["no-softmax"]
    assert "sigmoid of the scores" in found[0].reason


def test_plain_products_and_softmaxes_are_not_named() -> None:
    assert not _named(PRODUCT + "  %y = aten.matmul(%s, %v)\n  return %y")
    assert not _named(
        PRODUCT + "  %w = aten.softmax.int(%s) {dim = -1}\n  %y = aten.matmul(%w, %v)\n  return %y"
    )


@pytest.mark.parametrize(
    ("logits", "between", "expected"),
    [
        (
            "%l = aten.cumsum(%s) {dim = -1}",
            "%f = aten.pow.Tensor_Scalar(%w) {exponent = 2}",
            "weights-changed",
        ),
        ("%l = aten.relu(%s)", "%f = aten.mean.dim(%w) {dim = [1]}", "weights-changed"),
        (
            "%r = aten.select.int(%s) {dim = -1, index = 0}\n"
            "%l = aten.select_scatter(%s, %r) {dim = -1, index = 1}",
            "%f = aten.pow.Tensor_Scalar(%w) {exponent = 2}",
            "logits-not-a-product",
        ),
        # Scores that a projection makes of one side alone are those of a mixture.
        ("%l = aten.linear(%q, %e)", "%f = aten.pow.Tensor_Scalar(%w) {exponent = 2}", "pooling"),
        ("%l = aten.linear(%q, %e)", "%f = aten.neg(%l)", "distribution"),
    ],
)
def test_scores_of_queries_and_keys_are_no_mixture(
    logits: str, between: str, expected: str
) -> None:
    values = "u" if "mean" in between else "v"
    graph = _graph(
        f"  parameter %e : f32[7, 4]\n  %u = aten.select.int(%v) {{dim = 1, index = 0}}\n"
        f"{PRODUCT}{logits}\n  %w = aten.softmax.int(%l) {{dim = -1}}\n{between}\n"
        f"  %y = aten.matmul(%f, %{values})\n  return %y, %w"
    )
    anchor, above = _node(graph, "w"), _node(graph, "l")
    unread = Refusal.NOT_A_PRODUCT.at(above, op=above.op)
    assert without_values(anchor, None, unread).code == expected
