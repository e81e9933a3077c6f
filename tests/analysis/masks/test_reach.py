"""Which terms of logits can hide keys: held against what random activations make of them."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.masks.reach import Moderates, is_bounded, is_scorelike, may_hide
from attngraph.analysis.masks.row_policy import WEAKEST_FILL
from attngraph.ir import Graph, Value, interpret, parse

HEAD = """graph @main {
  input %x : f32[3, 4, 8]
  input %m : bool[3, 4, 4]
  parameter %w : f32[4, 8]
  parameter %big : f32[4, 8]
  parameter %two : f32[1]
  parameter %half : f32[1]
  %low = aten.full() {size = [], fill_value = -1e9, dtype = f32}
  %zero = aten.full() {size = [], fill_value = 0.0, dtype = f32}
  %s = aten.linear(%x, %w)
"""
# (how a term is made, whether it may hide keys, whether it is as finite as scores are)
TERMS = [
    ("%y = aten.add.Tensor(%s, %s)", False, True),
    ("%y = aten.mul.Scalar(%s) {other = 0.5}", False, True),
    ("%y = aten.mul.Scalar(%s) {other = 100.0}", False, False),
    ("%y = aten.neg(%s)", False, True),
    ("%y = aten.tanh(%s)", False, True),
    ("%t = aten.tanh(%s)\n%y = aten.mul.Tensor(%t, %s)", False, True),
    ("%y = aten.permute(%s) {dims = [0, 2, 1]}", False, True),
    ("%y = aten.cat(%s, %s) {dim = -1}", False, True),
    ("%y = aten.add.Scalar(%s) {other = -5.0}", False, True),
    ("%y = aten.add.Scalar(%s) {other = -inf}", True, False),
    ("%y = aten.constant_pad_nd(%s) {pad = [0, 1], value = -inf}", True, False),
    ("%y = aten.constant_pad_nd(%s) {pad = [0, 1], value = 0.0}", False, True),
    ("%y = aten.where.self(%m, %s, %low)", True, False),
    ("%y = aten.where.self(%m, %zero, %low)", True, True),
    ("%y = aten.mul.Scalar(%s) {other = -1e9}", True, False),
    ("%a = aten.abs(%s)\n%y = aten.log(%a)", True, False),
    ("%y = aten.logsumexp(%s) {dim = [-1], keepdim = true}", True, False),
    ("%y = aten.reciprocal(%s)", True, False),
    ("%y = aten.slice.Tensor(%x) {dim = 2, start = 0, end = 4}", True, False),
]


def _graph(line: str) -> tuple[Graph, Value]:
    weights = {"w": torch.ones(4, 8) / 8, "big": torch.full((4, 8), -1e9)}
    weights |= {"two": torch.tensor([2.0]), "half": torch.tensor([0.5])}
    graph = parse(f"{HEAD}  {line}\n  return %y\n}}", weights)
    return graph, graph.outputs[0]


@pytest.mark.parametrize(("line", "hides", "scorelike"), TERMS)
def test_terms_that_may_hide_keys(line: str, hides: bool, scorelike: bool) -> None:
    graph, y = _graph(line)
    assert may_hide(y) is hides
    assert is_scorelike(y) is scorelike
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0)) * 30
    (found,) = interpret(graph, [x, torch.zeros(3, 4, 4, dtype=torch.bool)])
    if not hides:
        assert float(found.min()) > WEAKEST_FILL


def test_an_input_is_a_bias_where_it_is_added_and_scores_where_it_is_all() -> None:
    _, y = _graph("%y = aten.mul.Scalar(%x) {other = 0.5}")
    assert Moderates().holds(y, is_logits=True)
    assert not Moderates().holds(y, is_logits=False)
    _, y = _graph("%y = aten.add.Tensor(%x, %x)")
    assert not Moderates().holds(y, is_logits=True)


def test_a_constant_is_read() -> None:
    _, y = _graph("%y = aten.add.Tensor(%w, %w)")
    assert not may_hide(y)
    _, y = _graph("%y = aten.add.Tensor(%big, %big)")
    assert may_hide(y)


def test_integers_hide_nothing() -> None:
    _, y = _graph("%y = aten._to_copy(%x) {dtype = i64}")
    assert not may_hide(y)


@pytest.mark.parametrize(
    ("line", "bounded"),
    [
        ("%y = aten.add.Tensor(%s, %s)", True),
        ("%y = aten.relu(%s)", True),
        ("%y = aten.where.self(%m, %s, %zero)", True),
        ("%y = aten.where.self(%m, %s, %huge)", False),
        ("%y = aten.mul.Scalar(%s) {other = 1e13}", False),
        ("%y = aten.div.Scalar(%s) {other = 1e-30}", False),  # no number in it is large
        ("%y = aten.mul.Tensor(%big, %w)", True),
        ("%y = aten.div.Tensor(%s, %two)", True),  # by weights from 1 on
        ("%y = aten.div.Tensor(%s, %half)", False),
        ("%y = aten.div.Tensor(%huge, %two)", False),
        ("%y = aten.div.Tensor(%s, %s)", False),
        ("%y = aten.slice.Tensor(%x) {dim = 2, start = 0, end = 4}", False),
        ("%y = aten.exp(%s)", False),
        ("%y = aten._to_copy(%m) {dtype = f32}", True),
    ],
)
def test_what_is_far_from_the_lowest_float(line: str, bounded: bool) -> None:
    huge = "%huge = aten.full() {size = [], fill_value = -1e30, dtype = f32}\n"
    _, y = _graph(huge + line)
    assert is_bounded(y) is bounded
