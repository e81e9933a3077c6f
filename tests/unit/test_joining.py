"""Two graphs of one model, joined where they differ."""

from __future__ import annotations

import pytest
import torch

from attngraph.checks.joining import UnlikeError, join
from attngraph.ir import Graph, interpret, parse, verify

GIVEN = """
  dim n = 4 in 1..
  dim u0 = 2 in 0..
  input %x : f32[n, 4]
  input %ids : i64[n]
  parameter %table : f32[3, 4]
  %sum = aten.sum(%x) : f32[]
  %yes = aten.gt.Scalar(%sum) {other = 0} : bool[]
"""
X, IDS = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).abs(), torch.tensor([0, 2])
TABLE = torch.arange(12.0).reshape(3, 4)


def _graph(body: str, outputs: str) -> Graph:
    graph = parse(f"graph @main {{{GIVEN}{body}\n  return {outputs}\n}}")
    for value in graph.constants.values():
        value.data = TABLE
    return graph


def _joined(ours: str, theirs: str) -> Graph:
    graph = _graph(ours, '%out as "out", %yes as "yes"')
    join(graph, _graph(theirs, '%out as "out"'), 1, when=False, results=1)
    verify(graph)
    return graph


def _ops(graph: Graph) -> list[str]:
    return [node.op.removeprefix("aten.").split(".")[0] for node in graph]


def test_what_both_do_is_done_once_to_what_was_chosen() -> None:
    rest = "%e = aten.exp(%v) : f32[n, 4]\n  %out = aten.neg(%e) : f32[n, 4]"
    ours = f"%v = aten.mul.Scalar(%x) {{other = 2.0}} : f32[n, 4]\n  {rest}"
    theirs = f"%v = aten.add.Scalar(%x) {{other = 1.0}} : f32[n, 4]\n  {rest}"
    graph = _joined(ours, theirs)
    assert _ops(graph) == ["sum", "gt", "mul", "add", "where", "exp", "neg"]
    for x in (X, -X):
        expected = -((x * 2).exp() if x.sum() > 0 else (x + 1).exp())
        torch.testing.assert_close(interpret(graph, (x, IDS))[0], expected)


def test_equal_graphs_choose_nothing() -> None:
    same = "%out = aten.exp(%x) : f32[n, 4]"
    assert _ops(_joined(same, same)) == ["sum", "gt", "exp"]


def test_indices_of_one_side_are_harmless_on_the_other() -> None:
    looked = "%out = aten.embedding(%table, %ids) : f32[n, 4]"
    graph = _joined(looked, "%out = aten.exp(%x) : f32[n, 4]")
    beyond = torch.tensor([7, 9])
    torch.testing.assert_close(interpret(graph, (-X, beyond))[0], (-X).exp())
    torch.testing.assert_close(interpret(graph, (X, IDS))[0], TABLE[IDS])
    with pytest.raises((IndexError, RuntimeError)):
        interpret(graph, (X, beyond))


def test_results_of_other_shapes_are_not_joined() -> None:
    with pytest.raises(UnlikeError):
        _joined(
            "%out = aten.exp(%x) : f32[n, 4]",
            "%out = aten.sum.dim_IntList(%x) {dim = [1]} : f32[n]",
        )


def test_what_hides_other_shapes_is_chosen_from() -> None:
    """A mean of some rows and one of all: the rows are not joined, and their means are."""
    ours = "%out = aten.sum(%x) : f32[]"
    theirs = (
        "%row = aten.select.int(%x) {dim = 0, index = 0} : f32[4]\n  %out = aten.sum(%row) : f32[]"
    )
    graph = _joined(ours, theirs)
    for x in (X, -X):
        expected = x.sum() if x.sum() > 0 else x[0].sum()
        torch.testing.assert_close(interpret(graph, (x, IDS))[0], expected)


def test_sizes_of_no_rows_are_told_on_the_side_that_selects_some() -> None:
    """Eager asks whether there are rows, and fails without: of 0 elements -1 is no size."""
    rest = "%out = aten.sum(%parts) : f32[]"
    ours = (
        "%many = aten.gt.Scalar(%x) {other = 100} : bool[n, 4]\n"
        "  %rows = aten.index.Tensor(%x, %many) : f32[u0]\n"
        f"  %parts = aten.reshape(%rows) {{shape = [u0, -1]}} : f32[u0, 1]\n  {rest}"
    )
    graph = _joined(f"{ours}", "%out = aten.sum(%x) : f32[]")
    for x in (X, -X):
        expected = x.sum() if x.sum() <= 0 else torch.tensor(0.0)
        torch.testing.assert_close(interpret(graph, (x, IDS))[0], expected)
