"""How much copying a layout takes: nothing where it is there, and most where axes move."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.layout.axes import Axes, Operand, climb, fresh_axes, top
from attngraph.analysis.layout.cost import cost, layout_cost
from attngraph.ir import Builder, parse
from attngraph.ir.dims import same_shape
from attngraph.passes.rewriting.materialize import materialize

HEAD = """graph @main {
  dim seq = 5 in 1..
  input %x : f32[2, seq, 12]
  %r = aten.reshape(%x) {shape = [2, seq, 3, 4]}
  %p = aten.permute(%r) {dims = [0, 2, 1, 3]}
"""
LAYOUTS = {
    "%y = aten.slice.Tensor(%x) {dim = 1, start = 0, end = seq}": 0,
    "%y = aten.reshape(%p) {shape = [2, 3, seq, 4]}": 11,
    "%y = aten.permute(%x) {dims = [0, 2, 1]}": 11,
    "%y = aten.reshape(%x) {shape = [2, seq, 12, 1]}": 1,
    "%s = aten.select.int(%x) {dim = 0, index = 1}\n"
    "%y = aten.expand(%s) {size = [seq, 12]}": 4,
    "%u = aten.reshape(%x) {shape = [2, 1, seq, 12]}\n"
    "%y = aten.expand(%u) {size = [2, 7, seq, 12]}": 7,
    "%s = aten.select.int(%p) {dim = 1, index = 2}\n"
    "%y = aten.reshape(%s) {shape = [2, seq, 4]}": 3,
}  # fmt: skip


@pytest.mark.parametrize("line", LAYOUTS)
def test_a_layout_costs_what_is_copied(line: str) -> None:
    graph = parse(f"{HEAD}  {line}\n  return %y\n}}")
    (y,) = graph.outputs
    axes = fresh_axes(y.shape)
    assert cost(top(Operand(y, axes)), axes) == LAYOUTS[line]
    assert cost(Operand(y, axes), axes) == 0


@pytest.mark.parametrize("line", LAYOUTS)
def test_what_costs_nothing_is_the_operand_itself(line: str) -> None:
    graph = parse(f"{HEAD}  {line}\n  return %y\n}}")
    (y,) = graph.outputs
    axes = fresh_axes(y.shape)
    build, operand = Builder(graph), top(Operand(y, axes))
    build.at(None)
    made = materialize(build, operand, axes)
    assert (made is operand.value) == (cost(operand, axes) == 0)
    assert same_shape(made.shape, y.shape)


def test_what_lacks_an_axis_can_be_broadcast_and_what_has_one_more_cannot() -> None:
    graph = parse(f"{HEAD}  return %x\n}}")
    x = graph.inputs[0]
    axes = fresh_axes(x.shape)
    assert cost(Operand(x, axes), axes[1:]) is None
    assert cost(Operand(x, axes), (*fresh_axes([3]), *axes)) is not None
    twice: Axes = (*axes, axes[0])
    assert cost(Operand(x, axes), twice) is None


@pytest.mark.parametrize(
    ("line", "dearer"),
    [
        ("aten.permute(%r) {dims = [1, 0, 2, 3]}", "aten.expand(%x) {size = [2, seq, 12]}"),
        ("aten.expand(%x) {size = [2, seq, 12]}", "aten.select.int(%x) {dim = 1, index = 0}"),
        ("aten.select.int(%x) {dim = 1, index = 0}",
         "aten.slice.Tensor(%x) {dim = 1, start = 0, end = 2}"),
        ("aten.slice.Tensor(%x) {dim = 1, start = 0, end = 2}",
         "aten.reshape(%x) {shape = [2, seq, 3, 4]}"),
    ],
)  # fmt: skip
def test_copies_cost_more_than_views(line: str, dearer: str) -> None:
    first, second = (
        parse(f"{HEAD}  %y = {one}\n  return %y\n}}").outputs[0].producer for one in (line, dearer)
    )
    assert first is not None
    assert second is not None
    assert layout_cost(first) > layout_cost(second) > 0


def test_climbing_changes_no_element() -> None:
    """A chain of layouts is another view of one tensor: its stages have one set of atoms."""
    graph = parse(f"{HEAD}  return %p\n}}")
    operand: Operand | None = Operand(graph.outputs[0], fresh_axes(graph.outputs[0].shape))
    assert operand is not None
    atoms = set(operand.atoms)
    assert operand.value.dtype == torch.float32
    while (operand := climb(operand)) is not None:
        assert set(operand.atoms) == atoms
