"""Each spelling of a sum of products, read over named axes and evaluated as it was read.

Elements are small whole numbers, so that every order of summation gives the same result exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from attngraph.analysis.layout.axes import Atom, Axes, Operand, fresh_axes, resolve
from attngraph.analysis.layout.contraction import Contraction, read_contraction
from attngraph.ir import Graph, Value, interpret, parse

# The shapes of the inputs a, b and c, and the op or its equation or attributes.
READ: dict[str, tuple[str, str]] = {
    "matmul": ("2 3, 3 4", "aten.matmul(%a, %b)"),
    "matmul-batch": ("5 2 3, 5 3 4", "aten.matmul(%a, %b)"),
    "matmul-broadcast-left": ("1 2 3, 5 3 4", "aten.matmul(%a, %b)"),
    "matmul-broadcast-right": ("6 5 2 3, 6 1 3 4", "aten.matmul(%a, %b)"),
    "matmul-lacks-batch": ("5 2 3, 3 4", "aten.matmul(%a, %b)"),
    "matmul-lacks-left-batch": ("2 3, 6 5 3 4", "aten.matmul(%a, %b)"),
    "matmul-both-broadcast": ("6 1 2 3, 5 3 4", "aten.matmul(%a, %b)"),
    "matmul-vector-left": ("3, 5 3 4", "aten.matmul(%a, %b)"),
    "matmul-vector-right": ("5 2 3, 3", "aten.matmul(%a, %b)"),
    "matmul-vectors": ("3, 3", "aten.matmul(%a, %b)"),
    "matmul-one-row": ("5 1 3, 5 3 4", "aten.matmul(%a, %b)"),
    "matmul-inner-one": ("2 1, 1 4", "aten.matmul(%a, %b)"),
    "matmul-same-sizes": ("3 3 3, 3 3 3", "aten.matmul(%a, %b)"),
    "baddbmm": ("5 2 3, 5 3 4, 5 2 4", "aten.baddbmm(%c, %a, %b) {beta = 3, alpha = 2}"),
    "baddbmm-broadcast": ("5 2 3, 5 3 4, 1 4", "aten.baddbmm(%c, %a, %b)"),
    "baddbmm-beta-zero": ("5 2 3, 5 3 4, 5 2 4", "aten.baddbmm(%c, %a, %b) {beta = 0}"),
    "addmm": ("2 3, 3 4, 4", "aten.addmm(%c, %a, %b) {alpha = -2}"),
    "addmm-column": ("2 3, 3 4, 2 1", "aten.addmm(%c, %a, %b)"),
    "linear": ("5 2 3, 4 3, 4", "aten.linear(%a, %b, %c)"),
    "linear-without-bias": ("2 3, 4 3", "aten.linear(%a, %b)"),
    "linear-vector": ("3, 4 3, 4", "aten.linear(%a, %b, %c)"),
    "linear-one-feature-in": ("2 1, 4 1", "aten.linear(%a, %b)"),
    "linear-one-feature-out": ("5 2 3, 1 3, 1", "aten.linear(%a, %b, %c)"),
}
EINSUMS: dict[str, tuple[str, str]] = {
    "plain": ("5 2 3, 5 4 3", "bqd,bkd->bqk"),
    "order": ("5 2 3, 5 4 3", "bqd,bkd->kbq"),
    "spaces": ("2 3, 3 4", "i k, k j -> i j"),
    "implicit": ("2 3, 3 4", "ij,jk"),
    "implicit-sorted": ("3 2, 4 3", "zb,az"),
    "implicit-capitals": ("3 2, 4 3", "zb,Az"),
    "ellipsis": ("6 5 2 3, 6 5 4 3", "...qd,...kd->...qk"),
    "ellipsis-broadcast": ("6 1 2 3, 5 4 3", "...qd,...kd->...qk"),
    "ellipsis-on-one-side": ("6 5 3, 4 3", "...d,kd->k..."),
    "ellipsis-implicit": ("6 5 2 3, 3 4", "...z,za"),
    "ellipsis-empty": ("2 3, 3 4", "...ij,...jk->...ik"),
    "size-one": ("1 2 3, 5 4 3", "bqd,bkd->bqk"),
    "size-one-summed": ("2 1, 4 3", "qd,kd->qk"),
    "all-one": ("1 1, 1 1", "qd,kd->qk"),
    "outer": ("2, 4", "i,j->ij"),
    "two-sums": ("2 3 5, 3 4 5", "bhd,hod->bo"),
    "elementwise": ("2 3, 2 3", "ij,ij->ij"),
}
PRODUCT_SUMS: dict[str, tuple[str, str]] = {
    "last": ("5 2 1 3, 5 1 4 3", "dim = [-1]"),
    "keepdim": ("5 2 1 3, 5 1 4 3", "dim = [3], keepdim = true"),
    "first": ("5 2 3, 5 2 3", "dim = [0]"),
    "two": ("5 2 3, 5 2 3", "dim = [2, 0]"),
    "two-keepdim": ("5 2 3, 2 3", "dim = [0, -1], keepdim = true"),
    "all": ("2 3, 2 3", "dim = none"),
    "weighted": ("5 2 3, 3", "dim = [-1]"),
}
REFUSED: dict[str, tuple[str, str]] = {
    "one-operand": ("2 3", 'aten.einsum(%a) {equation = "ij->i"}'),
    "three-operands": ("2 3, 3 4, 4", 'aten.einsum(%a, %b, %c) {equation = "ij,jk,k->i"}'),
    "diagonal": ("3 3, 3 4", 'aten.einsum(%a, %b) {equation = "ii,ij->j"}'),
    "sum-of-one-side": ("2 3, 4 5", 'aten.einsum(%a, %b) {equation = "ij,kl->ik"}'),
    "weight-of-one-axis": ("2 3, 3", "aten.linear(%a, %b)"),
    "sum-of-no-product": ("2 3", "aten.sum.dim_IntList(%a) {dim = [1]}"),
    "elementwise": ("2 3, 2 3", "aten.mul.Tensor(%a, %b)"),
}


def _graph(shapes: str, *lines: str) -> Graph:
    inputs = [
        f"input %{name} : f64[{', '.join(shape.split())}]"
        for name, shape in zip("abc", shapes.split(","), strict=False)
    ]
    return parse("graph @test {\n" + "\n".join((*inputs, *lines, "return %y")) + "\n}")


def _numbers(graph: Graph) -> list[Tensor]:
    seed = torch.Generator().manual_seed(0)
    return [
        torch.randint(-9, 10, [int(dim) for dim in value.shape], generator=seed).double()
        for value in graph.inputs
    ]


def _indexed(tensor: Tensor, operand: Operand) -> tuple[Tensor, list[Atom]]:
    """The operand's elements with one dim per atom; other dims must be of size 1."""
    for dim, size in zip(operand.dims, tensor.shape, strict=True):
        assert len(dim) == 1 or size == 1
    return tensor.reshape([int(atom.size) for atom in operand.atoms]), list(operand.atoms)


