"""A rule for shapes gives those of the op at every size of the unknowns, or keeps the sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngraph.analysis.layout.any_size import Sizes
from attngraph.analysis.layout.generalize import generalized
from attngraph.analysis.layout.shape_reader import FEWEST, Reader, Rules, elementwise, with_size
from attngraph.ir import Graph, TensorType, Value, parse
from attngraph.ir.dims import substitute
from attngraph.ir.ops import call, op_def

S, T, F = 30, 42, 64  # large sizes: each becomes an unknown


def _value(*shape: int) -> Value:
    return Value("x", TensorType(torch.float32, shape))


def _shapes(lines: str, inputs: str) -> tuple[Graph, Any]:
    given = "".join(f"  input %{name}\n" for name in inputs.split("; "))
    graph = parse(f"graph @main {{\n{given}{lines}\n  return %y\n}}")
    return graph, generalized(graph.inputs, list(graph), [], [], [])


# What the samples of test_generalize.py don't ask: (lines, inputs, whether a size stays unknown)
CASES: dict[str, tuple[str, str, bool]] = {
    "both ends cut off": (
        "%y = aten.slice.Tensor(%x) {dim = 1, start = 2, end = 28}", "x : f32[2, 30]", True),
    "one place cut off each end": (
        "%y = aten.slice.Tensor(%x) {dim = 1, start = 1, end = 29}", "x : f32[2, 30]", True),
    "cut from the end": (
        "%y = aten.slice.Tensor(%x) {dim = 1, start = -29}", "x : f32[2, 30]", True),
    "the tail of a table": (
        "%y = aten.slice.Tensor(%x) {dim = 1, start = 20}", "x : f32[2, 30]", False),
    "every second place": (
        "%y = aten.slice.Tensor(%x) {dim = 1, start = 0, step = 2}", "x : f32[2, 30]", False),
    "a place in the middle": ("%y = aten.select.int(%x) {dim = 0, index = 15}", "x : f32[30]",
                              False),
    "a place in the middle, of rows": (
        "%y = aten.select.int(%x) {dim = 0, index = 15}", "x : f32[30, 42]", True),
    "a row written over": (
        "%y = aten.select_scatter(%x, %z) {dim = 0, index = 15}", "x : f32[30, 42]; z : f32[42]",
        True),
    "places written over": (
        "%y = aten.slice_scatter(%x, %z) {dim = -1, start = 20, end = 40}",
        "x : f32[30, 42]; z : f32[30, 20]", True),
    "a padded axis": ("%y = aten.pad(%x) {pad = [1, 2]}", "x : f32[30]", False),
    "an axis beside a padded one": ("%y = aten.pad(%x) {pad = [1, 2, 0, 0]}", "x : f32[30, 42]",
                                    True),
    "a recurrence in heads": (
        "%o, %s = attn.linear_attention(%x, %x, %v, none, %d, %b) "
        "{heads = 2, kv_heads = 2, scale = 0.5}\n%y = aten.reshape(%o) {shape = [3, 30, 2, 20]}",
        "x : f32[3, 30, 64]; v : f32[3, 30, 40]; d : f32[3, 30, 64]; b : f32[3, 30, 2]", True),
    "a recurrence with a state": (
        "%y, %s = attn.linear_attention(%q, %k, %v, %p, %d) {heads = 4, kv_heads = 2, scale = 1.0}",
        "q : f32[3, 30, 80]; k : f32[3, 30, 40]; v : f32[3, 30, 40]; p : f32[3, 2, 20, 20]; "
        "d : f32[3, 30, 2]", True),
    "a recurrence with two keys": (
        "%o, %s = attn.generalized_delta_rule(%x, %x, %v, %a, %a, %p, %d) "
        "{heads = 2, scale = 0.5}\n%y = aten.reshape(%o) {shape = [3, 30, 2, 20]}",
        "x : f32[3, 30, 64]; v : f32[3, 30, 40]; a : f32[3, 30, 64]; p : f32[3, 2, 32, 20]; "
        "d : f32[3, 30, 64]", True),
    "halves added": (
        "%a, %b = aten.chunk(%x) {chunks = 2, dim = 1}\n%y = aten.add.Tensor(%a, %b)",
        "x : f32[2, 64]", True),
    "unequal parts": (
        "%a, %y = aten.split_with_sizes(%x) {split_sizes = [20, 44], dim = 1}", "x : f32[2, 64]",
        True),
    "parts of one size and a rest": (
        "%a, %b, %y = aten.split.Tensor(%x) {split_size = 24, dim = 0}", "x : f32[60]", False),
    "a square": ("%t = aten.permute(%x) {dims = [1, 0]}\n%y = aten.add.Tensor(%x, %t)",
                 "x : f32[30, 30]", True),
    "a join of what one tensor has": ("%y = aten.cat(%x, %x) {dim = 0}", "x : f32[30]", True),
    "a join along one axis makes the others one": (
        "%y = aten.cat(%x, %z) {dim = 0}", "x : f32[30, 42]; z : f32[20, 42]", True),
    "a broadcast stack": ("%y = aten.stack(%x, %z) {dim = -1}", "x : f32[30]; z : f32[30]", True),
    "heads": ("%a = aten.reshape(%x) {shape = [2, 30, 4, 16]}\n"
              "%b = aten.permute(%a) {dims = [0, 2, 1, 3]}\n"
              "%y = aten.reshape(%b) {shape = [8, 30, 16]}", "x : f32[2, 30, 64]", True),
    "a reshape that mixes axes": ("%y = aten.reshape(%x) {shape = [42, 30]}", "x : f32[30, 42]",
                                  False),
    "a product that broadcasts": ("%y = aten.matmul(%x, %z)",
                                  "x : f32[1, 30, 64]; z : f32[5, 64, 42]", True),
    "a row times a matrix": ("%y = aten.matmul(%x, %z)", "x : f32[64]; z : f32[64, 42]", False),
    "einsum with a size of 1": ('%y = aten.einsum(%x, %z) {equation = "ij,jk->ik"}',
                                "x : f32[30, 1]; z : f32[42, 20]", True),
    "einsum over a diagonal": ('%y = aten.einsum(%x) {equation = "ii->i"}', "x : f32[30, 30]",
                               True),
    "einsum without a result": ('%y = aten.einsum(%x, %z) {equation = "ij,jk"}',
                                "x : f32[30, 42]; z : f32[42, 20]", False),
    "attention over shared keys": (
        "%y = aten.scaled_dot_product_attention(%x, %z, %z)",
        "x : f32[2, 4, 30, 20]; z : f32[2, 1, 42, 20]", True),
    "a mask of all scores": (
        "%y = aten.scaled_dot_product_attention(%x, %z, %z, %m)",
        "x : f32[2, 4, 30, 20]; z : f32[2, 4, 42, 20]; m : bool[30, 42]", True),
    "overlapping patches": (
        "%y = aten.conv2d(%x, %z) {stride = [4, 4]}", "x : f32[2, 3, 160, 160]; z : "
        "f32[20, 3, 8, 8]", False),
    "a convolution by steps": (
        "%y = aten.conv1d(%x, %z) {stride = [2], groups = 48}",
        "x : f32[2, 48, 30]; z : f32[48, 1, 4]", False),
    "rows by a table": ("%y = aten.index.Tensor(%x, none, %i)", "x : f32[5, 42]; i : i64[30]",
                        True),
    "rows by a mask": ("%y = aten.index.Tensor(%x, %i)", "x : f32[30, 5]; i : bool[30]", False),
    "two indices apart": ("%y = aten.index.Tensor(%x, %i, none, %i)",
                          "x : f32[5, 42, 6]; i : i64[30]", False),
    "a gather of fewer rows": ("%y = aten.gather(%x, %i) {dim = 1}",
                               "x : f32[30, 5]; i : i64[20, 42]", False),
    "the mean of all": ("%y = aten.sum.dim_IntList(%x) {dim = [0, -1], keepdim = true}",
                        "x : f32[30, 2, 42]", False),
    "one axis of three": ("%y = aten.mean.dim(%x) {dim = [-2]}", "x : f32[30, 20, 42]", True),
    "a causal convolution behind a state": (
        "%y, %n = attn.causal_conv(%x, %w, none, %p)",
        "x : f32[2, 48, 30]; w : f32[48, 1, 4]; p : f32[2, 48, 3]", True),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "inputs", "free"), CASES.values(), ids=CASES)
def test_shapes_are_those_of_the_ops_at_other_sizes(lines: str, inputs: str, free: bool) -> None:
    graph, found = _shapes(lines, inputs)
    if found is None:
        assert not free
        return
    (y,) = graph.outputs
    assert any(not isinstance(dim, int) for dim in found.shapes[y]) == free
    infos = found.infos
    assert all(info.low == FEWEST for info in infos.values())
    for least in (4, 5, 9):
        sizes = {
            name: min(least + 2 * at, info.high) for at, (name, info) in enumerate(infos.items())
        }
        memory: dict[Value, torch.Tensor] = {}
        for value in graph.inputs:
            shape = [int(substitute(dim, sizes)) for dim in found.shapes[value]]
            memory[value] = torch.zeros(shape, dtype=value.dtype)
        for node in graph:
            changed = found.attrs.get(node, {})
            attrs = {name: substitute(x, sizes) for name, x in {**node.attrs, **changed}.items()}
            given = [None if value is None else memory[value] for value in node.inputs]
            results = call(op_def(node.op), given, attrs)
            memory.update(zip(node.outputs, results, strict=True))
        for value, x in memory.items():
            assert tuple(x.shape) == tuple(substitute(found.shapes[value], sizes)), value.name


def _reader() -> Reader:
    return Reader(Sizes([]), lambda op: elementwise)


def test_a_broadcast_makes_sizes_one_and_keeps_ones() -> None:
    reader = _reader()
    first, second = (reader.sizes.fresh(S) for _ in range(2))
    found = reader.broadcast([(first, 5), (1, second, 1), (second, 5)], 3)
    assert found is not None
    assert [reader.sizes.number(dim) for dim in found] == [1, S, 5]
    assert reader.sizes.resolved(first) == reader.sizes.resolved(second)
    assert reader.broadcast([(first,), (T,)], 1) is None
    assert reader.broadcast([], 2) == (1, 1)


def test_a_rule_that_fails_or_is_wrong_keeps_the_sizes() -> None:
    rules = Rules()

    @rules.on("aten.relu", "aten.tanh")
    def wrong(reader: Reader, node: Any) -> Any:
        if node.op == "aten.tanh":
            raise ValueError
        return [(T,)]

    for op in ("relu", "tanh"):
        graph = parse(
            f"graph @main {{\n  input %x : f32[{S}]\n  %y = aten.{op}(%x)\n  return %y\n}}"
        )
        (node,) = graph
        reader = Reader(Sizes([]), rules.__getitem__)
        reader.shapes[graph.inputs[0]] = (reader.sizes.fresh(S),)
        reader.read(node)
        assert reader.shapes[node.output] == (S,)
        assert reader.sizes.resolved(reader.shapes[graph.inputs[0]]) == (S,)
        assert not list(reader.resolved_attrs())


def test_one_axis_gets_another_size() -> None:
    assert with_size((2, 3, 4), -1, 7) == (2, 3, 7)
    assert with_size((2, 3, 4), 0, 7) == (7, 3, 4)
