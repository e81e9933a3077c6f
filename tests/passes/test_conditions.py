"""Trials see both sides of what a region's result depends on, or nothing stands on them."""

from __future__ import annotations

from typing import Any

import pytest

from attngraph.ir import Builder, Graph, Value
from attngraph.ir.slices import backward_slice
from attngraph.passes.rewriting.conditions import Conditions, aims_of
from attngraph.passes.rewriting.evidence import Evidence
from attngraph.passes.rewriting.outcomes import Different, Equal, NotEvaluated, Outcome
from attngraph.passes.rewriting.regions import Region
from attngraph.passes.rewriting.trials import LOGITS
from tests.passes.test_checked import graph_of

SOURCES = {
    "pad id": """
  input %ids : i64[batch, seq]
  %keep = aten.ne.Scalar(%ids) {other = 5}""",
    "pad id far off": """
  input %ids : i64[batch, seq]
  %keep = aten.ne.Scalar(%ids) {other = 151643}""",
    "negative id": """
  input %ids : i64[batch, seq]
  %keep = aten.gt.Scalar(%ids) {other = -100}""",
    "pad id in a tensor": """
  input %ids : i64[batch, seq]
  constant %pad = 7 : i64[]
  %keep = aten.ne.Tensor(%ids, %pad)""",
    "counted pads": """
  input %ids : i64[batch, seq]
  %real = aten.ne.Scalar(%ids) {other = 5}
  %n = aten.cumsum(%real) {dim = 1}
  %keep = aten.gt.Scalar(%n) {other = 0}""",
    "lengths of pads": """
  input %ids : i64[batch, seq]
  %real = aten.ne.Scalar(%ids) {other = 5}
  %n = aten.sum.dim_IntList(%real) {dim = [1], keepdim = true}
  %i = aten.arange() {end = seq}
  %keep = aten.lt.Tensor(%i, %n)""",
    "segments with a pad id": """
  input %ids : i64[batch, seq]
  %i = aten.remainder.Scalar(%ids) {other = 1000}
  %keep = aten.ne.Scalar(%i) {other = 99}""",
    "clamped": """
  input %ids : i64[batch, seq]
  %c = aten.clamp(%ids) {min = 40, max = 80}
  %keep = aten.lt.Scalar(%c) {other = 60}""",
    "a feature sum": """
  input %f : f32[batch, seq, 4]
  %a = aten.abs(%f)
  %s = aten.sum.dim_IntList(%a) {dim = [-1]}
  %keep = aten.ne.Scalar(%s) {other = 0}""",
    "a threshold": """
  input %f : f32[batch, seq]
  %keep = aten.lt.Scalar(%f) {other = 250.0}""",
    "bools": """
  input %keep : bool[batch, seq]""",
    "a cast": """
  input %ids : i64[batch, seq]
  %keep = aten._to_copy(%ids) {dtype = bool}""",
    "a window past every trial": """
  input %x0 : f32[batch, seq]
  %i = aten.arange() {end = seq}
  %r = aten.reshape(%i) {shape = [1, seq]}
  %k = aten.lt.Scalar(%r) {other = 48}
  %keep = aten.expand(%k) {size = [batch, seq]}""",
}
REST = """
  input %s : f32[batch, seq, seq]
  %m = aten.reshape(%keep) {shape = [batch, 1, seq]}
  %hide = aten.logical_not(%m)
  %fill = aten.full() {size = [], fill_value = FILL, dtype = f32}
  %x = aten.where.self(%hide, %fill, %s)"""


def _region(source: str, fill: str) -> tuple[Graph, Value, Value]:
    """A graph, its scores and its masked scores."""
    graph = graph_of(SOURCES[source] + REST.replace("FILL", fill) + "\n  return %x")
    (masked,) = graph.outputs
    assert masked.producer is not None
    scores = masked.producer.inputs[0]
    assert scores is not None
    return graph, scores, masked


@pytest.mark.parametrize("source", SOURCES)
def test_a_mask_that_is_dropped_is_seen(source: str) -> None:
    graph, scores, masked = _region(source, "-inf")
    new = Builder(graph)("aten.mul.Scalar", scores, other=1.0)
    assert not isinstance(_compared(graph, masked, new), Equal)


def _compared(graph: Graph, old: Value, new: Value) -> Outcome:
    return Evidence(graph).compare([(old, new)], [], kinds=LOGITS)


FILLS = ["-inf", "-3.4028234663852886e+38"]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("source", SOURCES)
def test_what_a_hidden_row_gives_is_seen(source: str, fill: str) -> None:
    """exp(x) / Σ exp(x) and softmax(x) differ in rows without a key, and nowhere else."""
    graph, _, masked = _region(source, fill)
    build = Builder(graph)
    e = build("aten.exp", masked)
    old = build("aten.div.Tensor", e, build("aten.sum.dim_IntList", e, dim=[-1], keepdim=True))
    softmax = build("aten.softmax.int", masked, dim=-1)
    hidden = _compared(graph, old, softmax)
    if fill == "-inf" or source == "a window past every trial":  # NaN either way; never a whole row
        assert not isinstance(hidden, Different)
    else:
        assert not isinstance(hidden, Equal)
    same = build("aten.softmax.int", build("aten.mul.Scalar", masked, other=1.0), dim=-1)
    assert isinstance(_compared(graph, softmax, same), Equal)


def test_a_condition_that_no_input_decides_is_drawn_itself() -> None:
    """x² < 0 never holds: the mask may be copied, but not be left out."""
    graph = graph_of("""
  input %x : f32[batch, seq]
  %q = aten.mul.Tensor(%x, %x)
  %never = aten.lt.Scalar(%q) {other = 0}
  %y = aten.masked_fill.Scalar(%x, %never) {value = 0.0}
  return %y""")
    (old,) = graph.outputs
    assert old.producer is not None
    x, never = old.producer.inputs
    assert x is not None
    build = Builder(graph)
    zero = build("aten.zeros_like", x)
    assert isinstance(_compared(graph, old, build("aten.where.self", never, zero, x)), Equal)
    outcome = _compared(graph, old, build("aten.mul.Scalar", x, other=1.0))
    assert isinstance(outcome, NotEvaluated)
    assert "%never" in outcome.reason or "%lt" in outcome.reason


@pytest.mark.parametrize(
    "guard", ["aten.isnan(%p)", "aten.ne.Tensor(%p, %p)", "aten.eq.Scalar(%x) {other = -inf}"]
)
def test_a_guard_that_arithmetic_never_meets_counts_for_nothing(guard: str) -> None:
    graph = graph_of(f"""
  input %x : f32[batch, seq]
  %p = aten.softmax.int(%x) {{dim = -1}}
  %g = {guard}
  %y = aten.masked_fill.Scalar(%p, %g) {{value = 0.0}}
  return %y""")
    (old,) = graph.outputs
    assert old.producer is not None
    p = old.producer.inputs[0]
    assert p is not None
    assert isinstance(_compared(graph, old, Builder(graph)("aten.mul.Scalar", p, other=1.0)), Equal)


def _aims(source: str) -> tuple[float, ...]:
    _, _, masked = _region(source, "-inf")
    sampled, nodes = backward_slice([masked], lambda value: False)
    region = Region(sampled, nodes)
    return aims_of(region, Conditions(region).constant).numbers


def test_the_numbers_that_decide_are_read_from_the_graph() -> None:
    found: dict[str, Any] = {name: _aims(name) for name in SOURCES}
    assert found["pad id far off"] == (151643,)
    assert found["pad id in a tensor"] == (7,)
    assert set(found["clamped"]) == {40, 80, 60}
    assert found["bools"] == ()
