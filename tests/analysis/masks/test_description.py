"""What a remark says of a mask."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngraph.analysis.masks.description import describe
from attngraph.analysis.masks.masking import Masking, Scores
from attngraph.analysis.masks.predicates import TRUE
from attngraph.ir import Graph, Value, parse

HEAD = """graph @main {
  dim seq = 6 in 1..64
  input %m : bool[2, seq]
  input %any : bool[seq, seq]
  input %ids : i64[2, seq]
  input %n : i64[2]
  input %bias : f32[1, 2, seq, seq]
  %i = aten.arange() {end = seq}
  %q = aten.reshape(%i) {shape = [seq, 1]}
  %k = aten.reshape(%i) {shape = [1, seq]}
  %lower = aten.le.Tensor(%k, %q)
  %padding = aten.reshape(%m) {shape = [2, 1, 1, seq]}
"""
SAID = {
    "aten.logical_and(%lower, %padding)": "causal ∧ padding (bool)",
    "aten.logical_not(%padding)": "padding (bool)",
    "aten.logical_not(%any)": "dense, kept: depends on input any",
    "aten.lt.Tensor(%k, %q)": "causal with offset -1",
    "aten.ge.Tensor(%k, %q)": "keys from q",
    "aten.eq.Tensor(%k, %q)": "the diagonal",
    "aten.le.Scalar(%k) {other = 3}": "keys up to 3",
    "aten.ge.Scalar(%k) {other = 2}": "keys from 2",
    "aten.ge.Scalar(%q) {other = 2}": "queries from 2",
    "aten.lt.Scalar(%q) {other = 2}": "queries up to 1",
    "aten.lt.Tensor(%k, %ends)": "padding (lengths n)",
    "aten.eq.Tensor(%of_q, %of_k)": "segments of ids",
    "aten.le.Tensor(%of_k, %of_q)": "causal by ids",
    "aten.le.Tensor(%k, %of_q)": "causal at positions ids",
    "aten.eq.Tensor(%chunk_q, %chunk_k)": "chunk 4",
    "aten.eq.Scalar(%rest) {other = 0}": "every 3 positions",
    "aten.logical_and(%lower, %near)": "causal ∧ window 3",
    "aten.logical_or(%lower, %first)": "(causal ∨ prefix 2)",
}
MADE = """  %ends = aten.reshape(%n) {shape = [2, 1, 1, 1]}
  %of_q = aten.reshape(%ids) {shape = [2, 1, seq, 1]}
  %of_k = aten.reshape(%ids) {shape = [2, 1, 1, seq]}
  %chunk_q = aten.floor_divide.Scalar(%q) {other = 4}
  %chunk_k = aten.floor_divide.Scalar(%k) {other = 4}
  %apart = aten.sub.Tensor(%q, %k)
  %rest = aten.remainder.Scalar(%apart) {other = 3}
  %near = aten.lt.Scalar(%apart) {other = 3}
  %first = aten.lt.Scalar(%k) {other = 2}
"""


def _scores(line: str, bias: str = "") -> tuple[Graph, Scores]:
    graph = parse(f"{HEAD}{MADE}  %y = {line}\n  return %y\n}}")
    (mask,) = graph.outputs
    given = next((value for value in graph.inputs if value.name == bias), None)
    shape = graph.inputs[4].shape
    masking = Masking(given, mask, False, "zero")
    return graph, Scores(masking, (2, 2, *shape[2:]), graph.dims)


@pytest.mark.parametrize("line", SAID)
def test_a_predicate_has_the_name_that_people_use(line: str) -> None:
    _, scores = _scores(line)
    assert describe(scores.mask, scores, scores.masking, None) == SAID[line]


def test_what_is_left_is_told() -> None:
    _, scores = _scores("aten.logical_and(%lower, %padding)", "bias")
    rest: Value | None = scores.masking.bias
    after = replace(scores.masking, mask=None, causal=True, masked_rows="mean")
    assert describe(scores.lower, scores, after, rest) == (
        "causal; finite fill, rows without keys average all values (bool mask); "
        "dense float bias, kept: depends on input bias"
    )


def test_a_mask_that_goes_and_none_at_all_are_two_things() -> None:
    _, scores = _scores("aten.logical_or(%lower, %lower)")
    assert describe(TRUE, scores, replace(scores.masking, mask=None), None) == "all true, removed"
    none = Scores(replace(scores.masking, mask=None), scores.shape, {})
    assert describe(TRUE, none, none.masking, None) == "no mask"
