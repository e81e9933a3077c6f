"""S' = a ∘ S + u is read off a step: a and u make the next state of it, or it isn't read."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.values.intervals import Intervals
from attngraph.ir import Builder, Graph, interpret, parse
from attngraph.passes.loops.decayed_sums import DecayedSum, read_decayed_sum

_HEAD = """graph @step {
  input %s : f32[3, 2, 4]
  input %k : f32[3, 2, 4]
  input %g : f32[3, 2, 1]
  input %all : f32[]
  input %gs : f32[3, 2, 4]
  input %there : bool[3, 1, 1]
  %a = aten.exp(%g)
  %b = aten.sigmoid(%g)
  %t = aten.tanh(%g)
  %zero = aten.full() {size = [], fill_value = 0.0, dtype = f32}
  %ka = aten.mul.Tensor(%k, %b)
"""
# (lines, heads, whether its decay is a logarithm)
READ: dict[str, tuple[str, int, bool]] = {
    "a decay": ("%sa = aten.mul.Tensor(%s, %a)\n%n = aten.add.Tensor(%sa, %ka)", 2, True),
    "a number of each feature": (
        "%as = aten.sigmoid(%gs)\n%sa = aten.mul.Tensor(%s, %as)\n"
        "%n = aten.add.Tensor(%sa, %k)", 8, False),
    "a number of at least 0": (
        "%sa = aten.mul.Tensor(%b, %s)\n%n = aten.add.Tensor(%ka, %sa)", 2, False),
    "no decay": ("%n = aten.add.Tensor(%s, %k)", 1, False),
    "one number": ("%sa = aten.mul.Scalar(%s) {other = 0.5}\n%n = aten.add.Tensor(%sa, %k)",
                   1, False),
    "one for all": (
        "%al = aten.sigmoid(%all)\n%sa = aten.mul.Tensor(%s, %al)\n"
        "%n = aten.sub.Tensor(%sa, %k)", 1, False),
    "towards what comes": (
        "%d = aten.sub.Tensor(%k, %s)\n%db = aten.mul.Tensor(%d, %b)\n"
        "%n = aten.add.Tensor(%s, %db)", 2, False),
    "taken from what comes": (
        "%sa = aten.neg(%s)\n%n = aten.sub.Tensor(%k, %sa)", 1, False),
    "a sum that decays": ("%sk = aten.add.Tensor(%s, %k)\n%n = aten.mul.Tensor(%sk, %a)", 2, True),
    "where a token is": (
        "%sa = aten.mul.Tensor(%s, %b)\n%new = aten.add.Tensor(%sa, %k)\n"
        "%n = aten.where.self(%there, %new, %s)", 2, False),
    "an end where no token is": (
        "%sk = aten.add.Tensor(%s, %k)\n%n = aten.where.self(%there, %sk, %zero)", 1, False),
}  # fmt: skip
KEPT: dict[str, str] = {
    "a decay that may be below 0": ("%sa = aten.mul.Tensor(%s, %t)\n%n = aten.add.Tensor(%sa, %k)"),
    "a square": "%ss = aten.mul.Tensor(%s, %s)\n%n = aten.add.Tensor(%ss, %k)",
    "a quotient": "%ss = aten.div.Tensor(%k, %s)\n%n = aten.add.Tensor(%ss, %k)",
    "a function": "%sk = aten.add.Tensor(%s, %k)\n%n = aten.tanh(%sk)",
    "another feature": "%f = aten.flip(%s) {dims = [2]}\n%n = aten.add.Tensor(%f, %k)",
    "another head": "%f = aten.roll(%s) {shifts = [1], dims = [1]}\n%n = aten.add.Tensor(%f, %k)",
    "a choice by the state": (
        "%on = aten.gt.Scalar(%s) {other = 0.0}\n%sk = aten.add.Tensor(%s, %k)\n"
        "%n = aten.where.self(%on, %sk, %s)"
    ),
    "a multiple of what is added": ("%n = aten.add.Tensor(%k, %s) {alpha = 2}"),
    "nothing added": "%n = aten.mul.Tensor(%s, %a)",
    "nothing kept": "%n = aten.alias(%k)",
}


def _read(lines: str, head: str = _HEAD) -> tuple[Graph, DecayedSum | None]:
    graph = parse(f"{head}{lines}\n  return %n\n}}")
    inner = Builder(graph, None)
    (after,) = graph.outputs
    found = read_decayed_sum(inner, graph.inputs[0], after, lambda value: Intervals().of(value)[0])
    return graph, found


@pytest.mark.parametrize(("lines", "heads", "is_log"), READ.values(), ids=READ)
def test_it_makes_the_next_state(lines: str, heads: int, is_log: bool) -> None:
    graph, found = _read(lines)
    assert found is not None
    assert (found.heads, found.is_log) == (heads, is_log)
    (after,) = graph.outputs
    parts = [found.added, *([] if found.decay is None else [found.decay])]
    graph.set_outputs([after, *parts], ["after", "added", "decay"][: 1 + len(parts)])
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(tuple(value.shape), generator=random) for value in graph.inputs[:-1]]
    there = torch.tensor([True, False, True]).view(3, 1, 1)
    wanted, added, *decays = interpret(graph, [*inputs, there])
    decay = torch.ones(()) if found.decay is None else decays[0]
    assert decay.numel() in (1, 3 * heads)
    decay = decay.exp() if is_log else decay
    assert bool((decay >= 0).all())
    torch.testing.assert_close(decay * inputs[0] + added, wanted)


@pytest.mark.parametrize("lines", KEPT.values(), ids=KEPT)
def test_what_is_no_such_sum(lines: str) -> None:
    _, found = _read(lines)
    assert found is None


@pytest.mark.parametrize(("heads", "is_read"), [(16, True), (17, False)])
def test_so_many_heads_that_the_operator_would_be_slower(heads: int, is_read: bool) -> None:
    _, found = _read(READ["a decay"][0], _HEAD.replace("[3, 2,", f"[3, {heads},"))
    assert (found is not None) == is_read
