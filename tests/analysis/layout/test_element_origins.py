"""Three readings of layout ops (whole axes, known columns, affine indices) against the ops.

The elements of the input are numbered, so the result of an op says where each of its elements
comes from. A reading may decline; what it says must be so.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import sympy
import torch

from attngraph.analysis.layout.axes import Atom, Axes, Operand, climb, fresh_axes
from attngraph.analysis.layout.columns import Column, known, steps
from attngraph.analysis.layout.element_ids import ElementIds
from attngraph.analysis.layout.index_maps import source_index
from attngraph.analysis.masks.predicates import Domain
from attngraph.ir import Builder, Graph, Node, TensorType, Value
from attngraph.ir.ops import call, op_def
from attngraph.ir.traits import EXPAND, FLIP, PERMUTE, REPEAT, ROLL, SELECT, SLICE, SPLIT

AXES, COLUMNS, INDEX = "axes", "columns", "index"
ALL = {AXES, COLUMNS, INDEX}

# (op, attributes, shape of the input, the readings that follow it to one of its results at least)
SAMPLES: list[tuple[str, dict[str, Any], tuple[int, ...], set[str]]] = [
    ("aten.permute", {"dims": [2, 0, 1]}, (2, 3, 4), ALL),
    ("aten.permute", {"dims": [0, -1, 1]}, (2, 3, 4), ALL),
    ("aten.transpose.int", {"dim0": -1, "dim1": 0}, (2, 3, 4), ALL),
    ("aten.t", {}, (3, 4), ALL),
    ("aten.mT", {}, (2, 3, 4), ALL),
    ("aten.numpy_T", {}, (3, 4), ALL),
    ("aten.swapaxes", {"axis0": 1, "axis1": 2}, (2, 3, 4), ALL),
    ("aten.swapdims", {"dim0": 0, "dim1": 1}, (2, 3, 4), ALL),
    ("aten.movedim.int", {"source": 0, "destination": -1}, (2, 3, 4), ALL),
    ("aten.movedim.intlist", {"source": [0, 1], "destination": [1, 2]}, (2, 3, 4), ALL),
    ("aten.moveaxis.int", {"source": 2, "destination": 0}, (2, 3, 4), ALL),
    ("aten.moveaxis.intlist", {"source": [2], "destination": [1]}, (2, 3, 4), ALL),
    ("aten.expand", {"size": [5, 2, 3]}, (2, 1), ALL),
    ("aten.broadcast_to", {"size": [5, 2, 3]}, (2, 1), ALL),
    ("aten.expand_copy", {"size": [5, 2, 3]}, (2, 1), ALL),
    ("aten.clone", {}, (2, 3), ALL),
    ("aten.reshape", {"shape": [3, 2, 4]}, (2, 3, 4), {INDEX}),
    ("aten.reshape", {"shape": [2, 2, 3, 2]}, (4, 6), ALL),
    ("aten.reshape", {"shape": [24]}, (2, 3, 4), ALL),
    ("aten.view", {"size": [6, 4]}, (2, 3, 4), ALL),
    ("aten.unsqueeze", {"dim": 1}, (2, 3), ALL),
    ("aten.squeeze.dim", {"dim": 1}, (2, 1, 3), ALL),
    ("aten.flatten.using_ints", {"start_dim": 1, "end_dim": 2}, (2, 3, 4), ALL),
    ("aten.unflatten.int", {"dim": 1, "sizes": [2, 3]}, (2, 6), ALL),
    ("aten.select.int", {"dim": 1, "index": 2}, (2, 3, 4), ALL),
    ("aten.select.int", {"dim": -1, "index": -1}, (2, 3, 4), ALL),
    ("aten.unbind.int", {"dim": 1}, (2, 3, 4), ALL),
    ("aten.slice.Tensor", {"dim": 1, "start": 2, "end": 4}, (2, 6), ALL),
    ("aten.slice.Tensor", {"dim": 1, "start": -2, "end": 6}, (2, 6), ALL),
    ("aten.slice.Tensor", {"dim": 1, "start": 1, "end": 6}, (2, 6), {COLUMNS, INDEX}),
    ("aten.slice.Tensor", {"dim": 1, "start": 1, "end": 6, "step": 2}, (2, 6), {COLUMNS, INDEX}),
    ("aten.slice.Tensor", {"dim": 1, "start": -9, "end": 4}, (2, 6), {COLUMNS}),
    ("aten.narrow", {"dim": 1, "start": 2, "length": 2}, (2, 6), ALL),
    ("aten.narrow", {"dim": 1, "start": -5, "length": 3}, (2, 6), {COLUMNS, INDEX}),
    ("aten.split_with_sizes", {"split_sizes": [2, 2, 2], "dim": 1}, (2, 6), ALL),
    ("aten.unsafe_split.Tensor", {"split_size": 3, "dim": 1}, (2, 6), ALL),
    ("aten.unsafe_split_with_sizes", {"split_sizes": [2, 4], "dim": 1}, (2, 6), ALL),
    ("aten.unsafe_chunk", {"chunks": 3, "dim": 1}, (2, 6), ALL),
    ("aten.tensor_split.sections", {"sections": 4, "dim": 1}, (2, 6), ALL),
    ("aten.tensor_split.indices", {"indices": [1, 4], "dim": 1}, (2, 6), ALL),
    ("aten.split_with_sizes", {"split_sizes": [1, 5], "dim": -1}, (2, 6), ALL),
    ("aten.split.Tensor", {"split_size": 4, "dim": 1}, (2, 6), ALL),
    ("aten.chunk", {"chunks": 2, "dim": 0}, (4, 3), ALL),
    ("aten.repeat_interleave.self_int", {"repeats": 3, "dim": 1}, (2, 4), {AXES, COLUMNS}),
    ("aten.repeat", {"repeats": [3, 2, 1]}, (2, 4), {AXES, COLUMNS}),
    ("aten.tile", {"dims": [2]}, (2, 4), {AXES, COLUMNS}),
    ("aten.tile", {"dims": [3, 2, 1]}, (2, 4), {AXES, COLUMNS}),
    ("aten.flip", {"dims": [-1]}, (2, 4), {COLUMNS, INDEX}),
    ("aten.flip", {"dims": [0, 1]}, (2, 4), {INDEX}),
    ("aten.roll", {"shifts": [1], "dims": [1]}, (2, 4), {COLUMNS}),
    ("aten.cumsum", {"dim": 1}, (2, 4), set()),
    ("aten.relu", {}, (2, 4), set()),
]
each_sample = pytest.mark.parametrize(
    ("op", "attrs", "shape", "readings"), SAMPLES, ids=[f"{s[0]}{s[1]}" for s in SAMPLES]
)


def _node(op: str, attrs: dict[str, Any], shape: tuple[int, ...]) -> tuple[Node, list[Any]]:
    """A node over %x, and the numbers of the elements that each of its results has."""
    graph = Graph()
    x = graph.add_input("x", TensorType(torch.int64, shape))
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return Builder(graph).node(op, x, **attrs), list(call(op_def(op), [numbers], attrs))


def _places(shape: Iterable[int]) -> list[tuple[int, ...]]:
    return list(product(*map(range, shape)))


def _number(place: Iterable[int], shape: Iterable[int]) -> int:
    flat = 0
    for index, size in zip(place, shape, strict=True):
        assert 0 <= index < size
        flat = flat * size + index
    return flat


@each_sample
def test_whole_axes(
    op: str, attrs: dict[str, Any], shape: tuple[int, ...], readings: set[str]
) -> None:
    node, results = _node(op, attrs, shape)
    read = [value for value in node.outputs if _climbs(value, results[value.index])]
    assert bool(read) == (AXES in readings)


def _climbs(value: Value, numbers: torch.Tensor) -> bool:
    axes = fresh_axes(value.shape)
    above = climb(Operand(value, axes))
    if above is None:
        return False
    for place in _places(value.shape):
        known_atoms: dict[Atom, int] = {}
        for dim, index in zip(axes, place, strict=True):
            for atom in dim:
                _bind(atom, index, known_atoms)
        source = [_index(dim, known_atoms) for dim in above.axes]
        assert _number(source, above.value.shape) == numbers[place]
    return True


def _bind(atom: Atom, index: int, known_atoms: dict[Atom, int]) -> None:
    known_atoms[atom] = index
    if atom.parts is not None:
        major, minor = atom.parts
        size = minor.size
        assert isinstance(size, int)
        _bind(major, index // size, known_atoms)
        _bind(minor, index % size, known_atoms)


def _index(dim: Iterable[Atom], known_atoms: dict[Atom, int]) -> int:
    """Mixed radix, major to minor."""
    index = 0
    for atom in dim:
        for leaf in atom.leaves():
            assert isinstance(leaf.size, int)
            index = index * leaf.size + (known_atoms[leaf] if leaf.const is None else leaf.const)
    return index


@each_sample
def test_columns(
    op: str, attrs: dict[str, Any], shape: tuple[int, ...], readings: set[str]
) -> None:
    """Every element is a place of its own, so all dims are known at each."""
    node, results = _node(op, attrs, shape)
    read = [value for value in node.outputs if _steps(value, results[value.index])]
    assert bool(read) == (COLUMNS in readings)


def _columns(value: Value) -> tuple[Operand, list[tuple[int, ...]]]:
    places = _places(value.shape)
    axes: Axes = tuple(
        () if size == 1 else (Column(size, [place[dim] for place in places]),)
        for dim, size in enumerate(value.shape)
    )
    return Operand(value, axes), places


def _steps(value: Value, numbers: torch.Tensor) -> bool:
    operand, places = _columns(value)
    parts = steps(operand, len(places))
    if parts is None:
        return False
    assert sorted(at for part in parts for at in part.places) == list(range(len(places)))
    for part in parts:
        columns = [known(dim, len(part.places)) for dim in part.operand.axes]
        for count, at in enumerate(part.places):
            source = [column[count] for column in columns if column is not None]
            assert _number(source, part.operand.value.shape) == numbers[places[at]]
    return True


@each_sample
def test_affine_indices(
    op: str, attrs: dict[str, Any], shape: tuple[int, ...], readings: set[str]
) -> None:
    node, results = _node(op, attrs, shape)
    domain, read = Domain((1, 1, 1, 1), {}), 0
    for value in node.outputs:
        for place in _places(value.shape):
            found = source_index(value, tuple(map(sympy.Integer, place)), domain)
            if found is not None:
                read += 1
                assert _number(map(int, found[1]), found[0].shape) == results[value.index][place]
    assert bool(read) == (INDEX in readings)


@pytest.mark.parametrize(("op", "dim"), [("aten.cat", 1), ("aten.cat", -2), ("aten.stack", -1)])
def test_columns_of_what_is_joined(op: str, dim: int) -> None:
    """Each place goes to the input that its element is of."""
    graph, shapes = Graph(), [(2, 3), (2, 3)]
    values = [graph.add_input("x", TensorType(torch.int64, shape)) for shape in shapes]
    numbers = [torch.arange(6).reshape(2, 3), torch.arange(6, 12).reshape(2, 3)]
    node = Builder(graph).node(op, *values, dim=dim)
    (joined,) = call(op_def(op), numbers, {"dim": dim})
    operand, places = _columns(node.output)
    parts = steps(operand, len(places))
    assert parts is not None
    assert {part.operand.value for part in parts} == set(values)
    for part in parts:
        columns = [known(axis, len(part.places)) or [] for axis in part.operand.axes]
        source = numbers[values.index(part.operand.value)]
        for count, at in enumerate(part.places):
            assert source[tuple(column[count] for column in columns)] == joined[places[at]]


def test_columns_that_a_table_chooses() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(torch.int64, (2, 4)))
    order = graph.add_constant("order", torch.tensor([3, -4, 1]))
    node = Builder(graph).node("aten.index_select", x, order, dim=1)
    operand, places = _columns(node.output)
    parts = steps(operand, len(places))
    assert parts is not None
    assert known(parts[0].operand.axes[1], len(places)) == [3, 0, 1] * 2


def test_equal_elements_have_equal_ids() -> None:
    """cat(x, x) · 2 repeats its columns; cat(x, y) · 2 doesn't."""
    graph = Graph()
    build = Builder(graph)
    x, y = (graph.add_input(name, TensorType(torch.float32, (3, 2))) for name in "xy")
    for second, alike in ((x, True), (y, False)):
        joined = build("aten.mul.Scalar", build("aten.cat", x, second, dim=-1), other=2.0)
        axes = (*fresh_axes((3,)), (Column(4, range(4)),))
        found = ElementIds().of(Operand(joined, axes), 4)
        assert (found[:2] == found[2:]) == alike
        assert len(set(found)) == (2 if alike else 4)
        assert {factor for factor, _ in found} == {2.0}


def test_every_layout_op_has_a_sample() -> None:
    """Of those that cut, permute, broadcast, repeat or turn; reshapes and copies have one rule."""
    given = {sample[0] for sample in SAMPLES}
    moves = PERMUTE | EXPAND | REPEAT | SELECT | SLICE | SPLIT | FLIP | ROLL
    assert set(moves) - given == {"aten.expand_as", "aten.split.sizes"}  # spelled with two inputs
