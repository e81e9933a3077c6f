"""Regions of large static sizes are evaluated at small ones of the same structure."""

from __future__ import annotations

from typing import Any

import pytest

from attngraph.analysis.layout.any_size import Sizes
from attngraph.ir import Builder, Graph, Node, format_graph, verify
from attngraph.ir.dims import symbol
from attngraph.passes import run
from attngraph.passes.rewriting.evidence import Evidence
from attngraph.passes.rewriting.outcomes import Different, Equal, NotEvaluated
from attngraph.passes.rewriting.regions import Region
from tests.passes.fixtures import load
from tests.passes.test_checked import BREAKS, _tamper

MOST = 1 << 16  # elements of a trial; at their own sizes these regions have 2^23 and more
STATIC = sorted(name for name, (_, body, _, _) in BREAKS.items() if "seq" in body)


def _static(body: str) -> Graph:
    """The graph with 70 elements in a batch of 1,400 positions."""
    text = body.replace("batch", "70").replace("seq + 3", "1403").replace("seq", "1400")
    return load(f"graph @main {{{text}\n}}\n")


@pytest.fixture
def elements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements each trial computes."""
    counts: list[int] = []
    trial = Region.run

    def counted(region: Region, sizes: Any, kind: str, fixed: Any, aims: Any = None) -> Any:
        counts.append(region.elements(sizes, fixed)[0])
        return trial(region, sizes, kind, fixed, aims)

    monkeypatch.setattr(Region, "run", counted)
    return counts


@pytest.mark.parametrize("name", STATIC)
def test_a_rewrite_at_large_static_sizes_is_made(name: str, elements: list[int]) -> None:
    item, body, op, _ = BREAKS[name]
    graph = _static(body)
    (result,) = run(graph, item)
    verify(graph)
    assert op in {node.op for node in graph}
    assert result.tally.by_evaluation
    assert not result.tally.left_out
    assert 0 < max(elements) < MOST


@pytest.mark.defect
@pytest.mark.parametrize("name", STATIC)
def test_a_broken_rewrite_at_large_static_sizes_is_taken_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    item, body, op, change = BREAKS[name]
    graph = _static(body)
    before = format_graph(graph)
    changed = _tamper(monkeypatch, op, change)
    (result,) = run(graph, item)
    monkeypatch.undo()
    assert changed
    assert format_graph(graph) == before
    assert [remark.code for remark in result.remarks] == ["unequal"]


def _outcome(body: str, op: str, **attrs: Any) -> Equal | Different | NotEvaluated:
    """A graph's result against that of another op on its last node's inputs."""
    graph = load(f"graph @main {{{body}\n}}\n")
    (old,) = graph.outputs
    assert isinstance(old.producer, Node)
    new = Builder(graph)(op, *old.producer.inputs, **attrs)
    return Evidence(graph).compare([(old, new)], [], kinds=["plain"])


SUMS = """
  input %x : f32[4096, 4096]
  %y = aten.sum.dim_IntList(%x) {dim = [DIM]}
  return %y"""


def test_an_axis_that_is_mistaken_for_another_of_its_size_is_seen() -> None:
    right = _outcome(SUMS.replace("DIM", "1"), "aten.sum.dim_IntList", dim=[-1])
    assert isinstance(right, Equal)
    wrong = _outcome(SUMS.replace("DIM", "1"), "aten.sum.dim_IntList", dim=[0])
    assert isinstance(wrong, Different)


ROLLED = """
  input %x : f32[8192, 4096]
  %y = aten.roll(%x) {shifts = [256], dims = [0]}
  return %y"""


def test_what_can_only_be_evaluated_at_its_own_size_and_is_too_large_is_left_out() -> None:
    assert isinstance(_outcome(ROLLED, "aten.roll", shifts=[256], dims=[0]), NotEvaluated)


TRIANGLE = """
  input %x : f32[1, 2, 2900, 2900]
  %i = aten.arange() {end = 2900}
  %r = aten.reshape(%i) {shape = [2900, 1]}
  %c = aten.reshape(%i) {shape = [1, 2900]}
  %m = aten.gt.Tensor(%c, %r)
  %y = aten.masked_fill.Scalar(%x, %m) {value = -inf}
  return %y"""


def test_positions_that_are_counted_follow_the_size() -> None:
    assert isinstance(_outcome(TRIANGLE, "aten.masked_fill.Scalar", value=float("-inf")), Equal)
    wrong = _outcome(TRIANGLE, "aten.masked_fill.Scalar", value=0.0)
    assert isinstance(wrong, Different)


CHANNELS = """
  input %x : f32[3, 1024, 256]
  parameter %w : f32[1024, 1, 4]
  parameter %b : f32[1024]
  %y = aten.conv1d(%x, %w, %b) {padding = [3], groups = 1024}
  return %y"""


def test_a_convolution_of_each_channel_has_any_number_of_them(elements: list[int]) -> None:
    same: dict[str, Any] = {"padding": [3], "groups": 1024}
    assert isinstance(_outcome(CHANNELS, "aten.conv1d", **same), Equal)
    assert 0 < max(elements) < MOST
    wrong = _outcome(CHANNELS, "aten.conv1d", **{**same, "padding": [6], "dilation": [3]})
    assert isinstance(wrong, Different)


def test_sizes_that_are_one_are_solved_together() -> None:
    sizes = Sizes(["batch"])
    s, t, hidden = (sizes.fresh(size) for size in (512, 512, 768))
    assert sizes.fresh(12) == 12
    assert sizes.regrouped([symbol("batch"), s, hidden], [symbol("batch"), 512, 12, 64])[:2] == (
        symbol("batch"),
        s,
    )
    heads = sizes.regrouped([hidden], [12, 64])
    assert heads[0] == 12
    assert sizes.resolved(hidden) == 12 * heads[1]
    sizes.unify(s, t)
    assert sizes.resolved(s) == sizes.resolved(t)
    assert len(sizes.unknowns) == 2
    sizes.unify(heads[1], 64)
    assert sizes.resolved(hidden) == 768


def test_merged_dims_are_parted_in_their_order() -> None:
    sizes = Sizes([])
    high, wide = sizes.fresh(32), sizes.fresh(48)
    (merged,) = sizes.regrouped([high, wide], [32 * 48])
    assert sizes.regrouped([merged], [32, 48]) == (high, wide)
    sizes.regrouped([merged], [48, 32])  # other groups: nothing fits but the numbers
    assert sizes.unknowns == [] or sizes.number(merged) == 32 * 48
