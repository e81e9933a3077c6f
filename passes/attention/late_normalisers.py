"""Weights that are normalised before they meet values, written the other way round.

(s / d) v = (s v) / d where d is one number for each row, as the sum of scores is that linear
attention is divided by. s v may then be a recurrence, which no query over d is.
"""

from __future__ import annotations

from collections.abc import Iterator

from attngraph.analysis.layout.contraction import einsum_terms
from attngraph.analysis.values.intervals import Intervals
from attngraph.analysis.walks import stripped
from attngraph.ir import Builder, Graph, Node, Value
from attngraph.ir.dims import same_shape
from attngraph.ir.traits import (
    ADDITIVE,
    LAYOUT,
    MATMUL,
    MULTIPLICATIVE,
    POINTWISE,
    RECIPROCAL,
    SHIFT,
)


def late_normalisers(graph: Graph) -> Iterator[tuple[Value, tuple[Value, Value]]]:
    """Each s v, new in the graph and read by nothing but the second of a pair; (s / d) v is the
    first of the pair, and stays unless the caller replaces it.
    """
    for node in list(graph):
        weights = node.inputs[0].producer if _sums_last(node) and node.inputs[0] else None
        if weights is None or weights.op not in MULTIPLICATIVE:
            continue
        scores, factor = weights.operands
        if weights.op == "aten.mul.Tensor" and scores.shape[-1:] == (1,):
            scores, factor = factor, scores
        if not same_shape(scores.shape, weights.output.shape):
            continue
        if len(factor.shape) != len(scores.shape) or factor.shape[-1] != 1:
            continue
        if _may_be_cut_to_0(factor):
            continue  # infinite weights, whose sum with values of both signs is NaN
        build = Builder(graph, node, node.loc)
        numerator = build(node.op, scores, *node.inputs[1:], **node.attrs)
        yield numerator, (node.output, build(weights.op, numerator, factor, **weights.attrs))


def _may_be_cut_to_0(value: Value) -> bool:
    """Whether a clamp, a ReLU or a mask may have made a 0 of it, which no sum of scores is then."""
    value = stripped(value, LAYOUT | RECIPROCAL)
    node = value.producer
    if node is None or node.op not in POINTWISE or node.op in ADDITIVE | SHIFT:
        return False
    return Intervals().of(value)[0] <= 0


def _sums_last(node: Node) -> bool:
    """Whether it sums over its first operand's last axis, and keeps the others in front."""
    if node.op == "aten.einsum":
        terms, output = einsum_terms(node)
        first = terms[0]
        return len(terms) == 2 and first[:-1] == output[:-1] and first[-1] not in output
    left = node.inputs[0] if node.op in MATMUL else None
    return left is not None and len(left.shape) == len(node.output.shape)
