"""raise-softmax: a softmax spelled out in exponentials becomes one `aten.softmax`.

Read: exp(x) / Σ exp(x) (Bridle 1990), with the exponentials masked by zeros or not; exp(x −
logsumexp(x)); exp(log_softmax(x)); a softmax with one more column that is dropped, and with one
more in the denominator (sinks.py), or scaled afterwards by its share (sink_gate.py); and late
normalisation, (exp(x) · V) / Σ exp(x). The usual shift by the row's maximum stays in x: softmax
doesn't see it, and fuse-attention drops it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from attngraph.ir import Builder, Graph, Node, Remark, Value
from attngraph.ir.graph import fuse_locs
from attngraph.ir.ops import attribute
from attngraph.passes.axes import Axes, Operand, broadcast_axes, climb, fresh_axes, resolve
from attngraph.passes.checked import Checked
from attngraph.passes.contraction import read_contraction
from attngraph.passes.decline import is_product
from attngraph.passes.labels import reassociated
from attngraph.passes.manager import register
from attngraph.passes.scalars import fill_of, is_binary, is_cast
from attngraph.passes.sink_gate import raise_sink_gate
from attngraph.passes.sinks import raise_plus_one, raise_sink_column
from attngraph.passes.trials import LOGITS

_EXP = "aten.exp"
_SUM = "aten.sum.dim_IntList"
_SOFTMAXES = frozenset(["aten.softmax.int", "aten._softmax"])


@register
@dataclass(frozen=True)
class RaiseSoftmax:
    """Turns softmaxes that are spelled out in exponentials into `aten.softmax`.

    With `exact_only`, not those that are normalised after the product with the values.
    """

    exact_only: bool = False

    name: ClassVar[str] = "raise-softmax"
    exact: ClassVar[bool] = False

    def run(self, graph: Graph) -> list[Remark]:
        build, checked = Builder(graph), Checked(graph, self.name, kinds=LOGITS)
        remarks: list[Remark] = []
        for node in list(graph):
            if node.graph is None:
                continue
            if node.op == "aten.exp2":
                node = _natural(build, checked, node)
            if node.op == _EXP:
                _raise_log(build, checked, node)
            elif node.op in _SOFTMAXES:
                raise_sink_column(build, checked, node)
            elif raise_plus_one(build, checked, node) or raise_sink_gate(build, checked, node):
                continue
            elif (pair := _quotient(node)) is not None:
                if _raise_quotient(build, checked, node, *pair, late=not self.exact_only):
                    what = "The weights are normalised before the values are summed, not after."
                    remarks.append(reassociated(node, what))
                remarks += _epsilon(node, *pair)
        return [*remarks, *checked.remarks]


def _natural(build: Builder, checked: Checked, node: Node) -> Node:
    """exp(x · ln 2) for exp2(x), where a sum normalises it."""
    source = node.inputs[0]
    if source is None or all(user.op != _SUM for user in node.output.users):
        return node
    build.at(node, node.loc)
    power = build.node(_EXP, build("aten.mul.Scalar", source, other=math.log(2)))
    return power if checked.replace([(node.output, power.output)]) else node


def _epsilon(node: Node, numerator: Value, denominator: Value) -> list[Remark]:
    """A remark on attention scores that are normalised by their sum and something more."""
    total = denominator.producer
    if total is None or total.op != "aten.add.Scalar" or _negligible(total) is not None:
        return []
    reduced = total.inputs[0].producer if total.inputs[0] is not None else None
    exponent = _exponent(numerator)
    if reduced is None or reduced.op != _SUM or reduced.inputs[0] is not numerator:
        return []
    if exponent is None or not is_product(exponent[0]) or not node.output.uses:
        return []
    return [
        Remark(
            "declined",
            "epsilon-in-softmax",
            f"{attribute(total, 'other'):g} is added to the sum that normalises the weights, so "
            "this is no softmax.",
            node.loc,
            op=node.op,
            hint="Subtract the row maximum and leave the number out: the sum is then at least 1.",
            node=node.output.name,
            blamed=f"{total.op} at {total.loc}",
        )
    ]


def _quotient(node: Node) -> tuple[Value, Value] | None:
    """(numerator, denominator) of a division or a product with a reciprocal."""
    if node.op == "aten.div.Tensor":
        top, bottom = node.inputs
        return None if top is None or bottom is None else (top, bottom)
    if node.op == "aten.mul.Tensor":
        for index in (0, 1):
            top, other = node.inputs[index], node.inputs[1 - index]
            inverse = other.producer if other is not None else None
            if inverse is not None and inverse.op == "aten.reciprocal" and top is not None:
                bottom = inverse.inputs[0]
                return None if bottom is None else (top, bottom)
    return None


@dataclass(frozen=True, slots=True)
class _Total:
    """Σ over one dim of an exponential: the node, what is summed, and the sum's axes."""

    terms: Value
    dim: int
    axes: Axes


