"""A rotation is read by what it computes of each feature; what only looks like one is none."""

from __future__ import annotations

import pytest

from attngraph.analysis.rotary.reading import read_rotation
from attngraph.ir import parse

_TABLES = """
%c = aten.cos(%angles)
%s = aten.sin(%angles)
%cc = aten.cat(%c, %c) {dim = 1}
%ss = aten.cat(%s, %s) {dim = 1}
%ssc = aten.cat(%s, %c) {dim = 1}
"""
_HALVES = """
%first = aten.slice.Tensor(%x) {dim = 2, start = 0, end = 4}
%second = aten.slice.Tensor(%x) {dim = 2, start = 4, end = 8}
%minus = aten.neg(%second)
%turned = aten.cat(%minus, %first) {dim = 2}
%one = aten.mul.Tensor(%x, %cc)
%two = aten.mul.Tensor(%turned, %ss)
%y = aten.add.Tensor(%one, %two)
"""
_NEIGHBOURS = """
%pairs = aten.reshape(%x) {shape = [2, 3, 4, 2]}
%first = aten.select.int(%pairs) {dim = 3, index = 0}
%second = aten.select.int(%pairs) {dim = 3, index = 1}
%fc = aten.mul.Tensor(%first, %c)
%ss2 = aten.mul.Tensor(%second, %s)
%left = aten.sub.Tensor(%fc, %ss2)
%fs = aten.mul.Tensor(%first, %s)
%sc = aten.mul.Tensor(%second, %c)
%right = aten.add.Tensor(%fs, %sc)
%both = aten.stack(%left, %right) {dim = 3}
%y = aten.reshape(%both) {shape = [2, 3, 8]}
"""


def _read(lines: str) -> tuple[int, bool] | None:
    graph = parse(
        "graph @main {\ninput %x : f32[2, 3, 8]\ninput %angles : f32[3, 4]\n"
        f"{_TABLES}{lines}\nreturn %y\n}}"
    )
    found = read_rotation(graph.outputs[0])
    if found is None:
        return None
    assert found.source.value in (graph.inputs[0], graph.inputs[0].users[0].outputs[0])
    return found.pairs, found.interleaved


def test_halves_and_neighbours_are_told_apart() -> None:
    assert _read(_HALVES) == (4, False)
    assert _read(_NEIGHBOURS) == (4, True)


@pytest.mark.parametrize(
    ("lines", "old", "new"),
    [
        (_HALVES, "aten.cat(%minus, %first)", "aten.cat(%second, %first)"),  # a reflection
        (_HALVES, "%two = aten.mul.Tensor(%turned, %ss)", "%two = aten.mul.Tensor(%turned, %ssc)"),
        (_HALVES, "%second = aten.slice.Tensor(%x) {dim = 2, start = 4, end = 8}",
         "%second = aten.slice.Tensor(%x) {dim = 2, start = 0, end = 4}"),
        (_NEIGHBOURS, "%sc = aten.mul.Tensor(%second, %c)", "%sc = aten.mul.Tensor(%second, %s)"),
        (_NEIGHBOURS, "aten.sub.Tensor(%fc, %ss2)", "aten.add.Tensor(%fc, %ss2)"),
    ],
)  # fmt: skip
def test_a_near_miss_is_no_rotation(lines: str, old: str, new: str) -> None:
    assert old in lines
    assert _read(lines.replace(old, new)) is None
