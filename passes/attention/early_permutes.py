"""A permutation of what is broadcast to its size, as permutations of the smaller operands."""

from __future__ import annotations

from attngraph.analysis.layout.contraction import einsum_terms
from attngraph.ir import Builder, Node, Value
from attngraph.ir.dims import same_shape
from attngraph.ir.ops import attribute
from attngraph.ir.traits import POINTWISE


def permuted(build: Builder, value: Value, order: list[int]) -> Value:
    """The value with its axes in that order: copied last of all, for it may be an outer product of
    operands that are much smaller, as the decays of a state for each channel are.
    """
    while (node := value.producer) is not None and node.op == "aten.permute" and node.inputs[0]:
        value, order = node.inputs[0], [attribute(node, "dims")[at] for at in order]
    if order == sorted(order):
        return value
    if node is None or not _is_outer(value):
        return build("aten.permute", value, dims=order)
    if node.op == "aten.einsum":
        terms, output = einsum_terms(node)
        equation = f"{','.join(terms)}->{''.join(output[at] for at in order)}"
        return build(node.op, *node.inputs, equation=equation)
    operands = (None if each is None else permuted(build, each, order) for each in node.inputs)
    return build(node.op, *operands, **node.attrs)


def _is_outer(value: Value) -> bool:
    """Whether pointwise ops make it of operands none of which is as large."""
    node = value.producer
    if node is None:
        return False
    if node.op == "aten.einsum":
        return _spreads(node)
    operands = node.operands
    if node.op not in POINTWISE or any(len(each.shape) != len(value.shape) for each in operands):
        return False
    return all(not same_shape(each.shape, value.shape) or _is_outer(each) for each in operands)


def _spreads(node: Node) -> bool:
    terms, output = einsum_terms(node)
    return {*output} == {*"".join(terms)} and all(len({*term}) < len(output) for term in terms)
