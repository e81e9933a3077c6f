"""Reading through layout ops: where an element is said to come from is where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attngraph.analysis.layout.axes import (
    Atom,
    Operand,
    climb,
    fresh_axes,
    regroup,
    resolve,
    size_of,
)
from attngraph.analysis.layout.cost import cost
from attngraph.ir import Builder, Graph, Value, interpret, parse, verify
from attngraph.ir.dims import substitute, symbol
from attngraph.ir.traits import FLIP, LAYOUT
from attngraph.passes.rewriting.materialize import materialize

BATCH, SEQ = symbol("batch"), symbol("seq")
DIMS = "dim batch = 3 in 1..\n dim seq = 5 in 1..\n"
SIZES: tuple[dict[str, int], ...] = ({"batch": 2, "seq": 3}, {"batch": 1, "seq": 5})
Step = tuple[str, dict[str, Any]]


def graph_over(shape: Sequence[Any]) -> Graph:
    """One input %x of int64, so that elements can be told apart by their numbers."""
    dims = ", ".join(str(dim) for dim in shape)
    return parse(f"graph @test {{\n {DIMS} input %x : i64[{dims}]\n return %x\n}}")


def assert_read(graph: Graph, value: Value, *, whole: bool = False) -> None:
    """Writing `value` again from each point on the way up gives the same elements.

    With `whole` the way must lead to the graph's input.
    """
    axes = fresh_axes(value.shape)
    operand, build = Operand(value, axes), Builder(graph)
    copies = []
    while (above := climb(operand)) is not None:
        operand = above
        assert cost(operand, axes) is not None
        copies.append(materialize(build, operand, axes))
    if whole:
        assert operand.value is graph.inputs[0], operand.value
    graph.set_outputs([value, *copies])
    verify(graph)
    for sizes in SIZES if graph.dims else ({},):
        shape = substitute(list(graph.inputs[0].shape), sizes)
        numbers = torch.arange(max(1, int(torch.tensor(shape).prod()))).reshape(shape)
        expected, *found = interpret(graph, [numbers])
        for copy in found:
            assert torch.equal(copy, expected)


# Ops as text, so that a fixture of shapes reads like the IR.
EACH: dict[str, tuple[str, str]] = {
    "reshape": ("batch, seq, 6", "aten.reshape(%x) {shape = [batch, seq, 2, 3]}"),
    "reshape-merges": ("batch, seq, 6", "aten.reshape(%x) {shape = [batch * seq, 6]}"),
    "view": ("4, 6", "aten.view(%x) {size = [2, 12]}"),
    "unsafe-view": ("4, 6", "aten._unsafe_view(%x) {size = [24]}"),
    "unsqueeze": ("batch, 6", "aten.unsqueeze(%x) {dim = 1}"),
    "squeeze": ("4, 1, 6", "aten.squeeze(%x)"),
    "squeeze-dim": ("batch, 1, 6", "aten.squeeze.dim(%x) {dim = 1}"),
    "squeeze-dims": ("1, batch, 1", "aten.squeeze.dims(%x) {dim = [0, 2]}"),
    "flatten": ("batch, 2, 3", "aten.flatten.using_ints(%x) {start_dim = 1}"),
    "unflatten": ("batch, 6", "aten.unflatten.int(%x) {dim = 1, sizes = [3, 2]}"),
    "view-as": ("4, 6", "aten.view_as(%x, %x)"),
    "reshape-as": ("4, 6", "aten.reshape_as(%x, %x)"),
    "permute": ("batch, seq, 6", "aten.permute(%x) {dims = [2, 0, -2]}"),
    "transpose": ("batch, seq, 6", "aten.transpose.int(%x) {dim0 = -1, dim1 = 0}"),
    "t": ("batch, 6", "aten.t(%x)"),
    "mT": ("batch, seq, 6", "aten.mT(%x)"),
    "expand": ("batch, 1, 6", "aten.expand(%x) {size = [2, -1, batch, -1]}"),
    "select": ("batch, 5, 6", "aten.select.int(%x) {dim = 1, index = -2}"),
    "slice": ("batch, 6", "aten.slice.Tensor(%x) {dim = 1, start = 2, end = 4}"),
    "unbind": ("batch, 3", "aten.unbind.int(%x) {dim = -1}"),
    "split": ("batch, 6", "aten.split.Tensor(%x) {split_size = 2, dim = 1}"),
    "split-with-sizes": ("4, 6", "aten.split_with_sizes(%x) {split_sizes = [2, 2, 2], dim = 1}"),
    "chunk": ("batch, 6", "aten.chunk(%x) {chunks = 3, dim = 1}"),
    "repeat-interleave": ("batch, 4", "aten.repeat_interleave.self_int(%x) {repeats = 3, dim = 1}"),
    "repeat": ("2, 3", "aten.repeat(%x) {repeats = [2, 1, 3]}"),
    "clone": ("batch, 6", "aten.clone(%x)"),
    "contiguous": ("batch, 6", "aten.contiguous(%x)"),
    "alias": ("batch, 6", "aten.alias(%x)"),
    "detach": ("batch, 6", "aten.detach(%x)"),
    "lift-fresh-copy": ("batch, 6", "aten.lift_fresh_copy(%x)"),
    "dropout": ("batch, 6", "aten.dropout(%x) {p = 0.5, train = false}"),
    "feature-dropout": ("batch, 6", "aten.feature_dropout(%x) {p = 0.5, train = false}"),
    "alpha-dropout": ("batch, 6", "aten.alpha_dropout(%x) {p = 0.5, train = false}"),
    "both": ("batch, 6", "aten.feature_alpha_dropout(%x) {p = 0.5, train = false}"),
    "positive": ("batch, 6", "aten.positive(%x)"),
    "conjugated": ("batch, 6", "aten.resolve_conj(%x)"),
    "negated": ("batch, 6", "aten.resolve_neg(%x)"),
    "lift-fresh": ("batch, 6", "aten.lift_fresh(%x)"),
    "ravel": ("batch, 6", "aten.ravel(%x)"),
    "view-copy": ("4, 6", "aten.view_copy(%x) {size = [2, 12]}"),
    "reshape-copy": ("4, 6", "aten._reshape_copy(%x) {size = [2, 12]}"),
    "numpy-T": ("batch, seq, 6", "aten.numpy_T(%x)"),
    "swapaxes": ("batch, seq, 6", "aten.swapaxes(%x) {axis0 = -1, axis1 = 0}"),
    "swapdims": ("batch, seq, 6", "aten.swapdims(%x) {dim0 = 1, dim1 = 0}"),
    "movedim": ("batch, seq, 6", "aten.movedim.int(%x) {source = 0, destination = -1}"),
    "movedims": (
        "batch, 2, seq, 6",
        "aten.movedim.intlist(%x) {source = [0, -1], destination = [2, 1]}",
    ),
    "moveaxis": ("batch, seq, 6", "aten.moveaxis.int(%x) {source = -1, destination = 0}"),
    "moveaxes": (
        "batch, 2, seq, 6",
        "aten.moveaxis.intlist(%x) {source = [3, 1], destination = [0, 3]}",
    ),
    "expand-as": ("1, 6", "aten.expand_as(%x, %x)"),
    "expand-copy": ("batch, 1, 6", "aten.expand_copy(%x) {size = [-1, 4, -1]}"),
    "broadcast": ("1, 6", "aten.broadcast_to(%x) {size = [2, 4, 6]}"),
    "tile": ("2, 3", "aten.tile(%x) {dims = [2, 1, 3]}"),
    "tile-last": ("batch, 3", "aten.tile(%x) {dims = [2]}"),
    "narrow": ("batch, 6", "aten.narrow(%x) {dim = 1, start = 2, length = 2}"),
    "split-sizes": ("4, 6", "aten.split.sizes(%x) {split_size = [2, 2, 2], dim = 1}"),
    "unsafe-split": ("batch, 6", "aten.unsafe_split.Tensor(%x) {split_size = 2, dim = 1}"),
    "unsafe-sizes": (
        "batch, 6",
        "aten.unsafe_split_with_sizes(%x) {split_sizes = [2, 2, 2], dim = 1}",
    ),
    "tensor-split-at": ("4, 6", "aten.tensor_split.indices(%x) {indices = [2, 4], dim = 1}"),
    "unsafe-chunk": ("batch, 6", "aten.unsafe_chunk(%x) {chunks = 3, dim = 1}"),
    "tensor-split": ("4, 6", "aten.tensor_split.sections(%x) {sections = 3, dim = 1}"),
}


@pytest.mark.parametrize(("shape", "line"), EACH.values(), ids=EACH)
def test_every_layout_op_is_read(shape: str, line: str) -> None:
    outputs = {"unbind": 3, "split": 3, "chunk": 3}.get(line[5:].partition("(")[0].split(".")[0], 1)
    outputs = 3 if "split" in line or "chunk" in line else outputs
    names = ", ".join(f"%y{index}" for index in range(outputs))
    dims = DIMS if "batch" in shape else ""
    text = f"graph @test {{\n {dims} input %x : i64[{shape}]\n {names} = {line}\n return %y0\n}}"
    for index in range(outputs):
        graph = parse(text)
        assert_read(graph, next(iter(graph)).outputs[index], whole=True)


def test_a_select_from_a_size_known_later_is_read() -> None:
    graph = graph_over([BATCH, SEQ, 6])
    value = Builder(graph)("aten.select.int", graph.inputs[0], dim=1, index=0)
    assert_read(graph, value, whole=True)


def test_the_table_above_names_every_op() -> None:
    listed = {line.partition("(")[0] for _, line in EACH.values()}
    assert listed == {*LAYOUT} - {*FLIP}


@pytest.mark.parametrize(
    "line",
    [
        "aten.slice.Tensor(%x) {dim = 1, start = 1, end = 3}",  # 2 of 6, but off by a half part
        "aten.slice.Tensor(%x) {dim = 1, start = 0, end = 4}",  # 4 of 6: no equal parts
        "aten.slice.Tensor(%x) {dim = 1, start = 0, end = 6, step = 2}",
        "aten.split_with_sizes(%x) {split_sizes = [2, 4], dim = 1}",
        "aten.reshape(%x) {shape = [6, 4]}",  # 4 = 3 · 4/3
        "aten.repeat_interleave.self_int(%x) {repeats = 2}",
        "aten.roll(%x) {shifts = [1]}",
        "aten.neg(%x)",
    ],
)
def test_what_is_no_regrouping_is_not_read(line: str) -> None:
    names = "%y, %z" if "split" in line else "%y"
    graph = parse(f"graph @test {{\n input %x : i64[4, 6]\n {names} = {line}\n return %y\n}}")
    value = next(iter(graph)).outputs[-1]
    assert climb(Operand(value, fresh_axes(value.shape))) is None


def test_index_zero_of_a_longer_dim_is_no_regrouping() -> None:
    graph = parse(
        "graph @test {\n input %x : i64[4, 6]\n %y = aten.reshape(%x) {shape = [24]}\n return %y\n}"
    )
    assert climb(Operand(graph.outputs[0], ((),))) is None


Shapes = Sequence[Any]


@pytest.mark.parametrize(
    ("sizes", "shape", "expected"),
    [
        ([24], [2, 3, 4], [[2], [3], [4]]),
        ([2, 3, 4], [24], [[2, 3, 4]]),
        ([4, 6], [2, 12], [[2], [2, 6]]),
        ([2, 12], [4, 6], [[2, 2], [6]]),
        ([6], [1, 6, 1], [[], [6], []]),
        ([BATCH * SEQ, 6], [BATCH, SEQ, 2, 3], [[BATCH], [SEQ], [2], [3]]),
        ([BATCH, SEQ, 6], [BATCH * SEQ * 6], [[BATCH, SEQ, 6]]),
        ([BATCH, 6], [BATCH * 2, 3], [[BATCH, 2], [3]]),
        ([4 * SEQ], [4, SEQ], [[4], [SEQ]]),
        ([4 * SEQ], [SEQ, 4], [[SEQ], [4]]),
    ],
)
def test_regroup(sizes: Shapes, shape: Shapes, expected: list[list[Any]]) -> None:
    atoms = [Atom(size) for size in sizes]
    grouped = regroup(atoms, shape)
    assert grouped is not None
    assert [[leaf.size for leaf in resolve(dim)] for dim in grouped] == expected
    assert [leaf for dim in grouped for leaf in resolve(dim)] == list(resolve(atoms))
    assert size_of(resolve(atoms)) == size_of(atoms)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ([4, 6], [6, 4]),
        ([24], [5, 5]),
        ([24], [24, 2]),
        ([24], [12]),
        ([SEQ], [2, SEQ / 2]),
        ([BATCH, SEQ], [SEQ, BATCH]),
    ],
)
def test_regroup_refuses_what_does_not_divide(sizes: Shapes, shape: Shapes) -> None:
    assert regroup([Atom(size) for size in sizes], shape) is None


def test_a_split_is_seen_everywhere() -> None:
    atom, other = Atom(12), Atom(5)
    operand = Operand(graph_over([12, 5]).inputs[0], ((atom,), (other,)))
    assert atom.split(4)
    major, minor = atom.leaves()
    assert (major.size, minor.size) == (3, 4)
    assert minor.split(2)
    assert [a.size for a in operand.atoms] == [3, 2, 2, 5]
    assert not other.split(2)


def test_a_constant_index_splits_into_its_digits() -> None:
    atom = Atom(12, const=7)
    assert atom.split(4)
    assert [(leaf.size, leaf.const) for leaf in atom.leaves()] == [(3, 1), (4, 3)]
    assert not Atom(SEQ * 2, const=1).split(SEQ)


def test_a_tensor_can_not_be_written_without_one_of_its_axes() -> None:
    graph = graph_over([4, 6])
    axes = fresh_axes([4, 6])
    operand = Operand(graph.inputs[0], axes)
    assert cost(operand, (axes[0],)) is None
    with pytest.raises(ValueError, match="axes that the target lacks"):
        materialize(Builder(graph), operand, (axes[0],))


def test_missing_axes_are_expanded_or_left_at_size_one() -> None:
    graph = graph_over([4, 6])
    (rows,), (columns,) = fresh_axes([4, 6])
    extra = Atom(3)
    operand = Operand(graph.inputs[0], ((rows,), (columns,)))
    build = Builder(graph)
    wide = materialize(build, operand, ((columns,), (extra,), (rows,)))
    thin = materialize(build, operand, ((columns,), (extra,), (rows,)), broadcast=False)
    graph.set_outputs([wide, thin])
    x = torch.arange(24).reshape(4, 6)
    found, narrow = interpret(graph, [x])
    assert torch.equal(found, x.t()[:, None].expand(6, 3, 4))
    assert torch.equal(narrow, x.t()[:, None])


def test_what_is_there_already_costs_nothing() -> None:
    graph = graph_over([4, 6])
    axes = fresh_axes([4, 6])
    operand = Operand(graph.inputs[0], axes)
    assert cost(operand, axes) == 0
    assert materialize(Builder(graph), operand, axes) is graph.inputs[0]
    assert len(graph) == 0


Draw = Callable[[st.SearchStrategy[Any]], Any]
FACTORS = {1: [], 2: [2], 3: [3], 4: [2, 2], 6: [2, 3], 12: [2, 2, 3]}


def _regrouped(draw: Draw, shape: list[Any]) -> list[Any]:
    """Neighbours merged, or one dim split, or a size of 1 put in."""
    kind = draw(st.sampled_from(["merge", "split", "unsqueeze"]))
    position = draw(st.integers(0, len(shape) - 1))
    if kind == "merge" and position:
        return [
            *shape[: position - 1],
            shape[position - 1] * shape[position],
            *shape[position + 1 :],
        ]
    if kind == "split" and (factors := FACTORS.get(shape[position], [])):
        minor = draw(st.sampled_from(factors))
        return [*shape[:position], shape[position] // minor, minor, *shape[position + 1 :]]
    return [*shape[:position], 1, *shape[position:]]


def _step(draw: Draw, shape: list[Any]) -> Step:
    """A layout op that fits the shape; elements stay few."""
    position = draw(st.integers(0, len(shape) - 1))
    size = shape[position]
    steps: list[Step] = [
        ("aten.permute", {"dims": draw(st.permutations(range(len(shape))))}),
        ("aten.transpose.int", {"dim0": position, "dim1": -1}),
        ("aten.reshape", {"shape": _regrouped(draw, shape)}),
        ("aten.clone", {}),
    ]
    if isinstance(size, int):
        if size > 1:
            steps.append(("aten.unbind.int", {"dim": position}))
            index = draw(st.integers(-size, size - 1))
            steps.append(("aten.select.int", {"dim": position, "index": index}))
        if size in (4, 6, 12):
            start = draw(st.integers(0, size // 2))
            end = start + size // 2
            steps.append(("aten.slice.Tensor", {"dim": position, "start": start, "end": end}))
            steps.append(("aten.chunk", {"chunks": 2, "dim": position}))
        if size == 1:
            wide = draw(st.sampled_from([2, 3, *(dim for dim in shape if dim != 1)]))
            steps.append(
                ("aten.expand", {"size": [*shape[:position], wide, *shape[position + 1 :]]})
            )
            steps.append(("aten.squeeze.dim", {"dim": position}))
    if all(isinstance(dim, int) and dim < 7 for dim in shape) and len(shape) < 5:
        repeats = {"repeats": 2, "dim": position}
        steps.append(("aten.repeat_interleave.self_int", repeats))
        steps.append(("aten.repeat", {"repeats": [2, *[1] * (len(shape) - 1)]}))
    step: Step = draw(st.sampled_from(steps))
    return step


def _chain(draw: Draw, start: list[Any], length: int) -> tuple[Graph, Value]:
    graph = graph_over(start)
    build, value = Builder(graph), graph.inputs[0]
    for _ in range(length):
        shape = list(value.shape)
        if not shape:
            break
        op, attrs = _step(draw, shape)
        outputs = build.node(op, value, **attrs).outputs
        value = outputs[draw(st.integers(0, len(outputs) - 1))]
    return graph, value


@settings(max_examples=150)
@given(st.data())
def test_any_chain_of_layouts_is_read_exactly(data: st.DataObject) -> None:
    start = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    graph, value = _chain(data.draw, start, data.draw(st.integers(1, 6)))
    assert_read(graph, value)


@settings(max_examples=25)
@given(st.data())
def test_any_chain_of_layouts_is_read_exactly_at_sizes_known_later(data: st.DataObject) -> None:
    start = data.draw(st.permutations([BATCH, SEQ, 6]))
    graph, value = _chain(data.draw, start, data.draw(st.integers(1, 5)))
    assert_read(graph, value)


def test_a_part_without_elements_is_no_index() -> None:
    graph = parse(
        "graph @test {\n input %x : i64[2, 4]\n"
        " %r = aten.slice.Tensor(%x) {dim = 1, start = 4} : i64[2, 0]\n return %r\n}"
    )
    (value,) = graph.outputs
    assert climb(Operand(value, fresh_axes(value.shape))) is None
