"""What logits are read as: their fills, where they hold, and what takes their place."""

from __future__ import annotations

import math

import pytest
import torch

from attngraph.analysis.masks.fills import (
    Carried,
    Chosen,
    Filled,
    Fills,
    Moderate,
    Settled,
    Summed,
    Unknown,
)
from attngraph.analysis.masks.row_policy import Formula
from attngraph.ir import Builder, Graph, Value, interpret, parse

HEAD = """graph @main {
  dim seq = 5 in 1..64
  input %x : f32[2, seq, seq]
  input %b : f32[2, 1, seq]
  input %m : bool[2, 1, seq]
  %i = aten.arange() {end = seq}
  %q = aten.reshape(%i) {shape = [seq, 1]}
  %k = aten.reshape(%i) {shape = [1, seq]}
  %lower = aten.le.Tensor(%k, %q)
  %upper = aten.gt.Tensor(%k, %q)
  %zero = aten.full() {size = [], fill_value = 0.0, dtype = f32}
  %low = aten.full() {size = [], fill_value = -1e9, dtype = f32}
  %inf = aten.full() {size = [], fill_value = -inf, dtype = f32}
  %s = aten.tanh(%x)
"""
LATE = Formula(shift="maximum", total="quotient")


def _fills(line: str, dtype: str = "f32") -> tuple[Graph, Value, Fills]:
    graph = parse(f"{HEAD.replace('f32', dtype)}  {line}\n  return %y\n}}")
    (y,) = graph.outputs
    return graph, y, Fills(y, (2,), graph.dims)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("%y = aten.neg(%s)", Moderate),
        ("%y = aten.where.self(%m, %x, %low)", Filled),
        ("%y = aten.where.self(%m, %low, %x)", Filled),
        ("%n = aten._to_copy(%m) {dtype = f32}\n%a = aten.mul.Tensor(%n, %x)\n"
         "%c = aten.rsub.Scalar(%n) {other = 1}\n%d = aten.mul.Scalar(%c) {other = -1e9}\n"
         "%y = aten.add.Tensor(%a, %d)", Filled),
        ("%p = aten.where.self(%m, %zero, %low)\n%y = aten.add.Tensor(%x, %p)", Summed),
        ("%y = aten.add.Tensor(%s, %b)", Summed),
        ("%p = aten.where.self(%m, %x, %low)\n%y = aten.mul.Scalar(%p) {other = 2.0}", Carried),
        ("%p = aten.where.self(%m, %x, %low)\n%y = aten.permute(%p) {dims = [0, 2, 1]}", Carried),
        ("%y = aten.where.self(%m, %zero, %low)", Chosen),
        ("%y = aten.log(%x)", Unknown),
    ],
)  # fmt: skip
def test_logits_are_read_by_what_hides_keys(line: str, kind: type) -> None:
    _, _, found = _fills(line)
    assert isinstance(found.tree, kind)


def test_a_term_that_a_caller_gives_is_unknown_beside_scores() -> None:
    assert _fills("%y = aten.add.Tensor(%s, %b)")[2].has_unknown
    assert not _fills("%y = aten.add.Tensor(%s, %s)")[2].has_unknown
    assert not _fills("%y = aten.where.self(%m, %x, %low)")[2].has_unknown


def test_opposite_predicates_are_one() -> None:
    line = "%f = aten.where.self(%lower, %x, %low)\n%y = aten.where.self(%upper, %inf, %f)"
    tree = _fills(line)[2].tree
    assert isinstance(tree, Filled)
    assert isinstance(tree.source, Filled)
    assert tree.literal.atom == tree.source.literal.atom == 0
    assert tree.literal.holds == tree.source.literal.holds


def test_a_fill_is_what_the_dtype_holds() -> None:
    tree = _fills("%y = aten.where.self(%m, %x, %low)", "f16")[2].tree
    assert isinstance(tree, Filled)
    assert tree.fill == -math.inf


def _settled(line: str, *, assume: bool = False) -> tuple[Graph, Settled | None]:
    graph, _, found = _fills(line)
    return graph, found.settle(Builder(graph), LATE, None, True, assume=assume)


MASKED = "%y = aten.where.self(%m, %x, %low)"


def test_a_formula_that_parts_in_hidden_rows_stays() -> None:
    """exp(x − max x) over exp(logsumexp x − max x) is 1 for each key of a row of one low fill."""
    assert _settled(MASKED)[1] is None


def test_that_each_row_has_a_key_is_assumed_once_it_is_not_proved() -> None:
    _, found = _settled(MASKED, assume=True)
    assert found is not None
    assert found.assumed
    _, found = _settled("%y = aten.where.self(%lower, %x, %low)")
    assert found is not None
    assert not found.assumed


@pytest.mark.parametrize(
    "line",
    [
        MASKED,
        "%p = aten.where.self(%m, %zero, %low)\n%y = aten.add.Tensor(%x, %p)",
        "%f = aten.where.self(%m, %x, %low)\n%y = aten.mul.Scalar(%f) {other = 0.5}",
        "%f = aten.where.self(%m, %x, %low)\n%y = aten.reshape(%f) {shape = [2, seq, seq]}",
        "%f = aten.where.self(%m, %x, %low)\n%y = aten.where.self(%lower, %f, %inf)",
    ],
)
def test_lowered_logits_have_minus_infinity_for_each_fill(line: str) -> None:
    """0 / 0 in a row that is hidden, which the softmax of the logits as they stand doesn't give."""
    graph, y, fills = _fills(line)
    found = fills.settle(Builder(graph), Formula(), None, True, assume=False)
    assert found is not None
    assert found.logits is not y
    graph.set_outputs([y, found.logits], ["old", "new"])
    for hidden in (0, 2, 5):
        m = torch.arange(5).expand(2, 1, 5) >= hidden
        x = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(hidden))
        given = {"x": x, "b": torch.zeros(2, 1, 5), "m": m}
        old, new = interpret(graph, [given[value.name] for value in graph.inputs])
        assert torch.equal(new, old.masked_fill(old < -1e8, -math.inf))
