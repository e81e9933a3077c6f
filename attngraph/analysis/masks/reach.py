"""How low the terms of logits may be: which can hide keys, which are as finite as scores are.

A mask hides a key by a number below every score. Intervals prove how low a value may be where the
numbers in it are known; of activations nothing is known, and these readings take them for moderate.
"""

from __future__ import annotations

import math

import torch

from attngraph.analysis.layout.axes import fresh_axes
from attngraph.analysis.layout.contraction import read_contraction
from attngraph.analysis.masks.row_policy import WEAKEST_FILL
from attngraph.analysis.values.intervals import Intervals
from attngraph.analysis.values.scalars import number, scale_of, shift_of, widens
from attngraph.ir import Node, TensorType, Value
from attngraph.ir.traits import (
    ACTIVATION,
    ADDITION,
    ADDITIVE,
    ANY_CONVOLUTION,
    ATTENTION,
    CAST,
    CHOICE,
    CLAMP,
    COMMUTATIVE,
    CONVOLUTION,
    COPY,
    EMBEDDING,
    EXPAND,
    FEATURE_NORM,
    FILL,
    GATHER,
    JOIN,
    LAYOUT,
    LINEAR,
    LOG_SUM,
    LOGARITHM,
    MAGNITUDE,
    MATMUL,
    NEGATION,
    NORM,
    PAD,
    PERMUTE,
    PRODUCT,
    RANGE,
    REPEAT,
    RESHAPE,
    ROLL,
    SELECT,
    SHIFT,
    SLICE,
    SOFTMAX,
    TRIANGLE,
    WAVE,
)

_DEPTH = 64
_NUMBERS = ("other", "value", "self", "min", "max", "fill_value", "s", "alpha", "end", "start")
_UNBOUNDED = LOGARITHM | LOG_SUM  # near zero, or over no elements
_ACTIVATIONS = MATMUL | LINEAR | ANY_CONVOLUTION | NORM | SOFTMAX | ATTENTION | EMBEDDING | RANGE
# Numbers this large leave room for a few products before they come near the lowest float.
_LARGE = 1e12
_LARGE_HALF = 100.0
_BOUNDED = (  # for bounded operands, a product with a number too, a quotient by weights from 1 on
    RESHAPE | COPY | PERMUTE | EXPAND | REPEAT | SELECT | SLICE | CAST | GATHER | JOIN | CHOICE
    | FILL | RANGE | TRIANGLE | CLAMP | ADDITION | NEGATION | MAGNITUDE
    | COMMUTATIVE
)  # fmt: skip
_COMPUTED = (  # for finite activations, which a float graph input is not known to be
    PRODUCT | CONVOLUTION | FEATURE_NORM | SOFTMAX | ACTIVATION | WAVE
)
_CARRYING = LAYOUT | GATHER | ROLL | NEGATION | ADDITIVE | JOIN | PAD


def may_hide(value: Value) -> bool:
    """Whether a term that is added to logits may be so low in places that it hides keys there."""
    return not Moderates().holds(value, is_logits=False)


