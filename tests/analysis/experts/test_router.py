"""What chooses experts is read, and whether a softmax alone decides their weights."""

from __future__ import annotations

import pytest

from attngraph.analysis.experts.reading import choices
from attngraph.analysis.experts.router import softmax_near, softmax_of
from attngraph.ir import Graph, parse


def _graph(lines: str) -> Graph:
    return parse(
        "graph @main {\ndim rows = 5 in 1..\ninput %scores : f32[rows, 8]\n"
        f"input %other : f32[rows, 2]\n{lines}\n%read = aten.add.Scalar(%i) {{other = 1}}\n"
        "return %w, %read\n}"
    )


_BEFORE = "%p = aten.softmax.int(%scores) {dim = 1}\n%w, %i = aten.topk(%p) {k = 2, dim = 1}"
_BEHIND = "%t, %i = aten.topk(%scores) {k = 2, dim = 1}\n%w = aten.softmax.int(%t) {dim = 1}"
_NORMALISED = (
    "%p = aten.softmax.int(%scores) {dim = 1}\n%t, %i = aten.topk(%p) {k = 2, dim = 1}\n"
    "%s = aten.sum.dim_IntList(%t) {dim = [1], keepdim = true}\n%w = aten.div.Tensor(%t, %s)"
)


@pytest.mark.parametrize("lines", [_BEFORE, _BEHIND, _NORMALISED])
def test_a_softmax_before_or_behind_the_choice_decides_its_weights(lines: str) -> None:
    graph = _graph(lines)
    (choice,) = choices(graph)
    assert (choice.experts, choice.count) == (8, 2)
    assert softmax_of(choice, graph.outputs[0]) is graph.inputs[0]
    near = softmax_near(choice)
    assert near is not None
    assert near.op == "aten.softmax.int"


@pytest.mark.parametrize(
    "lines",
    [
        # the router's softmax is over the rows
        _BEFORE.replace("(%scores) {dim = 1}", "(%scores) {dim = 0}"),
        # weights below a number are cut off
        f"{_BEHIND.replace('%w =', '%v =')}\n%w = aten.clamp_min(%v) {{min = 0.1}}",
        # another input decides too
        f"{_BEHIND.replace('%w =', '%v =')}\n%w = aten.mul.Tensor(%v, %other)",
        # rounded to halves on the way
        f"{_BEHIND.replace('%w =', '%v =')}\n%h = aten._to_copy(%v) {{dtype = f16}}\n"
        "%w = aten._to_copy(%h) {dtype = f32}",
    ],
)
def test_where_anything_else_decides_it_is_no_softmax_of_the_scores(lines: str) -> None:
    graph = _graph(lines)
    (choice,) = choices(graph)
    assert softmax_of(choice, graph.outputs[0]) is None


@pytest.mark.parametrize(
    "lines",
    [
        "%w, %i = aten.topk(%scores) {k = 2, dim = 1, largest = false}",
        "%w, %i = aten.topk(%scores) {k = 2, dim = 0}",
    ],
)
def test_the_smallest_and_the_best_row_are_no_choice_of_experts(lines: str) -> None:
    assert not list(choices(_graph(lines)))
