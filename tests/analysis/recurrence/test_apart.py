"""Which places depend on which: NaN at some places shows wherever they are read."""

from __future__ import annotations

import itertools

import pytest
import torch

from attngraph.analysis.recurrence.apart import is_apart, is_tracked, places, with_nan
from attngraph.ir import parse
from attngraph.ir.dead import eliminate_dead_code


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_each_pair_of_places_is_told_apart_both_ways(size: int) -> None:
    told = [mask.tolist() for mask in places(size)]
    for one, other in itertools.permutations(range(size), 2):
        assert any(mask[one] and not mask[other] for mask in told)


@pytest.mark.parametrize(("read", "by"), [(0, 4), (3, 1), (5, 2)])
@pytest.mark.parametrize("coefficient", [1.0, 1e-30])
def test_a_read_of_another_place_shows_however_small(
    read: int, by: int, coefficient: float
) -> None:
    x = torch.randn(2, 6, 3)

    def mixed(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, by] += coefficient * x[:, read]
        return y

    apart = [is_apart(mixed(with_nan(x, 1, at)), 1, at) for at in places(6)]
    assert not all(apart)
    assert all(is_apart(with_nan(x, 1, at) * 2, 1, at) for at in places(6))


def test_runs_of_places_go_together() -> None:
    """Two groups of three heads each: the heads of a group may read one another."""
    x = torch.randn(6, 4)

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 3, 4).sum(1, keepdim=True).expand(2, 3, 4).reshape(6, 4)

    assert all(is_apart(grouped(with_nan(x, 0, at)), 0, at) for at in places(2))
    assert not all(is_apart(grouped(with_nan(x, 0, at)), 0, at) for at in places(6))


_SCORES = """
graph @main {
  input %q : f32[2, 4, 7, 8]
  input %k : f32[2, 4, 7, 8]
  %t = aten.permute(%k) {dims = [0, 1, 3, 2]}
  %p = aten.pad(%t) {pad = [0, 1]}
  %s = aten.matmul(%q, %p)
  %m = aten.sum.dim_IntList(%s) {dim = [2], keepdim = true}
  %o = aten.expand(MEANS) {size = [2, 4, 1, 8]}
  %row = aten.select.int(%o) {dim = 2, index = 0}
  %r = aten.select_scatter(%s, %row) {dim = 2, index = 1}
  return %r
}"""


@pytest.mark.parametrize(
    ("means", "apart"), [("%m", {0, 1}), ("%n", {0}), ("%l", {1})], ids=["own", "head", "element"]
)
def test_an_axis_that_keeps_its_track_needs_no_run(means: str, apart: set[int]) -> None:
    """Of elements and heads: the sums of the first one go to all."""
    first = "".join(
        f"  {name} = aten.slice.Tensor(%m) {{dim = {dim}, end = 1}}\n"
        for name, dim in (("%n", 1), ("%l", 0))
    )
    graph = parse(_SCORES.replace("MEANS", means).replace("  %o", f"{first}  %o"))
    eliminate_dead_code(graph)
    (output,) = graph.outputs
    for axis in (0, 1):
        given = dict.fromkeys(graph.inputs, axis)
        assert is_tracked(list(graph), given, output, axis) == (axis in apart)
