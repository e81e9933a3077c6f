"""A bias is its fills and what is left of it, added again: at every index, for any inputs."""

from __future__ import annotations

import math

import pytest
import torch

from attngraph.analysis.masks.masking import Masking, Scores
from attngraph.analysis.masks.terms import Split, Splitter, leaves, magnitude
from attngraph.ir import Graph, Value, parse
from attngraph.ir.effects import dim_definers
from attngraph.passes.attention.mask_building import EarlyBuilder, rebuild
from tests.analysis.masks.graphs import box, holds, numbers

B, S = 2, 5
LOW = torch.finfo(torch.float32).min
HEAD = f"""graph @main {{
  input %c : f32[{B}, 1, {S}, {S}]
  input %d : f32[1, 1, {S}, {S}]
  input %m : bool[{B}, 1, 1, {S}]
  %i = aten.arange() {{end = {S}}}
  %q = aten.reshape(%i) {{shape = [1, 1, {S}, 1]}}
  %k = aten.reshape(%i) {{shape = [1, 1, 1, {S}]}}
  %lower = aten.le.Tensor(%k, %q)
  %zero = aten.full() {{size = [], fill_value = 0.0, dtype = f32}}
  %low = aten.full() {{size = [], fill_value = {LOW}, dtype = f32}}
  %inf = aten.full() {{size = [], fill_value = -inf, dtype = f32}}
  %weak = aten.full() {{size = [], fill_value = -1e4, dtype = f32}}
  %causal = aten.where.self(%lower, %zero, %inf)
  %padding = aten.where.self(%m, %zero, %low)
"""
BIASES = {
    "a fill": ("%y = aten.reshape(%padding) {shape = [2, 1, 1, 5]}", 1, True),
    "two fills": ("%y = aten.add.Tensor(%causal, %padding)", 2, True),
    "a fill and a term": ("%y = aten.add.Tensor(%c, %padding)", 1, False),
    "two terms": ("%s = aten.add.Tensor(%c, %causal)\n%y = aten.add.Tensor(%s, %d)", 1, False),
    "a filled term": ("%y = aten.where.self(%m, %c, %low)", 1, False),
    "the other way round": ("%y = aten.where.self(%m, %low, %c)", 1, False),
    "laid out": ("%p = aten.expand(%padding) {size = [2, 3, 5, 5]}\n"
                 "%y = aten.slice.Tensor(%p) {dim = 1, start = 0, end = 1}", 1, True),
    "in two dtypes": ("%h = aten._to_copy(%causal) {dtype = f64}\n"
                      "%y = aten._to_copy(%h) {dtype = f32}", 1, True),
    # What a reader must not take apart.
    "a fill of a fill": ("%y = aten.where.self(%lower, %padding, %inf)", 0, False),
    "a weak fill": ("%y = aten.where.self(%m, %c, %weak)", 0, False),
    "a product": ("%y = aten.mul.Tensor(%c, %padding)", 0, False),
    "a weighted sum": ("%y = aten.add.Tensor(%c, %padding) {alpha = 2}", 0, False),
}  # fmt: skip


def _split(line: str) -> tuple[Graph, Value, Scores, Split]:
    graph = parse(f"{HEAD}  {line}\n  return %y\n}}")
    (y,) = graph.outputs
    scores = Scores(Masking(y, None, False, "nan"), (B, 1, S, S), graph.dims)
    return graph, y, scores, Splitter(scores.reader).split(y, scores.at(y))


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_is_its_fills_and_the_rest(name: str) -> None:
    line, count, is_whole = BIASES[name]
    graph, y, _, found = _split(line)
    assert len(found.fills) == count
    assert (found.rest is None) == is_whole
    if not count:
        assert found.rest is y
    make = EarlyBuilder(graph, dim_definers(graph))
    rest = rebuild(make, next(iter(graph)).loc, found.rest)
    given = {
        "c": torch.randn(B, 1, S, S, generator=torch.Generator().manual_seed(1)),
        "d": torch.randn(1, 1, S, S, generator=torch.Generator().manual_seed(2)),
        "m": torch.rand(B, 1, 1, S, generator=torch.Generator().manual_seed(3)) < 0.5,
    }
    kept = [y] if rest in (None, y) else [y, rest]
    known = numbers(graph, *(value for value in kept if value is not None), **given)
    before = known[y.name].expand(B, 1, S, S)
    left = torch.zeros(()) if rest is None else known[rest.name]
    for places in box(B, 1, S, S):
        at = tuple(places.values())
        hidden = [fill.number for fill in found.fills if not holds(fill.predicate, places, known)]
        total = sum(hidden, float(left.expand(before.shape)[at]))
        assert float(before[at]) == pytest.approx(total, rel=1e-6)


def test_only_the_fills_that_are_taken_leave() -> None:
    line = "%y = aten.add.Tensor(%causal, %padding)"
    _, y, scores, found = _split(line)
    (hard,) = [fill for fill in found.fills if fill.number == -math.inf]
    only = Splitter(scores.reader).split(y, scores.at(y), frozenset([hard.source]))
    assert [fill.source.name for fill in only.fills] == ["causal"]
    assert [value.name for value in leaves(only.rest)] == ["padding"]


@pytest.mark.parametrize(
    ("line", "bound"),
    [
        ("%t = aten.tanh(%c)\n%s = aten.mul.Scalar(%t) {other = 3.0}\n"
         "%y = aten.add.Tensor(%s, %causal)", 3.0),
        ("%y = aten.add.Tensor(%c, %causal)", math.inf),
        ("%y = aten.add.Tensor(%padding, %causal)", 0.0),
    ],
)  # fmt: skip
def test_what_is_left_is_bounded_by_its_parts(line: str, bound: float) -> None:
    assert magnitude(_split(line)[3].rest) == bound


def test_a_fill_is_rounded_as_its_sum_is() -> None:
    line = "%h = aten._to_copy(%padding) {dtype = f16}\n%y = aten._to_copy(%h) {dtype = f32}"
    (fill,) = _split(line)[3].fills
    assert fill.number == -math.inf
