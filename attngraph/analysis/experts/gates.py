"""Gates: weights of a mixture with a number for every expert, 0 for those that a row doesn't take.

A router may set the scores of all others to -inf in front of its softmax, or multiply what the
softmax gives with zeros and ones. Such a gate says no more than its numbers at the chosen places,
if each other one is 0 whatever the scores are. That is read here and not left to trials: -1e9 in
the place of -inf, say, is told from it by scores of that size only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch

from attngraph.analysis.experts.reading import Choice
from attngraph.analysis.values.scalars import converted, number, shift_of, uniform
from attngraph.analysis.walks import stripped
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute, input_of
from attngraph.ir.traits import (
    ADDITIVE,
    CAST,
    CHOICE,
    COMPARISON,
    COMPLEMENT,
    COPY,
    GATHERED,
    LAYOUT,
    MULTIPLICATIVE,
    NEGATION,
    ONE_HOT,
    RESHAPE,
    REVERSED,
    SCALE,
    SCATTER,
    SHIFT,
    SOFTMAX,
    SUM,
    TRUTH,
)

_DEEPEST = 24


def is_gate(choice: Choice, value: Value) -> bool:
    """Whether a value (…, experts) is 0 for each expert that a row doesn't take, at any scores."""
    return others_in(choice, value) == 0


def others_in(choice: Choice, value: Value, depth: int = 0) -> float | None:
    """The number that a value (…, experts) has for each expert that a row doesn't take; None where
    that isn't known.
    """
    if (same := uniform(value)) is not None:
        return same
    node = value.producer
    if node is None or depth > _DEEPEST or not value.shape or value.shape[-1] != choice.experts:
        return None

    def of(side: Value | None) -> float | None:
        return None if side is None else others_in(choice, side, depth + 1)

    first = node.inputs[0] if node.inputs else None
    if node.op in RESHAPE | COPY:
        return of(first)
    if node.op in CAST:
        found = of(first)
        return None if found is None else converted(found, value.dtype)
    if node.op in SCATTER:
        return of(first) if _is_of_choices(choice, node) else None
    if node.op in CHOICE:
        return _chosen(node, of)
    if node.op in COMPLEMENT:
        found = of(first) if value.dtype == torch.bool else None  # ~1 is -2
        return None if found is None else float(not found)
    if node.op in SOFTMAX:
        along = attribute(node, "dim") % len(value.shape) == len(value.shape) - 1
        return 0.0 if along and of(first) == -math.inf else None
    if node.op in SUM or (node.op in TRUTH and "any" in node.op):
        return 0.0 if _counts_choices(choice, node) else None
    if node.op in COMPARISON:
        return _compared(node, [of(side) for side in node.inputs])
    return _computed(node, [of(side) for side in node.inputs])


def _chosen(node: Node, of: Callable[[Value | None], float | None]) -> float | None:
    """`others_in` of `where(predicate, one, other)`."""
    if node.op != "aten.where.self":
        return None
    predicate, one, other = node.inputs
    is_one = of(predicate)
    if is_one is None:
        return None
    return of(one if is_one else other)


def _compared(node: Node, given: list[float | None]) -> float | None:
    """`others_in` of a comparison: 1 where it holds."""
    second = number(attribute(node, "other")) if len(given) == 1 else given[1]
    if given[0] is None or second is None:
        return None
    holds: Callable[[float, float], bool] = getattr(operator, node.op.split(".")[1])
    return float(holds(given[0], second))


def _computed(node: Node, given: list[float | None]) -> float | None:
    """`others_in` of products and sums."""
    if node.op in MULTIPLICATIVE:
        divides = "div" in node.op
        if given[0] == 0 or (given[1] == 0 and not divides):
            return 0.0
        return None
    if given[0] is None:
        return None
    if node.op in SCALE | SHIFT:
        other = number(attribute(node, "other"))
        if node.op in SHIFT:
            shift = shift_of(node)
            return None if shift is None else given[0] + shift
        if other is None:
            return None
        if "div" in node.op:
            return given[0] / other if other else None
        return given[0] * other
    if node.op in NEGATION:
        return -given[0]
    if node.op in ADDITIVE | REVERSED and "alpha" not in node.attrs:
        second = number(attribute(node, "other")) if len(given) == 1 else given[1]
        if second is None:
            return None
        if node.op in REVERSED:
            return second - given[0]
        return given[0] - second if "sub" in node.op else given[0] + second
    return None


def _is_of_choices(choice: Choice, node: Node) -> bool:
    """Whether a scatter writes at the places of the chosen experts and nowhere else."""
    if not node.op.startswith("aten.scatter"):
        return False
    rank = len(node.output.shape)
    along = attribute(node, "dim") % rank == rank - 1
    return along and is_choice(choice, input_of(node, "index"))


def is_choice(choice: Choice, value: Value | None) -> bool:
    """Whether a value is the places that were chosen, in the same order, in any shape."""
    while value is not None and value is not choice.indices:
        node = value.producer
        if node is None or node.op not in RESHAPE | COPY or value.shape[-1] != choice.count:
            return False
        value = node.inputs[0]
    return value is not None


def _counts_choices(choice: Choice, node: Node) -> bool:
    """Whether ones at the chosen places are added up over the choices of a row."""
    source = node.source
    dims, rank = attribute(node, "dim"), len(source.shape)
    listed = dims if isinstance(dims, (list, tuple)) else [dims]
    if not all(isinstance(dim, int) and dim % rank == rank - 2 for dim in listed):
        return False
    return is_one_hot(choice, source)


def is_one_hot(choice: Choice, value: Value | None) -> bool:
    """Whether a value (…, count, experts) has ones at the chosen places and zeros elsewhere."""
    node = None if value is None else stripped(value, CAST).producer
    return node is not None and node.op in ONE_HOT and is_choice(choice, node.inputs[0])


def tells_which(choice: Choice, node: Node) -> bool:
    """Whether a node finds the one choice of a row that is some expert, by where it is the same.

    Of what is computed of several such it would tell two experts from others.
    """
    value, dim = node.inputs[0], node.attrs.get("dim")
    if node.op == "aten.topk" or value is None or not isinstance(dim, int):
        return False
    if value.shape[dim] != choice.count or choice.count == choice.experts:
        return False
    made = stripped(value, CAST | LAYOUT | GATHERED).producer
    return made is not None and made.op in COMPARISON | ONE_HOT
