"""An expert's matrix is the same numbers, however it is stored and chosen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attngraph.analysis.experts.products import Product, is_gathered, read_product
from attngraph.ir import Graph, parse

EXPERTS, OUT, IN = 4, 3, 5
HEAD = """graph @main {
  dim rows = 6 in 1..
  input %x : f32[rows, 5]
  input %all : f32[4, rows, 5]
  input %i : i64[rows, 2]
  parameter %one : f32[3, 5]
  parameter %w : f32[4, 3, 5]
  parameter %t : f32[4, 5, 3]
  parameter %flat : f32[12, 5]
  parameter %middle : f32[3, 4, 5]
  parameter %b : f32[3]
  parameter %bs : f32[4, 3]
"""
Read = Callable[[dict[str, torch.Tensor]], torch.Tensor]
# (nodes, which gives the product, the matrices as (E, N, K), the number of the expert)
STORED: dict[str, tuple[str, Read, int | None]] = {
    "its own parameter": ("%y = aten.linear(%x, %one)", lambda p: p["one"][None], None),
    "its own parameter, transposed": (
        "%m = aten.permute(%one) {dims = [1, 0]}\n%y = aten.matmul(%x, %m)",
        lambda p: p["one"][None],
        None,
    ),
    "one of a stack": (
        "%m = aten.select.int(%w) {dim = 0, index = 2}\n%y = aten.linear(%x, %m)",
        lambda p: p["w"][2:3],
        2,
    ),
    "one of a stack, counted from its end": (
        "%m = aten.select.int(%w) {dim = 0, index = -1}\n%y = aten.linear(%x, %m)",
        lambda p: p["w"][3:],
        3,
    ),
    "one of a stack that is transposed": (
        "%m = aten.select.int(%t) {dim = 0, index = 1}\n%y = aten.matmul(%x, %m)",
        lambda p: p["t"][1:2].mT,
        1,
    ),
    "one of rows that are merged": (
        "%r = aten.reshape(%flat) {shape = [4, 3, 5]}\n"
        "%m = aten.select.int(%r) {dim = 0, index = 1}\n%y = aten.linear(%x, %m)",
        lambda p: p["flat"].reshape(4, 3, 5)[1:2],
        1,
    ),
    "a cut of rows that are merged": (
        "%m = aten.slice.Tensor(%flat) {dim = 0, start = 6, end = 9}\n%y = aten.linear(%x, %m)",
        lambda p: p["flat"][6:9][None],
        2,
    ),
    "all, one after the other": (
        "%m = aten.permute(%w) {dims = [0, 2, 1]}\n%y = aten.matmul(%all, %m)",
        lambda p: p["w"],
        None,
    ),
    "all, for each row": ('%y = aten.einsum(%x, %w) {equation = "th,eih->tei"}',
                          lambda p: p["w"], None),
    "those that a row chose": (
        '%m = aten.index.Tensor(%w, %i)\n%y = aten.einsum(%x, %m) {equation = "th,tkih->tki"}',
        lambda p: p["w"],
        None,
    ),
    "those that a row chose, transposed": (
        '%m = aten.index.Tensor(%t, %i)\n%y = aten.einsum(%x, %m) {equation = "th,tkhi->tki"}',
        lambda p: p["t"].mT,
        None,
    ),
}  # fmt: skip


def _parameters(graph: Graph) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        name: torch.randn([int(size) for size in value.shape], generator=random)
        for name, value in graph.constants.items()
    }


def _read(lines: str) -> tuple[Graph, Product | None]:
    graph = parse(f"{HEAD}{lines}\n  return %y\n}}")
    for node in reversed(list(graph)):
        found = read_product(node, EXPERTS)
        if found is not None:
            return graph, found
    return graph, None


@pytest.mark.parametrize(("lines", "expected", "expert"), STORED.values(), ids=STORED)
def test_a_matrix_is_read(lines: str, expected: Read, expert: int | None) -> None:
    graph, found = _read(lines)
    assert found is not None
    numbers = _parameters(graph)
    matrices = found.matrices
    read = matrices.read(numbers[matrices.constant.name])
    assert read.equal(expected(numbers))
    assert tuple(read.shape) == matrices.shape
    assert found.width == OUT
    assert (matrices.stacked, matrices.expert) == (len(read) > 1, expert)
    assert found.rows.name in ("x", "all")
    assert found.bias is None
    assert is_gathered(found) == ("index.Tensor" in lines)


def test_experts_that_are_not_the_first_axis_are_features() -> None:
    """Of one wide matrix, in the order in which the result has them."""
    graph, found = _read('%y = aten.einsum(%x, %middle) {equation = "th,ieh->tei"}')
    assert found is not None
    data = _parameters(graph)["middle"]
    assert not found.matrices.stacked
    assert found.matrices.read(data)[0].equal(data.transpose(0, 1).flatten(0, 1))


BIASED: dict[str, tuple[str, Read]] = {
    "of the product": ("%y = aten.linear(%x, %one, %b)", lambda p: p["b"][None]),
    "behind the product": (
        "%a = aten.linear(%x, %one)\n%y = aten.add.Tensor(%a, %b)",
        lambda p: p["b"][None],
    ),
    "one of a stack": (
        "%m = aten.select.int(%w) {dim = 0, index = 2}\n"
        "%v = aten.select.int(%bs) {dim = 0, index = 2}\n%y = aten.linear(%x, %m, %v)",
        lambda p: p["bs"][2:3],
    ),
    "all, for each row": (
        '%a = aten.einsum(%x, %w) {equation = "th,eih->tei"}\n%y = aten.add.Tensor(%a, %bs)',
        lambda p: p["bs"],
    ),
    "those that a row chose": (
        "%m = aten.index.Tensor(%w, %i)\n%v = aten.index.Tensor(%bs, %i)\n"
        '%a = aten.einsum(%x, %m) {equation = "th,tkih->tki"}\n%y = aten.add.Tensor(%a, %v)',
        lambda p: p["bs"],
    ),
}


@pytest.mark.parametrize(("lines", "expected"), BIASED.values(), ids=BIASED)
def test_a_bias_is_part_of_the_product(lines: str, expected: Read) -> None:
    graph, found = _read(lines)
    assert found is not None
    assert found.bias is not None
    numbers = _parameters(graph)
    assert found.bias.read(numbers[found.bias.constant.name]).equal(expected(numbers))
    assert found.result is graph.outputs[0]


@pytest.mark.parametrize(
    "lines",
    [
        "%a = aten.linear(%x, %one)\n%y = aten.add.Tensor(%a, %b) {alpha = 2}",
        "%a = aten.linear(%x, %one)\n%y = aten.sub.Tensor(%a, %b)",
        "%a = aten.linear(%x, %one)\n%z = aten.slice.Tensor(%x) {dim = 1, start = 0, end = 3}\n"
        "%y = aten.add.Tensor(%a, %z)",  # what isn't constant is no bias
        # read twice, once without what is added
        "%a = aten.linear(%x, %one)\n%c = aten.add.Tensor(%a, %b)\n%y = aten.mul.Tensor(%a, %c)",
    ],
)
def test_what_is_added_otherwise_stays_outside(lines: str) -> None:
    _, found = _read(lines)
    assert found is not None
    assert found.bias is None
    assert found.result.name == "a"


@pytest.mark.parametrize(
    "lines",
    [
        "%q = aten.permute(%x) {dims = [1, 0]}\n%y = aten.matmul(%x, %q)",  # of activations
        "%s = aten.tanh(%one)\n%y = aten.linear(%x, %s)",  # of computed numbers
        "%y = aten.mul.Tensor(%x, %x)",
        '%y = aten.einsum(%x, %w) {equation = "th,eih->ti"}',  # summed over the experts as well
        "%m = aten.select.int(%w) {dim = 1, index = 2}\n%y = aten.linear(%x, %m)",  # not an expert
        "%m = aten.index.Tensor(%one, %i)\n%p = aten.sum.dim_IntList(%m) {dim = [1]}\n"
        "%y = aten.mul.Tensor(%x, %p)",
    ],
)
def test_what_is_no_matrix_of_an_expert_is_none(lines: str) -> None:
    _, found = _read(lines)
    assert found is None or (found.matrices.stacked and found.matrices.shape[0] == EXPERTS
                             and found.matrices.shape[1] != OUT)  # fmt: skip


@pytest.mark.parametrize("experts", [3, 5])
def test_sizes_that_are_that_of_the_experts_are_told_apart(experts: int) -> None:
    """As many features as experts: what each axis is follows from the product, or nothing does."""
    graph = parse(f'{HEAD}%y = aten.einsum(%x, %w) {{equation = "th,eih->tei"}}\n  return %y\n}}')
    (node,) = graph
    found = read_product(node, experts)
    assert found is None or not found.matrices.stacked