class Moderates:
    """Finds values that hide no key, taking it that activations don't; each is looked at once.

    A float input is a bias of a caller if it is added to logits, and logits if it is all there is.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Value, bool], bool] = {}

    def holds(self, value: Value, *, is_logits: bool, depth: int = _DEPTH) -> bool:
        """Whether no element can be as low as a fill."""
        key = value, is_logits
        if key not in self._known:
            self._known[key] = False  # a graph has no cycles: only a search that is too deep asks
            self._known[key] = self._find(value, is_logits, depth)
        return self._known[key]

    def _find(self, value: Value, is_logits: bool, depth: int) -> bool:
        if not isinstance(value.type, TensorType) or not value.dtype.is_floating_point:
            return True
        node = value.producer
        if Intervals().largest(value) < -WEAKEST_FILL:
            return True
        if node is None:
            return is_logits and not value.is_constant
        if depth == 0 or node.op in _UNBOUNDED or node.op == "aten.reciprocal":
            return False
        if not node.op.startswith("aten.") or _is_activation(node):
            return True
        numbers = (number(node.attrs.get(name)) for name in _NUMBERS)
        is_layout = node.op in LAYOUT  # whose numbers are places
        if not is_layout and any(n is not None and not abs(n) < -WEAKEST_FILL for n in numbers):
            return False
        is_logits &= node.op != "aten.add.Tensor"
        inputs = node.operands
        return all(self.holds(v, is_logits=is_logits, depth=depth - 1) for v in inputs)


def _is_activation(node: Node) -> bool:
    """Whether a node's results are activations, whatever it reads: a product, a norm, a softmax."""
    if node.op in _ACTIVATIONS:
        return True
    if len(node.outputs) != 1 or not isinstance(node.outputs[0].type, TensorType):
        return False
    product = read_contraction(node, fresh_axes(node.output.shape))
    return product is not None and not product.addends and bool(product.summed)


def is_scorelike(value: Value, depth: int = _DEPTH) -> bool:
    """Whether all of it is products over features, laid out, added or scaled down, or bounded.

    Such a term is as finite as the scores are: what it adds hides no key.
    """
    node = value.producer
    if math.isfinite(Intervals().largest(value)):
        return True
    if node is None or depth == 0:
        return False
    product = read_contraction(node, fresh_axes(node.output.shape)) if _is_single(node) else None
    if product is not None and not product.addends:
        return any(isinstance(atom.size, int) for atom in product.summed)
    scaling = scale_of(node)
    if scaling is not None:
        return abs(scaling[1]) <= 1 and is_scorelike(scaling[0], depth - 1)
    inputs = node.operands
    if node.op == "aten.mul.Tensor":
        bounds = [Intervals().largest(source) for source in inputs]
        return min(bounds) <= 1 and is_scorelike(inputs[bounds.index(max(bounds))], depth - 1)
    if node.op in PAD and not _pads_finitely(node):
        return False
    if node.op in SHIFT:
        shift = shift_of(node)
        return shift is not None and math.isfinite(shift) and is_scorelike(inputs[0], depth - 1)
    passes_on = node.op in _CARRYING or widens(node)
    return passes_on and all(is_scorelike(source, depth - 1) for source in inputs)


def _pads_finitely(node: Node) -> bool:
    return math.isfinite(number(node.attrs.get("value")) or 0.0)


def _is_single(node: Node) -> bool:
    return len(node.outputs) == 1 and isinstance(node.outputs[0].type, TensorType)


def is_bounded(value: Value, limit: float | None = None, depth: int = _DEPTH) -> bool:
    """Whether every element is provably far from the lowest float, and none is NaN.

    Weights are looked at; activations count as finite; a float graph input may hold anything.
    `limit` bounds the numbers that it is made of; by default as its own dtype needs.
    """
    if not value.dtype.is_floating_point:
        return True
    if limit is None:
        limit = _LARGE_HALF if value.dtype == torch.float16 else _LARGE
    if value.data is not None:
        return bool(value.data.numel() == 0 or value.data.abs().max() < limit)
    node = value.producer
    if node is None or depth == 0:
        return False
    if node.op in _COMPUTED:
        return True
    if node.op == "aten.div.Tensor":
        divided, divisor = node.inputs[:2]
        by = None if divisor is None else divisor.data
        if divided is None or by is None or not bool((by.abs() >= 1).all()):
            return False
        return is_bounded(divided, limit, depth - 1)
    if node.op not in _BOUNDED and node.op != "aten.mul.Scalar":
        return False
    numbers = [node.attrs[name] for name in _NUMBERS if name in node.attrs]
    if any(isinstance(n, (int, float)) and not abs(n) < limit for n in numbers):
        return False
    operands = node.operands
    return all(is_bounded(operand, limit, depth - 1) for operand in operands)
