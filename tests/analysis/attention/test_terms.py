"""Masks and biases of the scores: what decides them, and what a refill of the weights leaves."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from attngraph.analysis.attention.logits import Bias, Mask
from attngraph.analysis.attention.refusals import Refusal
from attngraph.analysis.attention.terms import (
    binary_of,
    broadcastable,
    decided_by,
    predicate_of,
    refilled,
)
from attngraph.analysis.layout.axes import Operand, fresh_axes
from attngraph.ir import Graph, Value, interpret, parse

HEAD = """graph @main {
  input %m : bool[2, 1, 1, 5]
  input %n : bool[2, 1, 1, 5]
  input %i : i64[2, 1, 1, 5]
  input %f : f32[2, 1, 1, 5]
"""


def _graph(lines: str) -> Graph:
    return parse(f"{HEAD}{lines}\n  return %y\n}}")


def _operand(value: Value) -> Operand:
    return Operand(value, fresh_axes(value.shape))


def _inputs() -> list[torch.Tensor]:
    """Bools in all their pairs, whole numbers of either sign, and 0 among the floats."""
    random = torch.Generator().manual_seed(0)
    m, n = (torch.rand(2, 1, 1, 5, generator=random) > 0.5 for _ in range(2))
    i = torch.tensor([0, 1, -1, 2, 0, 1, 0, -2, 1, 1]).reshape(2, 1, 1, 5)
    return [m, n, i, i * 0.5]


PREDICATES = {
    "itself": ("%y = aten.alias(%m)", "m"),
    "its complement": ("%y = aten.bitwise_not(%m)", "m"),
    "twice": ("%a = aten.logical_not(%m)\n%y = aten.bitwise_not(%a)", "m"),
    "through a layout": ("%a = aten.permute(%m) {dims = [1, 0, 2, 3]}\n"
                         "%b = aten.logical_not(%a)\n%y = aten.reshape(%b) {shape = [2, 5]}", "m"),
    "of whole numbers": ("%y = aten.logical_not(%i)", "i"),
    "of scaled floats": ("%a = aten.mul.Scalar(%f) {other = -3.0}\n%y = aten.logical_not(%a)", "f"),
    # ~0 is -1 and ~1 is -2, of which neither is false
    "each bit of whole numbers": ("%a = aten.bitwise_not(%i)\n%y = aten.logical_not(%a)", "a"),
    "floats times 0": ("%a = aten.mul.Scalar(%f) {other = 0.0}\n%y = aten.logical_not(%a)", "a"),
    "a comparison": ("%y = aten.gt.Tensor(%f, %i)", "y"),
}  # fmt: skip


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("lines", "name"), PREDICATES.values(), ids=PREDICATES)
def test_a_predicate_is_what_stands_above_complements(lines: str, name: str, keep: bool) -> None:
    graph = _graph(lines)
    found, kept = predicate_of(_operand(graph.outputs[0]), keep)
    assert found.value.name == name
    graph.set_outputs([graph.outputs[0], found.value], ["y", "found"])
    y, own = interpret(graph, _inputs())
    assert y.bool().flatten().equal(own.bool().flatten() == (keep == kept))


BINARY = {
    "a cast": ("%y = aten._to_copy(%m) {dtype = f32}", "m"),
    "compared with 0": (
        "%a = aten._to_copy(%m) {dtype = i64}\n%y = aten.eq.Scalar(%a) {other = 0}",
        "m",
    ),
    "one less it": (
        "%a = aten._to_copy(%m) {dtype = f32}\n%b = aten.rsub.Scalar(%a) {other = 1.0}\n"
        "%y = aten._to_copy(%b) {dtype = bool}",
        "y",
    ),
    "above a half": (
        "%a = aten._to_copy(%m) {dtype = f32}\n%y = aten.gt.Scalar(%a) {other = 0.5}",
        "m",
    ),
    "above 1": ("%a = aten._to_copy(%m) {dtype = f32}\n%y = aten.gt.Scalar(%a) {other = 1}", "y"),
    "numbers that may be others": ("%y = aten.eq.Scalar(%i) {other = 0}", "y"),
}


@pytest.mark.parametrize(("lines", "name"), BINARY.values(), ids=BINARY)
def test_zeros_and_ones_are_read_past_casts_and_comparisons(lines: str, name: str) -> None:
    graph = _graph(lines)
    found, kept = binary_of(_operand(graph.outputs[0]), True)
    assert found.value.name == name
    graph.set_outputs([graph.outputs[0], found.value], ["y", "found"])
    y, own = interpret(graph, _inputs())
    assert y.bool().flatten().equal(own.bool().flatten() == kept)


def test_what_decides_a_mask_are_the_bools_above_it() -> None:
    graph = _graph(
        "%a = aten._to_copy(%m) {dtype = f32}\n%b = aten._to_copy(%n) {dtype = f32}\n"
        "%c = aten.mul.Tensor(%a, %b)\n%y = aten.eq.Scalar(%c) {other = 0.0}"
    )
    assert {value.name for value in decided_by(_operand(graph.outputs[0]))} == {"m", "n"}
    graph = _graph("%y = aten.gt.Tensor(%f, %i)")
    assert [value.name for value in decided_by(_operand(graph.outputs[0]))] == ["y"]


REFILL = """graph @main {
  input %w : f32[2, 3, 4, 5]
  input %m : bool[2, 1, 4, 5]
  input %n : bool[2, 1, 4, 5]
  input %i : i64[2, 1, 4, 5]
  %fill = aten.full() {size = [], fill_value = -1e9, dtype = f32}
  %zero = aten.full() {size = [], fill_value = 0.0, dtype = f32}
"""
# (what masks the scores where it is True, what the weights are set to 0 by, whether it leaves them)
REFILLS = {
    "the same": ("%a = aten.alias(%m)", "%b = aten.alias(%m)", True),
    "its double complement": (
        "%a = aten.alias(%m)",
        "%c = aten.logical_not(%m)\n%b = aten.logical_not(%c)",
        True,
    ),
    "its complement": ("%a = aten.alias(%m)", "%b = aten.logical_not(%m)", False),
    "another": ("%a = aten.alias(%m)", "%b = aten.alias(%n)", False),
    "rows without keys": (
        "%a = aten.alias(%m)",
        "%b = aten.all.dim(%m) {dim = -1, keepdim = true}",
        True,
    ),
    "rows without keys, counted otherwise": (
        "%a = aten.alias(%m)",
        "%c = aten.logical_not(%m)\n%d = aten.any.dim(%c) {dim = 3, keepdim = true}\n"
        "%b = aten.logical_not(%d)",
        True,
    ),
    "rows with a hidden key": (
        "%a = aten.alias(%m)",
        "%b = aten.any.dim(%m) {dim = -1, keepdim = true}",
        False,
    ),
    "keys that no query sees": (
        "%a = aten.alias(%m)",
        "%b = aten.all.dim(%m) {dim = -2, keepdim = true}",
        False,
    ),
    "rows without keys of another mask": (
        "%a = aten.alias(%m)",
        "%b = aten.all.dim(%n) {dim = -1, keepdim = true}",
        False,
    ),
    "whole numbers that are 0 all along": (
        "%a = aten.logical_not(%i)",
        "%c = aten.any.dim(%i) {dim = -1, keepdim = true}\n%b = aten.logical_not(%c)",
        True,
    ),
    # of which none is, however the numbers are
    "whole numbers whose every bit is set": (
        "%a = aten.logical_not(%i)",
        "%c = aten.bitwise_not(%i)\n%b = aten.all.dim(%c) {dim = -1, keepdim = true}",
        False,
    ),
}


def _eager(graph: Graph, fill: float) -> torch.Tensor:
    """softmax(w, with `fill` where a), 0 where b; some rows have no key, some all."""
    random = torch.Generator().manual_seed(0)
    w = torch.randn(2, 3, 4, 5, generator=random)
    m, n = (torch.rand(2, 1, 4, 5, generator=random) > 0.5 for _ in range(2))
    m[0, 0, 1], m[1, 0, 2], n[0, 0, 3] = True, False, True
    a, b = interpret(graph, [w, m, n, (~m).long()])
    return w.masked_fill(a.bool(), fill).softmax(-1).nan_to_num().masked_fill(b.bool(), 0)


@pytest.mark.parametrize(("mask", "refill", "leaves"), REFILLS.values(), ids=REFILLS)
def test_refilled_weights_are_those_of_an_infinite_mask(
    mask: str, refill: str, leaves: bool
) -> None:
    graph = parse(f"{REFILL}{mask}\n{refill}\n  return %a, %b\n}}")
    axes = fresh_axes((2, 3, 4, 5))

    def operand(value: Value) -> Operand:
        shape = value.shape
        return Operand(value, tuple(x if n != 1 else () for x, n in zip(axes, shape, strict=True)))

    step = Mask(operand(graph.outputs[0]), False, -1e9)
    found = refilled([step], [Mask(operand(graph.outputs[1]), False, 0.0)], axes[3])
    assert isinstance(found, tuple) == leaves
    infinite = _eager(graph, -1e9).equal(_guarded(graph))
    assert infinite == leaves
    if isinstance(found, tuple):
        (made,) = found
        assert isinstance(made, Mask)
        assert (made.fill, made.was) == (-math.inf, -1e9)


def _guarded(graph: Graph) -> torch.Tensor:
    """The softmax under −∞, with zeros in rows without keys."""
    random = torch.Generator().manual_seed(0)
    w = torch.randn(2, 3, 4, 5, generator=random)
    m, n = (torch.rand(2, 1, 4, 5, generator=random) > 0.5 for _ in range(2))
    m[0, 0, 1], m[1, 0, 2], n[0, 0, 3] = True, False, True
    a, _ = interpret(graph, [w, m, n, (~m).long()])
    return w.masked_fill(a.bool(), -math.inf).softmax(-1).nan_to_num()


def test_a_bias_that_may_hide_keys_too_and_two_masks_are_refused() -> None:
    graph = parse(
        "graph @main {\n  input %m : bool[2, 1, 4, 5]\n  input %bias : f32[2, 1, 4, 5]\n"
        "  parameter %small : f32[4, 5]\n  return %m, %bias\n}"
    )
    m, bias = (_operand(value) for value in graph.outputs)
    keys = m.axes[3]
    mask, added = Mask(m, False, -1e9), Bias(bias, 1.0)
    assert refilled([mask, added], [mask], keys) is Refusal.WEIGHTS_REFILLED_BIASED
    assert refilled([mask, mask], [mask], keys) is Refusal.WEIGHTS_REFILLED
    assert refilled([added], [mask], keys) is Refusal.WEIGHTS_REFILLED


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("%y = aten.permute(%m) {dims = [3, 0, 1, 2]}", "m"),
        ("%a = aten.permute(%m) {dims = [3, 0, 1, 2]}\n%y = aten.alias(%a)", "m"),
        # above a factor is another tensor
        (
            "%a = aten.mul.Scalar(%f) {other = 2.0}\n%y = aten.permute(%a) {dims = [3, 0, 1, 2]}",
            "a",
        ),
        (
            "%a = aten.permute(%f) {dims = [3, 0, 1, 2]}\n%y = aten.mul.Scalar(%a) {other = 2.0}",
            "y",
        ),
    ],
)
def test_a_term_is_taken_where_it_needs_least_copying(lines: str, name: str) -> None:
    graph = _graph(lines)
    batch, _, _, keys = scores = fresh_axes((2, 3, 4, 5))
    found = broadcastable(Operand(graph.outputs[0], (keys, batch, (), ())), scores)
    assert found is not None
    operand, axes = found
    assert operand.value.name == name
    assert axes == (batch, (), (), keys)


def test_a_term_with_an_axis_that_the_scores_lack_fits_nowhere() -> None:
    graph = _graph("%y = aten.alias(%m)")
    own, scores = fresh_axes((2, 1, 1, 5)), fresh_axes((2, 3, 4, 5))
    assert broadcastable(Operand(graph.outputs[0], own), scores) is None
    both = tuple(itertools.chain(own[:1], own[1:3], scores[3:]))
    assert broadcastable(Operand(graph.outputs[0], both), scores) is None
