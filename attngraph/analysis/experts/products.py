"""The products of experts: a matrix of each, however it is stored and chosen.

An expert's matrix may be a parameter of its own, a part of a stack that is selected by number,
gathered by computed indices, or multiplied as a whole. Read as a contraction over named axes
(attngraph/analysis/layout), it is one constant, whose axes are experts, features and summed ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from attngraph.analysis.layout.axes import Atom, Axes, Operand, fresh_axes, resolve, top
from attngraph.analysis.layout.contraction import read_contraction
from attngraph.analysis.walks import users
from attngraph.ir import Node, Value
from attngraph.ir.ops import input_of
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import INDEX, LAYOUT, PART

GROUPED = ("aten._grouped_mm", "transformers.grouped_mm_fallback")
"""(S, K) × (E, K, N), where rows are sorted by expert."""
_VECTORS = 2  # dims of what holds a bias for each expert


@dataclass(frozen=True, slots=True)
class Stored:
    """Numbers of one expert, or of all: a constant, and how its elements are laid out.

    `sizes` are those of its axes, major to minor; `order` lists them as experts, features and
    summed ones; `fixed` are places on axes that are selected. `expert` is the number of the one
    whose they are, where a selection says so; of all, `stacked`.
    """

    constant: Value
    sizes: tuple[int, ...]
    fixed: tuple[tuple[int, int], ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    stacked: bool
    expert: int | None = None

    def read(self, data: torch.Tensor) -> torch.Tensor:
        """(E, N, K) or, of a bias, (E, N), of the constant's data; E is 1 if not `stacked`."""
        data = data.reshape(self.sizes)
        for axis, place in sorted(self.fixed, reverse=True):
            data = data.select(axis, place)
        return data.permute(self.order).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Product:
    """`node` multiplies `rows` with experts' matrices; `bias` is theirs, `result` the sum."""

    node: Node
    rows: Value
    matrices: Stored
    bias: Stored | None
    result: Value

    @property
    def width(self) -> int:
        """How many features it gives."""
        return self.matrices.shape[1]


def read_product(node: Node, experts: int) -> Product | None:
    """The node as a product with matrices of experts; None if no operand is such a constant."""
    if len(node.outputs) != 1:
        return None
    if node.op in GROUPED:
        rows, right = node.operands[:2]
        if input_of(node, "offs") is None or len(right.shape) != 3:
            return None
        group, inner, outer = axes = fresh_axes(right.shape)
        found = _stored(Operand(right, axes), experts, outer, inner, group)
        return None if found is None else _with_bias(node, rows, found, experts)
    if not node.output.tensor_type.dtype.is_floating_point:
        return None
    axes = fresh_axes(node.output.shape)
    product = read_contraction(node, axes)
    if product is None or product.factor != 1.0 or len(product.summed) == 0:
        return None
    for weight, other in (product.sides, product.sides[::-1]):
        if (
            any(operand.value is not input_of(node, "bias") for operand, _ in product.addends)
            if (node.op == "aten.linear")
            else product.addends
        ):
            continue
        rest = [atom for dim in axes for atom in dim]
        found = _stored(weight, experts, rest, _in_order(other, product.summed))
        if found is not None:
            return _with_bias(node, other.value, found, experts)
    return None


def is_gathered(product: Product) -> bool:
    """Whether each row is given a copy of the matrix of its expert."""
    _, nodes = backward_slice(
        [product.node.output],
        lambda value: value is product.rows or not value.dtype.is_floating_point,
    )
    return any(
        node.op in INDEX
        and source is not None
        and source.is_constant
        and len(source.shape) > _VECTORS
        for node in nodes
        for source in node.inputs[:1]
    )


def _in_order(operand: Operand, summed: Iterable[Atom]) -> tuple[Atom, ...]:
    """Summed atoms in the order in which the activations have them."""
    wanted = set(resolve(summed))
    return tuple(atom for atom in operand.atoms if atom in wanted)


