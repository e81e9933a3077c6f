"""Reads sums of exponentials, and what was exponentiated: the parts of a softmax by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attngraph.analysis.attention.climbing import chosen_part
from attngraph.analysis.layout.axes import (
    Axes,
    Operand,
    climb,
    fresh_axes,
    resolve,
    top,
)
from attngraph.analysis.layout.contraction import read_contraction
from attngraph.analysis.values.scalars import (
    fill_of,
    is_binary,
    is_cast,
    number,
    shift_of,
    uniform,
    widens,
)
from attngraph.analysis.walks import stripped
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute
from attngraph.ir.traits import COPY, PLAIN_SOFTMAX, RESHAPE, TRIANGLE

EXP = "aten.exp"
SUM = "aten.sum.dim_IntList"
NORM = "aten.linalg_vector_norm"


@dataclass(frozen=True, slots=True)
class Exponent:
    """exp(x), up to a factor that is the same along the dims; zero where `predicate` isn't `keep`.

    `triangle` is the tril or triu that masks instead of a predicate. `is_normalised` says that the
    exponentials alone already sum to one.
    """

    x: Value
    predicate: Value | None = None
    keep: bool = True
    triangle: Node | None = None
    is_normalised: bool = False

    @property
    def is_masked(self) -> bool:
        return self.predicate is not None or self.triangle is not None


@dataclass(frozen=True, slots=True)
class Total:
    """Σ of `terms` over `dims`, and how the terms' other dims are indexed by a quotient's axes.

    `how` is "quotient" where it is computed as exp(logsumexp), as row_policy.Formula has it.
    """

    terms: Value
    dims: tuple[int, ...]
    axes: Axes
    how: str = ""


def read_exponent(value: Value, dims: tuple[int, ...]) -> Exponent | None:
    """The value as exponentials to be normalised along `dims`, masked by zeros or not.

    A softmax along the same dim is exponentials that were divided by a number per row.
    """
    node = value.producer
    if node is None:
        return None
    source = node.inputs[0] if node.inputs else None
    if node.op == EXP:
        return None if source is None else Exponent(source)
    if node.op in PLAIN_SOFTMAX and source is not None:
        is_same = dims == (attribute(node, "dim") % len(source.shape),)
        return Exponent(source, is_normalised=True) if is_same else None
    if is_cast(node) and source is not None and source.dtype == value.dtype:
        return read_exponent(source, dims)
    if node.op in TRIANGLE and source is not None:
        inner = read_exponent(source, dims)
        return None if inner is None or inner.is_masked else replace(inner, triangle=node)
    if (filling := fill_of(node)) is not None and filling[3] == 0.0:
        return _masked(filling[0], filling[1], filling[2], value, dims)
    if node.op == "aten.mul.Tensor":
        for index in (0, 1):
            side, other = node.inputs[index], node.inputs[1 - index]
            if side is None or other is None or not is_binary(other):
                continue
            cast = other.producer
            bare = cast.inputs[0] if cast is not None and is_cast(cast) else None
            predicate = bare if bare is not None and bare.dtype == torch.bool else other
            if (masked := _masked(side, predicate, True, value, dims)) is not None:
                return masked
    return None


def _masked(
    side: Value, predicate: Value, keep: bool, value: Value, dims: tuple[int, ...]
) -> Exponent | None:
    inner = read_exponent(side, dims)
    if inner is None or inner.is_masked or side.shape != value.shape:
        return None
    return replace(inner, predicate=predicate, keep=keep)


def reciprocal_of(node: Node | None) -> Value | None:
    """x where the node computes 1 / x."""
    if node is None or not node.inputs:
        return None
    if node.op == "aten.reciprocal":
        return node.inputs[0]
    if node.op == "aten.pow.Tensor_Scalar" and number(attribute(node, "exponent")) == -1:
        return node.inputs[0]
    if node.op == "aten.div.Tensor" and uniform(node.inputs[0]) == 1.0:
        x = node.inputs[1]
        return x if x is not None and x.shape == node.output.shape else None
    return None


def read_total(operand: Operand) -> Total | None:
    """The sum that a denominator broadcasts, past layout, casts and a negligible number."""
    while (node := operand.value.producer) is not None:
        source = node.inputs[0] if node.inputs else None
        if node.op in (SUM, NORM):
            return _reduced(node, operand.axes)
        if node.op == EXP:
            return _of_logsumexp(node, operand.axes)
        if widens(node) and source is not None:
            operand = Operand(source, operand.axes)
            continue
        rounded_off = _negligible(node)
        above = Operand(rounded_off, operand.axes) if rounded_off is not None else climb(operand)
        if above is None:
            return _times_ones(node, operand.axes)
        operand = above
    return None


def _of_logsumexp(node: Node, axes: Axes) -> Total | None:
    """The sum as exp(logsumexp(x)) or exp(logsumexp(x) − m), of the exp(x) or exp(x − m)."""
    log, shift = node.inputs[0], None
    if log is not None and log.producer is not None and log.producer.op == "aten.sub.Tensor":
        if attribute(log.producer, "alpha") != 1:
            return None
        log, shift = log.producer.inputs
        if log is None or shift is None or shift.shape != log.shape:
            return None
    total = log.producer if log is not None else None
    if total is None or total.op != "aten.logsumexp" or total.inputs[0] is None:
        return None
    x = total.inputs[0]
    # A shift without the summed dims would be another one for exp(x − m).
    if shift is not None and not attribute(total, "keepdim"):
        return None
    sources = [x]
    if shift is not None:
        sources = [
            user.output
            for user in x.users
            if user.op == "aten.sub.Tensor"
            and user.inputs == (x, shift)
            and attribute(user, "alpha") == 1
        ]
    for source in sources:
        for user in source.users:
            if user.op == EXP:
                found = _over(user.output, total, axes)
                return None if found is None else replace(found, how="quotient")
    return None


def _reduced(node: Node, axes: Axes) -> Total | None:
    """A sum, or the L1 norm of what is not negative."""
    terms = node.inputs[0]
    total = None if terms is None else _over(terms, node, axes)
    if total is None or node.op == SUM:
        return total
    is_positive = read_exponent(total.terms, total.dims) is not None
    return total if is_positive and attribute(node, "ord") == 1 else None


def _over(terms: Value, node: Node, axes: Axes) -> Total | None:
    """`terms` summed over the dims that a reduction, whose result has these axes, names."""
    if not attribute(node, "dim"):
        return None
    dims = tuple(sorted(dim % len(terms.shape) for dim in attribute(node, "dim")))
    if not attribute(node, "keepdim"):
        for dim in dims:
            axes = (*axes[:dim], (), *axes[dim:])
    return Total(terms, dims, axes)


def _times_ones(node: Node, axes: Axes) -> Total | None:
    """The sum as a product with ones."""
    if len(node.outputs) != 1:
        return None
    product = read_contraction(node, axes)
    if product is None or product.addends or product.factor != 1.0 or not product.summed:
        return None
    for terms, ones in ((product.left, product.right), (product.right, product.left)):
        if uniform(_chosen(ones).value) != 1.0:
            continue
        summed = resolve(product.summed)
        dims = tuple(i for i, index in enumerate(terms.axes) if resolve(index) == summed)
        return Total(terms.value, dims, terms.axes) if len(dims) == 1 else None
    return None


def _chosen(operand: Operand) -> Operand:
    """Past layout, and past concatenations to the part in which a fixed index lies."""
    operand = top(operand)
    while (part := chosen_part(operand)) is not None:
        operand = top(part)
    return operand


def _negligible(node: Node) -> Value | None:
    """s where the node is s + ε or max(s, ε), and s ≥ 1 since the row maximum was subtracted."""
    epsilon = added(node)
    source = node.inputs[0] if epsilon is not None else None
    if source is None or epsilon is None or not source.dtype.is_floating_point:
        return None
    if not 0 <= epsilon <= torch.finfo(source.dtype).eps / 2:
        return None
    total = read_total(Operand(source, fresh_axes(source.shape)))
    exponent = None if total is None else read_exponent(total.terms, total.dims)
    if total is None or exponent is None or exponent.is_masked:
        return None
    is_shifted = bool(unshifted(exponent.x, total.dims)[1])
    return source if exponent.is_normalised or is_shifted else None


def added(node: Node) -> float | None:
    """ε where the node is s + ε or max(s, ε)."""
    if node.op == "aten.add.Scalar":
        return shift_of(node)
    if node.op == "aten.clamp_min" or (node.op == "aten.clamp" and attribute(node, "max") is None):
        return number(attribute(node, "min"))
    return None


def unshifted(x: Value, dims: tuple[int, ...]) -> tuple[Value, str]:
    """(y, "maximum") where x is y minus its maximum over `dims`, else (x, "")."""
    node = x.producer
    if node is None or node.op != "aten.sub.Tensor" or attribute(node, "alpha") != 1:
        return x, ""
    source, shift = node.inputs
    if source is None or shift is None or source.shape != x.shape:
        return x, ""
    rows = tuple(1 if dim in dims else size for dim, size in enumerate(x.shape))
    row = stripped(shift, COPY | RESHAPE).producer
    if row is None or row.inputs[:1] != (source,) or shift.shape != rows:
        return x, ""
    if row.op == "aten.amax":
        over = attribute(row, "dim")
    elif row.op == "aten.max.dim":
        over = [attribute(row, "dim")]
    else:
        return x, ""
    is_same = bool(over) and {dim % len(source.shape) for dim in over} == set(dims)
    return (source, "maximum") if is_same else (x, "")


def same_rows(left: Axes, right: Axes, dims: tuple[int, ...]) -> bool:
    """Whether two indexings of a tensor agree on all dims but these."""
    return all(
        resolve(first) == resolve(second)
        for position, (first, second) in enumerate(zip(left, right, strict=True))
        if position not in dims
    )