def _evaluate(
    contraction: Contraction, memory: dict[Value, Tensor], axes: Axes, shape: Sequence[int]
) -> Tensor:
    """As read: factor · Σ left · right, plus the addends."""
    letters: dict[Atom, int] = {}
    outer = [atom for dim in axes for atom in resolve(dim)]

    def numbered(operand: Operand) -> tuple[Tensor, list[int]]:
        tensor, atoms = _indexed(memory[operand.value], operand)
        return tensor, [letters.setdefault(atom, len(letters)) for atom in atoms]

    left, right = numbered(contraction.left), numbered(contraction.right)
    assert {*contraction.summed} <= letters.keys()
    assert not {*contraction.summed} & {*outer}
    assert letters.keys() <= {*contraction.summed, *outer}
    wide = [int(atom.size) for atom in outer]
    for atom in outer:
        letters.setdefault(atom, len(letters))

    def spread(tensor: Tensor, present: list[int]) -> Tensor:
        order = [letters[atom] for atom in outer]
        kept = [letter for letter in order if letter in present]
        tensor = torch.einsum(tensor, present, kept)
        sizes = [int(a.size) if letters[a] in present else 1 for a in outer]
        return tensor.reshape(sizes).expand(wide)

    present = list(dict.fromkeys((*left[1], *right[1])))
    kept = [n for n in present if n in {letters[atom] for atom in outer}]
    product = torch.einsum(left[0], left[1], right[0], right[1], kept)
    total = contraction.factor * spread(product, kept)
    for operand, factor in contraction.addends:
        total = total + factor * spread(*numbered(operand))
    return total.reshape(list(shape))


def _assert_read(graph: Graph) -> Contraction:
    node = list(graph)[-1]
    axes = fresh_axes(node.output.shape)
    contraction = read_contraction(node, axes)
    assert contraction is not None
    inputs = _numbers(graph)
    (expected,) = interpret(graph, inputs)
    memory = dict(zip(graph.inputs, inputs, strict=True))
    assert torch.equal(_evaluate(contraction, memory, axes, expected.shape), expected)
    return contraction


@pytest.mark.parametrize(("shapes", "line"), READ.values(), ids=READ)
def test_a_spelling_is_read(shapes: str, line: str) -> None:
    _assert_read(_graph(shapes, f"%y = {line}"))


@pytest.mark.parametrize(("shapes", "equation"), EINSUMS.values(), ids=EINSUMS)
def test_an_einsum_is_read(shapes: str, equation: str) -> None:
    _assert_read(_graph(shapes, f'%y = aten.einsum(%a, %b) {{equation = "{equation}"}}'))


@pytest.mark.parametrize(("shapes", "attrs"), PRODUCT_SUMS.values(), ids=PRODUCT_SUMS)
def test_multiply_and_sum_is_read(shapes: str, attrs: str) -> None:
    lines = ["%p = aten.mul.Tensor(%a, %b)", f"%y = aten.sum.dim_IntList(%p) {{{attrs}}}"]
    _assert_read(_graph(shapes, *lines))


@pytest.mark.parametrize(("shapes", "line"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_product_of_two_is_not_read(shapes: str, line: str) -> None:
    graph = _graph(shapes, f"%y = {line}")
    node = list(graph)[-1]
    assert read_contraction(node, fresh_axes(node.output.shape)) is None


def test_sizes_known_later_are_named_too() -> None:
    graph = parse(
        "graph @test {\n dim batch = 3 in 1..\n dim seq = 5 in 1..\n"
        "input %a : f32[batch, seq, 8]\n input %b : f32[batch, 7, 8]\n"
        '%y = aten.einsum(%a, %b) {equation = "...qd,...kd"}\n return %y\n}'
    )
    (node,) = graph
    axes = fresh_axes(node.output.shape)
    contraction = read_contraction(node, axes)
    assert contraction is not None
    # Without an arrow, the letters of the output are in the order of the alphabet: k before q.
    assert contraction.left.axes[:2] == (axes[0], axes[2])
    assert contraction.right.axes[:2] == axes[:2]
    assert contraction.left.axes[2] == contraction.right.axes[2] == contraction.summed
    assert [atom.size for atom in contraction.summed] == [8]