def _stored(
    operand: Operand,
    experts: int,
    features: Iterable[Atom],
    summed: Iterable[Atom],
    group: Iterable[Atom] = (),
) -> Stored | None:
    """A constant under the operand, with what its axes are; None where one has no role."""
    chosen = set(group)
    operand = top(operand)
    gather = operand.value.producer
    if gather is not None and gather.op in INDEX and not operand.value.is_constant:
        indices = [value for value in gather.inputs[1:] if value is not None]
        source = gather.inputs[0]
        if source is None or len(indices) != 1 or len(gather.inputs) != 2:
            return None
        if gather.op == "aten.index_select" and gather.attrs.get("dim") != 0:
            return None
        picked = Atom(source.shape[0])
        chosen = {picked}
        lead = len(indices[0].shape)
        if any(atom in resolve(summed) for dim in operand.dims[:lead] for atom in dim):
            return None
        operand = top(Operand(source, ((picked,), *operand.axes[lead:])))
    value = operand.value
    if not value.is_constant or not value.tensor_type.dtype.is_floating_point:
        return None
    storage = [atom for dim in operand.dims for atom in dim]
    sizes = [atom.size for atom in storage]
    if not storage or not all(isinstance(size, int) for size in sizes):
        return None
    return _laid_out(value, storage, experts, chosen, resolve(features), resolve(summed))


def _laid_out(
    value: Value,
    storage: Sequence[Atom],
    experts: int,
    chosen: set[Atom],
    features: Sequence[Atom],
    summed: Sequence[Atom],
) -> Stored | None:
    chosen = {*resolve(chosen)}
    first, expert = storage[0], None
    if not chosen and first.size == experts:
        if first.const is not None:
            expert = first.const
        elif first in features:  # all experts, each of which has a result
            chosen = {first}
    free = [atom for atom in storage if atom.const is None]
    outer = [atom for atom in features if atom in free and atom not in chosen]
    inner = [atom for atom in summed if atom in free]
    lead = [atom for atom in free if atom in chosen]
    if len(lead) != len(chosen) or len({*lead, *outer, *inner}) != len(free) or not outer:
        return None
    if len(inner) != len(summed):
        return None
    sizes = [int(atom.size) for atom in storage]

    def count(atoms: Sequence[Atom]) -> int:
        return int(torch.Size(int(atom.size) for atom in atoms).numel())

    if lead and count(lead) != experts:
        return None
    shape = (count(lead), count(outer), *((count(inner),) if summed else ()))
    fixed = tuple((i, atom.const) for i, atom in enumerate(storage) if atom.const is not None)
    order = tuple(free.index(atom) for atom in (*lead, *outer, *inner))
    return Stored(value, tuple(sizes), fixed, order, shape, bool(lead), expert)


def _with_bias(node: Node, rows: Value, matrices: Stored, experts: int) -> Product | None:
    """The product and what is added to it for each feature, by the product itself or behind it."""
    width = matrices.shape[1]
    own = input_of(node, "bias") if node.op == "aten.linear" else None
    if own is not None:
        bias = _vector(own, fresh_axes(own.shape), experts, width)
        return None if bias is None else Product(node, rows, matrices, bias, node.output)
    value = node.output
    while len(readers := list(users(value.producer) if value.producer else ())) == 1:
        reader = readers[0]
        if reader.op in LAYOUT and reader.op not in PART and len(reader.outputs) == 1:
            value = reader.output
            continue
        if reader.op == "aten.add.Tensor" and "alpha" not in reader.attrs:
            others = [other for other in reader.operands if other is not value]
            axes = fresh_axes(reader.output.shape)
            if len(others) == 1 and len(reader.output.shape) == len(value.shape):
                other = others[0]
                aligned = axes[len(axes) - len(other.shape) :]
                placed = tuple(
                    () if size == 1 else index
                    for index, size in zip(aligned, other.shape, strict=True)
                )
                bias = _vector(other, placed, experts, width)
                if bias is not None:
                    return Product(node, rows, matrices, bias, reader.output)
        break
    return Product(node, rows, matrices, None, node.output)


def _vector(value: Value, axes: Axes, experts: int, width: int) -> Stored | None:
    """A number for each feature of an expert."""
    found = _stored(Operand(value, axes), experts, [atom for dim in axes for atom in dim], ())
    return None if found is None or found.shape[1] != width else found
