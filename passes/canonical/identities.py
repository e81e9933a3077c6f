"""Rules for elementwise ops that compute nothing new: neutral elements, double negation."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any

import torch

from attngraph.analysis.values.matching import same_type
from attngraph.analysis.values.scalars import uniform
from attngraph.ir import Node, TensorType, Value
from attngraph.ir.ops import attribute, inputs_of
from attngraph.ir.traits import COMPLEMENT, RESHAPE
from attngraph.passes.rewriting.rewriter import Replacement, Rewriter, rule


@rule("aten.pad", "aten.constant_pad_nd")
def padded_by_nothing(rewriter: Rewriter, node: Node) -> Replacement:
    """Zero elements more on each side."""
    return node.source if all(amount == 0 for amount in attribute(node, "pad")) else None


@rule("aten.pad")
def padded_twice(rewriter: Rewriter, node: Node) -> Replacement:
    """Padding of padding with the same number."""
    inner = node.source.producer
    if inner is None or inner.op != node.op or inner.attrs.keys() != node.attrs.keys():
        return None
    if any(str(inner.attrs[name]) != str(node.attrs[name]) for name in node.attrs if name != "pad"):
        return None
    mine, its = attribute(node, "pad"), attribute(inner, "pad")
    if attribute(node, "mode") != "constant":
        return None
    if not all(isinstance(amount, int) and amount >= 0 for amount in [*mine, *its]):
        return None
    amounts = zip_longest(mine, its, fillvalue=0)
    attrs = {**node.attrs, "pad": [one + other for one, other in amounts]}
    return rewriter.emit(node.op, [inner.source], attrs, at=node, fused=[inner])


def _number(node: Node, name: str) -> Any:
    """The other operand where it is one number: an attribute, or a constant of one element."""
    if name in node.attrs:
        return node.attrs[name]
    other = node.inputs[1] if len(node.inputs) > 1 else None
    return None if other is None else _element(other)


def _element(value: Value) -> Any:
    data = value.data
    return data.item() if data is not None and not data.is_meta and data.numel() == 1 else None


def _only(node: Node, source: Value | None) -> Value | None:
    """`source` where it has the type of the result: no broadcast and no promotion is lost."""
    return source if source is not None and same_type(source, node.output) else None


@rule("aten.mul.Tensor", "aten.mul.Scalar")
def times_one(rewriter: Rewriter, node: Node) -> Replacement:
    """x · 1 and 1 · x."""
    if _number(node, "other") == 1:
        return _only(node, node.inputs[0])
    if len(node.inputs) > 1 and _element(node.source) == 1:  # a number that scales is no value
        return _only(node, node.inputs[1])
    return None


@rule("aten.div.Tensor", "aten.div.Scalar")
def over_one(rewriter: Rewriter, node: Node) -> Replacement:
    """x / 1."""
    return _only(node, node.inputs[0]) if _number(node, "other") == 1 else None


@rule("aten.pow.Tensor_Scalar")
def power_of_one(rewriter: Rewriter, node: Node) -> Replacement:
    """x¹."""
    return _only(node, node.inputs[0]) if attribute(node, "exponent") == 1 else None


@rule("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar")
def plus_zero(rewriter: Rewriter, node: Node) -> Replacement:
    """x + 0 and x − 0. In floating point −0 + 0 is +0, so there the zero's sign must be right."""
    if attribute(node, "alpha") != 1:
        return None
    adds = node.op.startswith("aten.add")
    if _is_neutral(_number(node, "other"), node.output.dtype, negative=adds):
        return _only(node, node.inputs[0])
    is_zero = _is_neutral(_element(node.source), node.output.dtype, negative=True)
    if adds and is_zero and len(node.inputs) > 1:  # a number that is added is no value
        return _only(node, node.inputs[1])
    return None


def _is_neutral(number: Any, dtype: torch.dtype, *, negative: bool) -> bool:
    if not isinstance(number, (int, float)) or number != 0 or dtype.is_complex:
        return False
    return not dtype.is_floating_point or (math.copysign(1.0, number) < 0) == negative


@rule("aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and")
def and_true(rewriter: Rewriter, node: Node) -> Replacement:
    """x & true, for bools."""
    return _beside(node, True)


@rule("aten.__or__.Tensor", "aten.bitwise_or.Tensor", "aten.logical_or")
def or_false(rewriter: Rewriter, node: Node) -> Replacement:
    """x | false, for bools."""
    return _beside(node, False)


def _beside(node: Node, neutral: bool) -> Value | None:
    left, right = node.source, node.inputs[1]
    if right is not None and _element(right) is neutral:
        return _only(node, left)
    return _only(node, right) if _element(left) is neutral else None


@rule("aten.index_put")
def assigned_under_mask(rewriter: Rewriter, node: Node) -> Replacement:
    """x[:, mask] = number, with one bool mask over neighbouring axes."""
    x, indices, values = inputs_of(node, "self", "indices", "values")
    masks = [index for index in indices if index is not None]
    if attribute(node, "accumulate") or len(masks) != 1 or indices[-1] is None:
        return None
    (mask,) = masks
    if mask.dtype != torch.bool or values.tensor_type.numel != 1 or values.dtype != x.dtype:
        return None
    after = len(x.shape) - (len(indices) - 1) - len(mask.shape)
    shape = [*mask.shape, *[1] * after]
    types = [TensorType(torch.bool, tuple(shape))]
    (spread,) = rewriter.emit("aten.reshape", [mask], {"shape": shape}, at=node, types=types)
    (number,) = rewriter.emit(
        "aten.reshape", [values], {"shape": []}, at=node, types=[TensorType(x.dtype, ())]
    )
    return rewriter.emit("aten.where.self", [spread, number, x], {}, at=node, types=[x.type])


@rule("aten.neg", "aten.bitwise_not", "aten.logical_not")
def double_negation(rewriter: Rewriter, node: Node) -> Replacement:
    """−(−x), ~~x, and not not x of a bool, for which both kinds of not are one, and the same with
    a reshape between the two.
    """
    source = node.source
    reshaped = source.producer if source.producer and source.producer.op in RESHAPE else None
    inner = source.producer if reshaped is None else reshaped.source.producer
    if inner is None or inner.op not in (COMPLEMENT if source.dtype == torch.bool else (node.op,)):
        return None
    if reshaped is None:
        return _only(node, inner.source)
    if inner.source.dtype != node.output.dtype:  # of a number
        return None
    attrs = {"shape": list(node.output.shape)}
    return rewriter.emit("aten.reshape", [inner.source], attrs, at=node, fused=[reshaped])


@rule("aten.where.self")
def where_of_one(rewriter: Rewriter, node: Node) -> Replacement:
    """where(c, x, x), and x or y where c is known and the same everywhere."""
    condition, chosen, other = node.inputs
    if chosen is other:
        return _only(node, chosen)
    known = uniform(condition)
    return None if known is None else _only(node, chosen if known else other)


IDENTITIES = [
    padded_by_nothing,
    padded_twice,
    times_one,
    over_one,
    power_of_one,
    plus_zero,
    and_true,
    or_false,
    assigned_under_mask,
    double_negation,
    where_of_one,
]