def _total(operand: Operand) -> _Total | None:
    """The sum that a denominator broadcasts, its kept dim included as an empty index."""
    while True:
        node = operand.value.producer
        if node is None:
            return None
        if node.op == _SUM:
            break
        if is_cast(node) and node.inputs[0] is not None:
            operand = Operand(node.inputs[0], operand.axes)
            continue
        rounded_off = _negligible(node)
        above = Operand(rounded_off, operand.axes) if rounded_off is not None else climb(operand)
        if above is None:
            return None
        operand = above
    terms = node.inputs[0]
    dims = attribute(node, "dim")
    if terms is None or not dims or len(dims) != 1:
        return None
    dim = dims[0] % len(terms.shape)
    axes = operand.axes
    if not attribute(node, "keepdim"):
        axes = (*axes[:dim], (), *axes[dim:])
    return _Total(terms, dim, axes)


def _negligible(node: Node) -> Value | None:
    """s where the node is s + ε or max(s, ε), and s ≥ 1 since the row maximum was subtracted."""
    if node.op == "aten.add.Scalar":
        epsilon, source = attribute(node, "other"), node.inputs[0]
    elif node.op == "aten.clamp_min":
        epsilon, source = attribute(node, "min"), node.inputs[0]
    else:
        return None
    total = source.producer if source is not None else None
    if source is None or total is None or total.op != _SUM or total.inputs[0] is None:
        return None
    if not isinstance(epsilon, float) or not 0 <= epsilon <= torch.finfo(source.dtype).eps / 2:
        return None
    exponent = _exponent(total.inputs[0])
    return source if exponent is not None and _is_shifted(exponent[0]) else None


def _is_shifted(x: Value) -> bool:
    node = x.producer
    if node is None or node.op != "aten.sub.Tensor" or node.inputs[1] is None:
        return False
    row = node.inputs[1].producer
    return (
        row is not None
        and row.op in ("aten.amax", "aten.max.dim")
        and (row.inputs[0] is node.inputs[0])
    )


def _exponent(value: Value) -> tuple[Value, Value | None, bool] | None:
    """(x, predicate, keep) where the value is exp(x), or zero where the predicate isn't `keep`."""
    node = value.producer
    if node is None:
        return None
    if node.op == _EXP:
        source = node.inputs[0]
        return None if source is None else (source, None, True)
    if is_cast(node) and node.inputs[0] is not None and node.inputs[0].dtype == value.dtype:
        return _exponent(node.inputs[0])
    if (filling := fill_of(node)) is not None and filling[3] == 0.0:
        inner = _exponent(filling[0])
        if inner is None or inner[1] is not None or filling[0].shape != value.shape:
            return None
        return inner[0], filling[1], filling[2]
    if node.op == "aten.mul.Tensor":
        for index in (0, 1):
            side, other = node.inputs[index], node.inputs[1 - index]
            cast = other.producer if other is not None else None
            inner = _exponent(side) if side is not None else None
            if side is None or other is None or inner is None or inner[1] is not None:
                continue
            if side.shape != value.shape:
                continue
            if cast is not None and is_cast(cast) and cast.inputs[0] is not None:
                if cast.inputs[0].dtype == torch.bool:
                    return inner[0], cast.inputs[0], True
            elif is_binary(other):
                return inner[0], other, True
    return None


def _softmax(build: Builder, terms: Value, dim: int) -> Value | None:
    exponent = _exponent(terms)
    if exponent is None:
        return None
    x, predicate, keep = exponent
    if predicate is not None:
        if predicate.dtype != torch.bool:
            predicate = build("aten._to_copy", predicate, dtype=torch.bool)
        low = build.constant(torch.tensor(-torch.inf, dtype=x.dtype), "masked")
        choices = (x, low) if keep else (low, x)
        x = build("aten.where.self", predicate, *choices)
    return build("aten.softmax.int", x, dim=dim)


