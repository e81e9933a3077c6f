"""raise-softmax: a softmax spelled out in exponentials becomes one `aten.softmax`.

Read: exp(x) / Σ exp(x) (Bridle 1990), with the exponentials masked by zeros or not; exp(x −
logsumexp(x)); exp(log_softmax(x)); a softmax with one more column that is dropped, and with one
more in the denominator (sinks.py), or scaled afterwards by its share (sink_gate.py); and late
normalisation, (exp(x) · V) / Σ exp(x). The usual shift by the row's maximum stays in x: softmax
doesn't see it, and fuse-attention drops it.

Where masks may hide all keys of a row, the spellings part: hidden_rows.py tells which logits, if
any, have a softmax that is equal there too. Where none has, and no proof says that each row has a
key, the spelling stays.

Proof, for all sizes: each spelling is exp(x) over its sum along some axes, up to a number per row
that cancels; axes.py says that numerator and denominator are indexed by the same rows. So the
elements are those of the softmax wherever the spelling is finite, and where it isn't, in rows of
hidden keys, row_policy.py has compared the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attngraph.analysis.attention.exponentials import (
    EXP,
    NORM,
    SUM,
    Exponent,
    Total,
    read_exponent,
    read_total,
    reciprocal_of,
    same_rows,
    unshifted,
)
from attngraph.analysis.layout.axes import (
    Atom,
    Operand,
    climb,
    fresh_axes,
    resolve,
    sides_of,
    spread,
    top,
)
from attngraph.analysis.layout.contraction import read_contraction
from attngraph.analysis.masks.row_policy import SOFTMAX, Formula
from attngraph.analysis.values.scalars import number
from attngraph.ir import Builder, Graph, Node, Remark, Value
from attngraph.ir.dims import product
from attngraph.ir.loc import fuse_locs
from attngraph.ir.ops import attribute
from attngraph.ir.traits import EXPONENTIAL, LOG_SOFTMAX, MATMUL, MULTIPLICATIVE, PLAIN_SOFTMAX
from attngraph.passes.attention.hidden_rows import Settler
from attngraph.passes.attention.sink_gate import raise_sink_gate
from attngraph.passes.attention.sinks import raise_plus_one, raise_sink_column
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.trials import LOGITS

_SHIFTED = "The row's maximum is subtracted first, so that no exponential overflows."
_EARLY = "The weights are normalised before the values are summed, not after."


class RaiseSoftmax(GraphPass, name="raise-softmax", exact=False):
    """Turns softmaxes that are spelled out in exponentials into `aten.softmax`.

    With `exact_only`, not those that are normalised after the product with the values, or twice, or
    whose exponentials may overflow. `no_masked_rows` is the user's word that every query has a key.
    """

    exact_only: bool = False
    no_masked_rows: bool = False

    def run(self, graph: Graph) -> list[Remark]:
        build = Builder(graph)
        checked = Checked(graph, self.name, kinds=LOGITS, exact_only=self.exact_only)
        settler = Settler(checked, build, assume=self.no_masked_rows)
        for node in list(graph):
            if node.graph is None:
                continue
            if node.op in EXPONENTIAL and node.op != EXP:
                node = _natural(build, checked, node)
            if node.op == EXP:
                _raise_log(settler, node)
            elif _raise_sink(settler, node):
                continue
            elif (pair := _quotient(node)) is not None:
                _raise_quotient(settler, node, *pair)
        for node in list(graph):  # those that were just raised too
            if node.graph is not None and node.op in PLAIN_SOFTMAX:
                raise_sink_column(build, checked, node)
        return [*settler.remarks, *checked.remarks]


def _raise_sink(settler: Settler, node: Node) -> bool:
    is_raised = raise_plus_one(settler, node, _SHIFTED)
    return is_raised or raise_sink_gate(settler.build, settler.checked, node)


def _natural(build: Builder, checked: Checked, node: Node) -> Node:
    """exp(x · ln b) for bˣ, where a sum normalises it."""
    source = node.inputs[0]
    base = 2 if node.op == "aten.exp2" else number(attribute(node, "self"))
    if source is None or base is None or base <= 1 or not source.dtype.is_floating_point:
        return node
    if not any(user.op in MATMUL or user.op in (SUM, NORM) for user in node.output.users):
        return node
    build.at(node, node.loc)
    x = source if base == math.e else build("aten.mul.Scalar", source, other=math.log(base))
    power = build.node(EXP, x)
    return power if checked.replace([(node.output, power.output)], proved=True) else node


def _quotient(node: Node) -> tuple[Operand, Operand] | None:
    """(numerator, denominator) of a division or a product with a reciprocal."""
    if node.op not in MULTIPLICATIVE:
        return None
    left, right = sides_of(node, fresh_axes(node.output.shape))
    if node.op == "aten.div.Tensor":
        return left, right
    for numerator, other in ((left, right), (right, left)):
        inverse = top(other)
        bottom = reciprocal_of(inverse.value.producer)
        if bottom is not None:
            return numerator, Operand(bottom, inverse.axes)
    return None


def _softmax(settler: Settler, node: Node, total: Total) -> Value | None:
    """The softmax that is equal to the terms of a sum over it in every row."""
    build, dims = settler.build, total.dims
    exponent = read_exponent(total.terms, dims)
    if exponent is None or dims != tuple(range(dims[0], dims[-1] + 1)):
        return None
    x, shift = unshifted(exponent.x, dims)
    formula = Formula(shift, total.how, normalised=exponent.is_normalised)
    predicate, keep = exponent.predicate, exponent.keep
    graph = settler.checked.graph
    latest = graph.created
    if exponent.triangle is not None:
        ones = build("aten.full", size=list(x.shape[-2:]), fill_value=True, dtype=torch.bool)
        predicate = build(exponent.triangle.op, ones, **exponent.triangle.attrs)
    settled = settler.settle(node, x, dims, formula, predicate, keep)
    if settled is None:
        for made in [one for one in reversed(graph) if one.number > latest]:
            graph.erase(made)
        return None
    x = exponent.x if settled is x else settled
    if predicate is not None:
        predicate = build.cast(predicate, torch.bool)
        low = build.constant(torch.tensor(-torch.inf, dtype=x.dtype), "masked")
        x = build("aten.where.self", predicate, *((x, low) if keep else (low, x)))
    if len(dims) == 1:
        return build("aten.softmax.int", x, dim=dims[0])
    shape = list(x.shape)
    joined = [*shape[: dims[0]], product(shape[dims[0] : dims[-1] + 1]), *shape[dims[-1] + 1 :]]
    flat = build("aten.reshape", x, shape=joined)
    return build("aten.reshape", build("aten.softmax.int", flat, dim=dims[0]), shape=shape)


def _raise_log(settler: Settler, node: Node) -> None:
    """exp(x − logsumexp(x)) and exp(log_softmax(x))."""
    source = node.inputs[0]
    inner = source.producer if source is not None else None
    if inner is None:
        return
    formula = SOFTMAX
    if inner.op in LOG_SOFTMAX:
        x, dim = inner.inputs[0], attribute(inner, "dim")
    elif inner.op == "aten.sub.Tensor" and attribute(inner, "alpha") == 1:
        x, total = inner.inputs
        found = None if x is None or total is None else _log_normaliser(x, total, inner)
        if found is None:
            return
        dim, formula = found
    else:
        return
    what = _SHIFTED * formula.may_overflow
    if x is None or x.dtype != node.output.dtype or not settler.checked.allows(what):
        return
    build = settler.build.at(node, fuse_locs([node, inner], node))
    settled = settler.settle(node, x, (dim % len(x.shape),), formula)
    if settled is not None:
        settler.replace(node, build("aten.softmax.int", settled, dim=dim), what)


def _log_normaliser(x: Value, total: Value, difference: Node) -> tuple[int, Formula] | None:
    """The dim over which `total` is log Σ exp(x), broadcast along it, and how that is written."""
    formula = Formula(total="exponent")
    axes = fresh_axes(difference.output.shape)
    if x.shape != difference.output.shape:
        return None
    log = top(spread(total, axes, difference.output.shape))
    node = log.value.producer
    if node is None or not node.inputs or node.inputs[0] is None:
        return None
    if node.op == "aten.logsumexp" and node.inputs[0] is x:
        dims = tuple(dim % len(x.shape) for dim in attribute(node, "dim"))
        rows = log.axes
        if len(dims) == 1 and not attribute(node, "keepdim"):
            rows = (*rows[: dims[0]], (), *rows[dims[0] :])
    elif node.op == "aten.log":
        reduced = read_total(Operand(node.inputs[0], log.axes))
        exponent = None if reduced is None else read_exponent(reduced.terms, reduced.dims)
        if reduced is None or exponent != Exponent(x):
            return None
        dims, rows, formula = reduced.dims, reduced.axes, Formula(total="summed")
    else:
        return None
    return (dims[0], formula) if len(dims) == 1 and same_rows(rows, axes, dims) else None


def _raise_quotient(settler: Settler, node: Node, numerator: Operand, denominator: Operand) -> None:
    """Reassociates a normalisation that is late, a second one, and exponentials without a shift."""
    total = read_total(denominator)
    exponent = None if total is None else read_exponent(total.terms, total.dims)
    if total is None or exponent is None:
        return
    may_overflow = not exponent.is_normalised and not unshifted(exponent.x, total.dims)[1]
    second = "The weights are normalised once, under the mask, and not again."
    what = second if exponent.is_normalised else _SHIFTED * may_overflow
    if not settler.checked.allows(what):
        return
    if numerator.value is total.terms:
        if not same_rows(numerator.axes, total.axes, total.dims):
            return
        settler.build.at(node, fuse_locs([node], node))
        softmax = _softmax(settler, node, total)
        if softmax is not None and softmax.dtype == node.output.dtype:
            settler.replace(node, softmax, what)
    elif len(total.dims) == 1 and settler.checked.allows(_EARLY):
        _raise_late(settler, node, numerator, total)


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


def _raise_late(settler: Settler, node: Node, numerator: Operand, total: Total) -> bool:
    """(exp(x) · V) / Σ exp(x): the same product, of the softmax."""
    build, operand, above = settler.build, numerator, numerator
    outer: list[Node] = []
    while above is not None and (producer := above.value.producer) is not None:
        operand = above
        summed = read_contraction(producer, operand.axes)
        if summed is not None:
            break
        outer.append(producer)
        following = climb(operand) or _before_slice(operand)
        if following is None:
            return False
        above = following
    else:
        return False
    if summed.addends or summed.factor != 1.0:
        return False
    root = operand.value.producer
    assert root is not None
    for side in (summed.left, summed.right):
        found = _path(side, total.terms)
        if found is None:
            continue
        reached, passed = found
        if resolve(reached.axes[total.dims[0]]) != resolve(summed.summed):
            continue
        if not same_rows(reached.axes, total.axes, total.dims):
            continue
        factors = None  # of a sum, the product that it is taken of
        if side.value not in root.inputs:
            factors = root.inputs[0].producer if root.inputs[0] is not None else None
            if factors is None or side.value not in factors.inputs:
                continue
        build.at(root, fuse_locs([node, root], root))
        softmax = _softmax(settler, node, total)
        if softmax is None or softmax.dtype != total.terms.dtype:
            return False
        given = _replay(build, passed, total.terms, softmax)
        result = given if factors is None else build.again(factors, side.value, given)
        result = build.again(root, root.inputs[0] if factors else side.value, result)
        for layout in reversed(outer):
            build.at(node)
            result = build.again(layout, layout.inputs[0], result)
        return settler.replace(node, result, _EARLY)
    return False


def _before_slice(operand: Operand) -> Operand | None:
    """What was sliced; the index along that dim is another one."""
    node = operand.value.producer
    source = node.inputs[0] if node is not None and node.op == "aten.slice.Tensor" else None
    if node is None or source is None:
        return None
    dim = attribute(node, "dim") % len(source.shape)
    axes = [(Atom(source.shape[dim]),) if i == dim else a for i, a in enumerate(operand.axes)]
    return Operand(source, tuple(axes))


def _replay(build: Builder, path: Sequence[Node], start: Value, value: Value) -> Value:
    """The layout ops of a path, applied to another value."""
    previous = start
    for node in reversed(path):
        value = build.again(node, previous, value)
        previous = node.outputs[0]
    return value
