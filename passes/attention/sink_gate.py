"""A sink applied after the values: softmax(x) V · sigmoid(logsumexp(x) − s).

That gate is the share that the keys have next to one more logit s, so the product is the attention
with the sink s.
"""

from __future__ import annotations

import math

from attngraph.analysis.layout.axes import (
    Axes,
    Operand,
    climb,
    fresh_axes,
    resolve,
    sides_of,
)
from attngraph.analysis.layout.contraction import read_contraction
from attngraph.analysis.masks.terms import magnitude
from attngraph.analysis.values.scalars import is_cast, scale_of, widens
from attngraph.ir import Builder, Dim, Node, Value
from attngraph.ir.loc import fuse_locs
from attngraph.ir.ops import attribute
from attngraph.ir.traits import PLAIN_SOFTMAX
from attngraph.passes.rewriting.checked import Checked


def raise_sink_gate(build: Builder, checked: Checked, node: Node) -> bool:
    """Whether the product `node` was such a gate: the sink is in the softmax now."""
    if node.op != "aten.mul.Tensor":
        return False
    axes = fresh_axes(node.output.shape)
    sides = sides_of(node, axes)
    for context, gate in ((sides[0], sides[-1]), (sides[-1], sides[0])):
        softmax = _softmax(context)
        if softmax is None or context.value.shape != node.output.shape:
            continue
        anchor, rows, dim = softmax
        found = _gate(gate, anchor.inputs[0])
        if found is None or context.value.dtype != node.output.dtype:
            continue
        test, sink, of_rows = found
        if [resolve(d) for d in of_rows] != [resolve(d) for d in rows]:
            continue
        chain = _chain(anchor.output, context.value)
        returned = set(checked.graph.outputs)
        if any(value in returned for link in chain for value in link.inputs):
            continue
        x = anchor.source
        # after all that the values and the sink are made of
        build.at(node, fuse_locs([anchor, test, node], anchor))
        column = _column(build, sink, [*x.shape[:dim], 1, *x.shape[dim + 1 :]], dim)
        raised = build.cast(build("attn.sink_softmax", x, column, dim=dim), anchor.output.dtype)
        before = anchor.output
        for link in chain:
            before, raised = link.output, build.again(link, before, raised)
        return checked.replace([(node.output, raised)])
    return False


def _above(operand: Operand, *, alone: bool) -> Operand:
    """Past casts and layouts; only past values that nothing else reads, if `alone`.

    Those are computed again from the new weights, so casts to fewer bits are passed there too.
    """
    while not alone or len(operand.value.users) == 1:
        node = operand.value.producer
        is_passed = node is not None and (is_cast(node) if alone else widens(node))
        if node is not None and is_passed and node.inputs[0] is not None:
            operand = Operand(node.inputs[0], operand.axes)
        elif (above := climb(operand)) is not None:
            operand = above
        else:
            break
    return operand


def _softmax(context: Operand) -> tuple[Node, Axes, int] | None:
    """The softmax that weighs the values, the axes of its rows, and its axis."""
    product = _above(context, alone=True)
    node = product.value.producer
    if node is None or len(product.value.users) != 1 or len(node.outputs) != 1:
        return None
    contraction = read_contraction(node, product.axes)
    if contraction is None or contraction.addends or contraction.factor != 1.0:
        return None
    for side in (contraction.left, contraction.right):
        weights = _above(side, alone=True)
        anchor = weights.value.producer
        if anchor is None or anchor.op not in PLAIN_SOFTMAX or len(weights.value.users) != 1:
            continue
        dim = attribute(anchor, "dim") % len(weights.value.shape)
        is_summed = resolve(weights.axes[dim]) == resolve(contraction.summed)
        if is_summed and _bounded(anchor.inputs[0]):
            return anchor, (*weights.axes[:dim], *weights.axes[dim + 1 :]), dim
    return None


def _bounded(logits: Value | None) -> bool:
    """Whether no row of the logits is all -inf: there the gate makes NaN, and a sink zero."""
    while logits is not None and (node := logits.producer) is not None:
        if is_cast(node) or (node.op != "aten.add.Tensor" and scale_of(node) is not None):
            logits = node.inputs[0]
        elif node.op == "aten.add.Tensor":
            sides = node.operands
            open_ones = [value for value in sides if math.isinf(magnitude(value))]
            logits = open_ones[0] if len(open_ones) == 1 else None
        else:
            return read_contraction(node, fresh_axes(logits.shape)) is not None
    return False


def _gate(gate: Operand, logits: Value | None) -> tuple[Node, Value, Axes] | None:
    """(the sigmoid, s, the axes of its rows) of sigmoid(logsumexp(logits) − s)."""
    outer = _above(gate, alone=False)
    sigmoid = outer.value.producer
    if sigmoid is None or sigmoid.op != "aten.sigmoid" or sigmoid.inputs[0] is None:
        return None
    inner = _above(Operand(sigmoid.inputs[0], outer.axes), alone=False)
    shape = inner.value.shape
    difference = inner.value.producer
    if difference is None or difference.op != "aten.sub.Tensor":
        return None
    total, sink = difference.inputs
    if total is None or sink is None or attribute(difference, "alpha") != 1:
        return None
    node = total.producer
    if node is None or node.op != "aten.logsumexp" or node.inputs[0] is not logits:
        return None
    dims = attribute(node, "dim")
    if len(dims) != 1 or total.shape != shape or logits is None:
        return None
    dim = dims[0] % len(logits.shape)
    rows = inner.axes
    if attribute(node, "keepdim"):
        rows = (*rows[:dim], *rows[dim + 1 :])
        if len(sink.shape) == len(shape):
            return sigmoid, sink, rows
        return None
    return sigmoid, sink, rows


def _column(build: Builder, sink: Value, column: list[Dim], dim: int) -> Value:
    """The sink, one per row, with size 1 at `dim`."""
    if len(sink.shape) == len(column):
        return sink
    lead = len(column) - 1 - len(sink.shape)
    shape: list[Dim] = [1] * lead + list(sink.shape)
    return build("aten.reshape", sink, shape=[*shape[:dim], 1, *shape[dim:]])


def _chain(weights: Value, context: Value) -> list[Node]:
    """The nodes on the one way from the weights to the context, in that order."""
    found, value = [], weights
    while value is not context:
        found.append(value.users[0])
        value = found[-1].output
    return found
