"""Whether scores can reach a fill, and biases cancel: proved bounds, held against drawn scores."""

from __future__ import annotations

import math

import pytest
import torch

from attngraph.analysis.attention.score_bounds import (
    is_unreached,
    may_cancel,
    rounded_otherwise,
    weak_fills,
)
from attngraph.analysis.attention.site import Site, understand
from attngraph.ir import Graph, interpret, parse
from attngraph.ir.traits import SOFTMAX

HEAD = """graph @main {
  input %x : f32[2, 5, 8]
  input %m : bool[2, 1, 5]
  input %c : f32[2, 5, 5]
  parameter %g : f32[8]
  %n = aten.layer_norm(%x, %g) {normalized_shape = [8]}
  %q = QUERY
  %t = aten.permute(%q) {dims = [0, 2, 1]}
  %s = aten.matmul(%q, %t)
  %low = aten.full() {size = [], fill_value = FILL, dtype = f32}
  %f = aten.where.self(%m, %s, %low)
  %w = aten.softmax.int(%f) {dim = -1}
  %y = aten.matmul(%w, %x)
  return %y
}"""


def _site(query: str, fill: float = -1e4) -> tuple[Graph, Site]:
    text = HEAD.replace("QUERY", query).replace("FILL", str(fill))
    graph = parse(text, {"g": torch.full((8,), 2.0)})
    site = understand(next(node for node in graph if node.op in SOFTMAX))
    assert isinstance(site, Site)
    return graph, site


@pytest.mark.parametrize(
    ("query", "fill", "unreached"),
    [
        ("aten.mul.Scalar(%n) {other = 1.0}", -1e4, True),
        ("aten.mul.Scalar(%n) {other = 10.0}", -1e4, False),  # 8 · (2 · √8 · 10)² is above 1e4
        ("aten.mul.Scalar(%n) {other = 10.0}", -1e5, True),
        ("aten.tanh(%x)", -1e4, True),
        ("aten.mul.Scalar(%x) {other = 1.0}", -1e4, False),  # nothing bounds an input
        ("aten.mul.Scalar(%x) {other = 1.0}", -math.inf, False),
    ],
)
def test_scores_stay_above_a_fill_where_that_is_proved(
    query: str, fill: float, unreached: bool
) -> None:
    graph, site = _site(query, fill)
    assert bool(weak_fills(site.steps)) == (fill > -math.inf)
    if fill == -math.inf:
        return
    assert is_unreached(site) is unreached
    if unreached:
        scores = next(node.output for node in graph if node.op == "aten.matmul")
        graph.set_outputs([scores], ["scores"])
        for size in (1.0, 1e3, 1e6):
            x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)) * size
            (found,) = interpret(graph, [x, torch.ones(2, 1, 5, dtype=torch.bool), x[..., :5]])
            assert float(found.abs().max()) < -fill - 104  # exp(-104) is 0 in float32


def test_a_fill_that_absorbs_every_score_is_not_weak() -> None:
    _, site = _site("aten.tanh(%x)", -1e30)
    assert weak_fills(site.steps) == []


BIASED = """graph @main {
  input %q : f32[2, 5, 8]
  input %m : bool[2, 1, 5]
  input %c : f32[2, 5, 5]
  %t = aten.permute(%q) {dims = [0, 2, 1]}
  %s = aten.matmul(%q, %t)
  %zero = aten.full() {size = [], fill_value = 0.0, dtype = f32}
  %low = aten.full() {size = [], fill_value = LOW, dtype = f32}
  %high = aten.full() {size = [], fill_value = HIGH, dtype = f32}
  %a = aten.where.self(%m, %zero, %low)
  %b = aten.where.self(%m, %zero, %high)
  %p = aten.add.Tensor(%s, %a)
  %f = aten.add.Tensor(%p, %b)
  %w = aten.softmax.int(%f) {dim = -1}
  %y = aten.matmul(%w, %q)
  return %y
}"""


@pytest.mark.parametrize(
    ("low", "high", "cancels"),
    [(-1e30, 1e30, True), (-1e30, -1e30, False), (1e30, 1.0, False), (-1e30, 5.0, False)],
)
def test_biases_cancel_where_one_absorbs_the_scores_and_another_takes_it_away(
    low: float, high: float, cancels: bool
) -> None:
    graph = parse(BIASED.replace("LOW", str(low)).replace("HIGH", str(high)))
    site = understand(next(node for node in graph if node.op in SOFTMAX))
    assert isinstance(site, Site)
    assert may_cancel(site.steps) is cancels


SCALED_LATE = BIASED.replace(
    "%p = aten.add.Tensor(%s, %a)\n  %f = aten.add.Tensor(%p, %b)",
    "%p = aten.add.Tensor(%s, %a)\n  %f = aten.mul.Scalar(%p) {other = FACTOR}",
)


@pytest.mark.parametrize(
    ("low", "factor", "told"),
    [
        (-1e9, 0.375, -3.75e8),
        (-1e4, 0.375, -3750.0),
        (-1e9, 0.25, None),
        (-1e9, 1.0, None),
        (-3e38, 0.375, None),
        (-math.inf, 0.375, None),
    ],
)
def test_a_finite_mask_that_is_scaled_after_it_was_added_is_told(
    low: float, factor: float, told: float | None
) -> None:
    text = SCALED_LATE.replace("LOW", str(low)).replace("FACTOR", str(factor))
    graph = parse(text.replace("HIGH", "0.0"))
    site = understand(next(node for node in graph if node.op in SOFTMAX))
    assert isinstance(site, Site)
    assert rounded_otherwise(site.steps) == told