def _raise_log(build: Builder, checked: Checked, node: Node) -> None:
    """exp(x − logsumexp(x)) and exp(log_softmax(x))."""
    source = node.inputs[0]
    inner = source.producer if source is not None else None
    if inner is None:
        return
    if inner.op in ("aten.log_softmax.int", "aten._log_softmax"):
        x, dim = inner.inputs[0], attribute(inner, "dim")
    elif inner.op == "aten.sub.Tensor" and attribute(inner, "alpha") == 1:
        x, total = inner.inputs
        norm = total.producer if total is not None else None
        if norm is None or norm.op != "aten.logsumexp" or norm.inputs[0] is not x:
            return
        dims = attribute(norm, "dim")
        if len(dims) != 1 or not attribute(norm, "keepdim"):
            return
        dim = dims[0]
    else:
        return
    if x is None or x.dtype != node.output.dtype:
        return
    build.at(node, fuse_locs([node, inner], node))
    checked.replace([(node.output, build("aten.softmax.int", x, dim=dim))])


def _raise_quotient(
    build: Builder,
    checked: Checked,
    node: Node,
    numerator: Value,
    denominator: Value,
    *,
    late: bool,
) -> bool:
    """Whether the normalisation was late, and came first instead."""
    shape = node.output.shape
    axes = fresh_axes(shape)
    total = _total(Operand(denominator, broadcast_axes(axes, denominator.shape, shape)))
    if total is None or _exponent(total.terms) is None:
        return False
    top = Operand(numerator, broadcast_axes(axes, numerator.shape, shape))
    if numerator is total.terms:
        if _rows(top.axes, total.dim) != _rows(total.axes, total.dim):
            return False
        build.at(node, fuse_locs([node], node))
        softmax = _softmax(build, total.terms, total.dim)
        if softmax is not None and softmax.dtype == node.output.dtype:
            checked.replace([(node.output, softmax)])
        return False
    return late and _raise_late(build, checked, node, top, total)


def _rows(axes: Axes, dim: int) -> tuple[tuple[object, ...], ...]:
    return tuple(resolve(index) for position, index in enumerate(axes) if position != dim)


def _path(operand: Operand, goal: Value) -> tuple[Operand, list[Node]] | None:
    """Climbs layout ops from an operand to `goal`."""
    passed: list[Node] = []
    while operand.value is not goal:
        above = climb(operand)
        if above is None or operand.value.producer is None:
            return None
        passed.append(operand.value.producer)
        operand = above
    return operand, passed


def _raise_late(
    build: Builder, checked: Checked, node: Node, numerator: Operand, total: _Total
) -> bool:
    """(exp(x) · V) / Σ exp(x): the same product, of the softmax."""
    operand, above = numerator, numerator
    outer: list[Node] = []
    while above is not None and (producer := above.value.producer) is not None:
        operand = above
        product = read_contraction(producer, operand.axes)
        if product is not None:
            break
        outer.append(producer)
        following = climb(operand)
        if following is None:
            return False
        above = following
    else:
        return False
    if product.addends or product.factor != 1.0:
        return False
    root = operand.value.producer
    assert root is not None
    for side in (product.left, product.right):
        found = _path(side, total.terms)
        if found is None:
            continue
        reached, passed = found
        if resolve(reached.axes[total.dim]) != resolve(product.summed):
            continue
        if _rows(reached.axes, total.dim) != _rows(total.axes, total.dim):
            continue
        build.at(root, fuse_locs([node, root], root))
        softmax = _softmax(build, total.terms, total.dim)
        if softmax is None or softmax.dtype != total.terms.dtype:
            return False
        result = _again(build, root, side.value, _replay(build, passed, total.terms, softmax))
        for layout in reversed(outer):
            build.at(node)
            result = _again(build, layout, layout.inputs[0], result)
        return checked.replace([(node.output, result)])
    return False


def _again(build: Builder, node: Node, old: Value | None, new: Value) -> Value:
    """The same op with one input replaced."""
    inputs = [new if value is old else value for value in node.inputs]
    return build(node.op, *inputs, **node.attrs)


def _replay(build: Builder, path: Sequence[Node], start: Value, value: Value) -> Value:
    """The layout ops of a path, applied to another value."""
    previous = start
    for node in reversed(path):
        value = _again(build, node, previous, value)
        previous = node.outputs[0]
    return value
