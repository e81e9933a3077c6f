"""Where single elements come from: held against what torch puts at each place."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.layout.followed import Followed, flat_places, split_places
from attngraph.ir import Graph, interpret, parse

N = 5
HEAD = "graph @main {\n  dim n = 5 in 1..\n  input %x : f32[n, 4, 6]\n  input %z : f32[n, 2, 6]\n"
PLACES = "%i = aten.arange() {end = n}\n%r = aten.mul.Scalar(%i) {other = 2}\n"
LINES = {
    "pad": "%y = aten.pad(%x) {pad = [1, 2, 0, 0, n, 1], value = -1.0}",
    "pad that cuts": "%y = aten.pad(%x) {pad = [-1, 2], value = 3.0}",
    "cat": "%y = aten.cat(%z, %x, %z) {dim = 1}",
    "stack": "%a = aten.slice.Tensor(%x) {dim = 1, end = 2}\n%y = aten.stack(%z, %a) {dim = -2}",
    "slice_scatter": "%y = aten.slice_scatter(%x, %z) {dim = 1, start = 1, end = 4, step = 2}",
    "slice_scatter from the end": "%y = aten.slice_scatter(%x, %z) {dim = 1, start = -2}",
    "select_scatter": (
        "%a = aten.select.int(%z) {dim = 1, index = 0}\n"
        "%y = aten.select_scatter(%x, %a) {dim = 1, index = -1}"
    ),
    "rows": f"{PLACES}%j = aten.remainder.Scalar(%r) {{other = n}}\n%y = aten.index.Tensor(%x, %j)",
    "rows from the end": (
        "%i = aten.arange.start() {start = -3, end = 0}\n%y = aten.index.Tensor(%x, none, %i)"
    ),
    "pairs of places": (
        "%i = aten.arange() {end = 4}\n%k = aten.reshape(%i) {shape = [4, 1]}\n"
        "%y = aten.index.Tensor(%x, none, %k, %i)"
    ),
    "gather": (
        "%i = aten.arange() {end = 6}\n%f = aten.flip(%i) {dims = [0]}\n"
        "%e = aten.expand(%f) {size = [n, 4, 6]}\n%y = aten.gather(%x, %e) {dim = 2}"
    ),
    "a choice by places": (
        "%i = aten.arange() {end = 6}\n%c = aten.lt.Scalar(%i) {other = 2}\n"
        "%k = aten.full() {size = [], fill_value = -inf, dtype = f32}\n"
        "%y = aten.where.self(%c, %k, %x)"
    ),
    "a sum of two": (
        "%a = aten.slice.Tensor(%x) {dim = 1, start = 2, end = 4}\n%y = aten.sub.Tensor(%z, %a)"
    ),
    "a factor": "%a = aten.mul.Scalar(%x) {other = 0.5}\n%y = aten.pad(%a) {pad = [1, 0]}",
    "diagonals": (
        "%p = aten.pad(%x) {pad = [0, 3]}\n%v = aten.reshape(%p) {shape = [n, 36]}\n"
        "%s = aten.slice.Tensor(%v) {dim = 1, end = -4}\n%y = aten.reshape(%s) {shape = [n, 4, 8]}"
    ),
    "unfold": "%y = aten.unfold(%x) {dimension = 2, size = 3, step = 2}",
    "a number for each place": "%i = aten.arange() {end = n}\n%y = aten._to_copy(%i) {dtype = f32}",
}


def _graph(lines: str) -> Graph:
    body = "".join(f"  {line}\n" for line in lines.splitlines())
    return parse(f"{HEAD}{body}  return %y\n}}")


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
def test_elements_are_those_at_the_places_that_are_said(lines: str) -> None:
    graph = _graph(lines)
    inputs = [1 + torch.arange(N * 24.0).reshape(N, 4, 6), 1000 + torch.randn(N, 2, 6)]
    (expected,) = interpret(graph, inputs)
    data = dict(zip(graph.inputs, inputs, strict=True))
    followed = Followed({"n": N})
    (result,) = graph.outputs
    index = split_places(torch.arange(expected.numel()), expected.shape)
    found = followed.of(result, index)
    value = found.number.clone()
    for term in found.terms:
        assert term.value in data  # followed all the way
        value[term.present] += (term.factor * data[term.value][term.index])[term.present]
    torch.testing.assert_close(value, expected.flatten().double())


def test_what_is_no_move_is_where_it_ends() -> None:
    graph = _graph("%e = aten.exp(%x)\n%y = aten.flip(%e) {dims = [0]}")
    (result,) = graph.outputs
    index = split_places(torch.arange(N * 24), (N, 4, 6))
    (term,) = Followed({"n": N}).of(result, index).terms
    assert term.value.producer is not None
    assert term.value.producer.op == "aten.exp"
    assert torch.equal(term.index[0], N - 1 - index[0])


def test_an_end_is_not_passed() -> None:
    graph = _graph("%e = aten.flip(%x) {dims = [1]}\n%y = aten.flip(%e) {dims = [0]}")
    (result,) = graph.outputs
    assert result.producer is not None
    end = result.producer.inputs[0]
    assert end is not None
    index = split_places(torch.arange(N * 24), (N, 4, 6))
    (term,) = Followed({"n": N}, {end}).of(result, index).terms
    assert term.value is end


def test_a_choice_that_an_input_makes_ends_it() -> None:
    graph = _graph(
        "%c = aten.gt.Scalar(%x) {other = 0}\n%n = aten.neg(%x)\n%y = aten.where.self(%c, %x, %n)"
    )
    (result,) = graph.outputs
    index = split_places(torch.arange(N * 24), (N, 4, 6))
    (term,) = Followed({"n": N}).of(result, index).terms
    assert term.value is result


def test_one_value_twice_in_a_sum_is_refused() -> None:
    graph = _graph("%a = aten.flip(%x) {dims = [0]}\n%y = aten.add.Tensor(%x, %a)")
    (result,) = graph.outputs
    index = split_places(torch.arange(N * 24), (N, 4, 6))
    with pytest.raises(ValueError, match="twice"):
        Followed({"n": N}).of(result, index)


def test_places_are_split_and_joined() -> None:
    flat = torch.arange(60)
    index = split_places(flat, (3, 4, 5))
    assert torch.equal(flat_places(index, (3, 4, 5)), flat)
