"""Every spelling of a sum of products, read as one contraction over named axes."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from dataclasses import dataclass

from attngraph.analysis.layout.axes import Atom, Axes, Operand, broadcast_axes, fresh_axes, spread
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute, input_of


@dataclass(frozen=True, slots=True)
class Contraction:
    """`factor` · Σ over `summed` of left · right, plus scaled `addends`."""

    left: Operand
    right: Operand
    summed: tuple[Atom, ...]
    factor: float = 1.0
    addends: tuple[tuple[Operand, float], ...] = ()

    @property
    def sides(self) -> tuple[Operand, Operand]:
        """Both operands of the product."""
        return self.left, self.right


def read_contraction(node: Node, axes: Axes) -> Contraction | None:
    """Reads the node whose output is indexed by `axes`; None if it is no contraction of two."""
    match node.op:
        case "aten.matmul":
            left, right = node.inputs
            return None if left is None or right is None else _matmul(left, right, axes)
        case "aten.baddbmm" | "aten.addmm":
            return _with_addend(node, axes)
        case "aten.einsum":
            return _einsum(node, axes)
        case "aten.linear":
            return _linear(node, axes)
        case "aten.sum.dim_IntList":
            return _multiply_and_sum(node, axes)
    return None


def _matmul(left: Value, right: Value, axes: Axes) -> Contraction:
    """torch.matmul: batch dims broadcast; a vector on either side lacks its outer axis."""
    inner = left.shape[-1]
    summed = () if inner == 1 else (Atom(inner),)
    row = axes[len(axes) - (1 if len(right.shape) == 1 else 2)] if len(left.shape) > 1 else None
    column = axes[-1] if len(right.shape) > 1 else None
    outer = (row is not None) + (column is not None)
    batch = axes[: len(axes) - outer]
    batch_shape = _sizes(batch)

    def operand(value: Value, matrix: Sequence[tuple[Atom, ...]]) -> Operand:
        lead = value.shape[: len(value.shape) - len(matrix)]
        return Operand(value, (*broadcast_axes(batch, lead, batch_shape), *matrix))

    return Contraction(
        operand(left, [summed] if row is None else [row, summed]),
        operand(right, [summed] if column is None else [summed, column]),
        summed,
    )


def _sizes(axes: Axes) -> list[int]:
    """1 where an index is constant, else 0: enough to tell which dims broadcast."""
    return [0 if dim else 1 for dim in axes]


def _with_addend(node: Node, axes: Axes) -> Contraction | None:
    addend, left, right = node.inputs
    beta, alpha = attribute(node, "beta"), attribute(node, "alpha")
    if addend is None or left is None or right is None:
        return None
    if not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)):
        return None
    product = _matmul(left, right, axes)
    shape = node.output.shape
    addends = () if beta == 0 else ((spread(addend, axes, shape), float(beta)),)
    return Contraction(product.left, product.right, product.summed, float(alpha), addends)


def _linear(node: Node, axes: Axes) -> Contraction | None:
    source, weight = node.inputs[:2]
    if source is None or weight is None or len(weight.shape) != 2:
        return None
    inner = source.shape[-1]
    summed = () if inner == 1 else (Atom(inner),)
    bias = input_of(node, "bias")
    addends = () if bias is None else ((Operand(bias, (axes[-1],)), 1.0),)
    return Contraction(
        Operand(source, (*axes[:-1], summed)),
        Operand(weight, (axes[-1], summed)),
        summed,
        addends=addends,
    )


def einsum_terms(node: Node) -> tuple[list[str], str]:
    """The letters of each operand of an einsum and those of its result, with none left out."""
    equation = attribute(node, "equation").replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    unused = iter(c for c in string.ascii_letters if c not in equation)
    ranks = [len(value.shape) for value in input_of(node, "tensors")]
    covered = [rank - len(t.replace("...", "")) for rank, t in zip(ranks, terms, strict=True)]
    dots = "".join(itertools.islice(unused, max(covered)))
    terms = [t.replace("...", dots[len(dots) - n :]) for t, n in zip(terms, covered, strict=True)]
    every = "".join(terms)
    once = sorted(c for c in {*every} - {*dots} if every.count(c) == 1)
    return terms, output.replace("...", dots) if arrow else dots + "".join(once)


def _einsum(node: Node, axes: Axes) -> Contraction | None:
    operands = input_of(node, "tensors")
    terms, output = einsum_terms(node)
    if len(terms) != 2:
        return None
    index: dict[str, tuple[Atom, ...]] = dict(zip(output, axes, strict=True))
    summed: list[Atom] = []
    for letter in dict.fromkeys("".join(terms)):
        if letter in index:
            continue
        if any(letter not in term for term in terms):
            return None  # a sum over one operand alone
        sizes = [v.shape[t.index(letter)] for v, t in zip(operands, terms, strict=True)]
        size = sizes[0] if sizes[0] != 1 else sizes[1]
        index[letter] = () if size == 1 else (Atom(size),)
        summed.extend(index[letter])
    if any(len(set(term)) != len(term) for term in terms):
        return None  # a diagonal
    left, right = (
        Operand(
            value,
            tuple(
                () if size == 1 else index[letter]
                for letter, size in zip(term, value.shape, strict=True)
            ),
        )
        for value, term in zip(operands, terms, strict=True)
    )
    return Contraction(left, right, tuple(summed))


def _multiply_and_sum(node: Node, axes: Axes) -> Contraction | None:
    source = node.inputs[0]
    product = source.producer if source is not None else None
    if source is None or product is None or product.op != "aten.mul.Tensor":
        return None
    rank = len(source.shape)
    dims = {dim % rank for dim in attribute(node, "dim") or range(rank)}
    fresh = fresh_axes(source.shape)
    rest = iter(axes)
    inner: list[tuple[Atom, ...]] = []
    for position in range(rank):
        if position not in dims:
            inner.append(next(rest))
            continue
        inner.append(fresh[position])
        if attribute(node, "keepdim"):
            next(rest)
    left, right = product.operands
    summed = tuple(atom for position in sorted(dims) for atom in inner[position])
    shape = source.shape
    return Contraction(
        spread(left, tuple(inner), shape), spread(right, tuple(inner), shape), summed
    )
