"""Below a softmax: the way from the probabilities to their weighted sum of the values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attngraph.analysis.attention.climbing import factored
from attngraph.analysis.attention.logits import Factor, Mask
from attngraph.analysis.attention.refusals import Declined, Refusal
from attngraph.analysis.layout.axes import (
    Atom,
    Axes,
    Operand,
    climb,
    fresh_axes,
    resolve,
    spread,
    top,
)
from attngraph.analysis.layout.contraction import read_contraction
from attngraph.analysis.values.scalars import (
    fill_of,
    is_cast,
    narrows_no_more,
    scale_of,
    uniform,
    widens,
)
from attngraph.analysis.walks import readers
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute
from attngraph.ir.traits import CAST, CHOICE, FLOAT_TEST, LAYOUT, MULTIPLICATION, MULTIPLICATIVE

_SUM = "aten.sum.dim_IntList"
_HANDS_ON = LAYOUT | CAST | CHOICE | FLOAT_TEST | MULTIPLICATION


@dataclass(frozen=True, slots=True)
class Below:
    """The product with the values, `root`, and how its axes index probabilities and values.

    `gain` and `gains` multiply the probabilities on the way; `guard` is
    where NaN, or what was masked, became zero, `nan_to_zero` that it is NaN.
    """

    root: Node
    output: Axes
    probabilities: Operand
    value: Operand
    summed: tuple[Atom, ...]
    guard: Operand | None = None
    gain: float = 1.0
    gains: tuple[Factor, ...] = ()
    refills: tuple[Mask, ...] = ()
    nodes: tuple[Node, ...] = ()
    nan_to_zero: bool = False


@dataclass(frozen=True, slots=True)
class _Reached:
    operand: Operand
    guard: Operand | None = None
    gain: float = 1.0
    gains: tuple[Factor, ...] = ()
    refills: tuple[Mask, ...] = ()
    nodes: tuple[Node, ...] = ()
    nan_to_zero: bool = False


def guarded(node: Node) -> Value | None:
    """x where the node is `where(isnan(x), 0, x)`, which turns masked rows from NaN to zero."""
    if node.op == "aten.nan_to_num":
        return node.inputs[0] if not attribute(node, "nan") else None
    if node.op != "aten.where.self":
        return None
    predicate, filler, source = node.inputs
    if uniform(filler) != 0.0:
        return None
    test = predicate.producer if predicate is not None else None
    if test is None or test.op != "aten.isnan" or test.inputs[0] is not source:
        return None
    return source


def _all_masked(predicate: Value, probabilities: Value) -> bool:
    """Whether a predicate is true in the rows whose logits are all -inf."""
    node = predicate.producer
    if node is None or not node.op.startswith("aten.all.dim") or node.inputs[0] is None:
        return False
    test, softmax = node.inputs[0].producer, probabilities.producer
    if test is None or softmax is None or test.op != "aten.eq.Scalar":
        return False
    return attribute(test, "other") == -math.inf and test.inputs[0] is softmax.inputs[0]


def _reach(operand: Operand, goal: Value, result: torch.dtype) -> _Reached | None:
    """Climbs from an operand of a product, given in `result`, to the probabilities, `goal`."""
    start = [_Reached(operand)]
    while start:
        state = start.pop()
        operand = state.operand
        if operand.value is goal:
            return state if _keeps_range(state) else None
        node = operand.value.producer
        if node is not None and len(state.nodes) < 32:
            start.extend(_up(node, state, goal, result))
    return None


def _keeps_range(state: _Reached) -> bool:
    """Whether no cast on the way overflows: probabilities are below 1, but factors may be large."""
    is_scaled = state.gain != 1.0 or bool(state.gains)
    return not is_scaled or all(widens(node) for node in state.nodes if is_cast(node))


def _up(node: Node, state: _Reached, goal: Value, result: torch.dtype) -> Iterator[_Reached]:
    """One step: layout, cast, guard, or a factor, which is remembered."""
    operand = state.operand
    state = replace(state, nodes=(*state.nodes, node))

    def at(value: Value, axes: Axes) -> _Reached:
        return replace(state, operand=Operand(value, axes))

    shape = node.outputs[0].shape
    if is_cast(node) and node.inputs[0] is not None:
        if widens(node) or narrows_no_more(node, result):
            yield at(node.inputs[0], operand.axes)
    elif (source := guarded(node)) is not None:
        yield replace(at(source, operand.axes), guard=operand, nan_to_zero=True)
    elif (above := climb(operand)) is not None:
        yield at(above.value, above.axes)
    elif (scaling := scale_of(node)) is not None:
        yield replace(at(scaling[0], operand.axes), gain=state.gain * scaling[1])
    elif (filling := fill_of(node)) is not None and filling[3] == 0.0:
        source, predicate, keep, fill = filling
        if not keep and source.shape == shape and _all_masked(predicate, goal):
            yield replace(at(source, operand.axes), guard=operand, nan_to_zero=True)
            return
        refills = (*state.refills, Mask(spread(predicate, operand.axes, shape), keep, fill))
        inner = spread(source, operand.axes, shape)
        yield replace(state, operand=inner, refills=refills, guard=operand)
    elif node.op in MULTIPLICATIVE:
        for mine, other, power in factored(node, operand.axes):
            factor = Factor(other, divides=power < 0)
            yield replace(state, operand=mine, gains=(*state.gains, factor))


def hands_on(node: Node) -> bool:
    """Whether a node may lie between probabilities and their product with the values."""
    return node.op in _HANDS_ON or node.op == "aten.nan_to_num"


def find_below(probabilities: Value, dim: int) -> Below | Declined | None:
    """The product of the probabilities with values, summed over exactly axis `dim`.

    Declined where they are only multiplied over another axis; None where they never are. Values
    without features of their own come last: weights are masked and summed to be normalised again.
    """
    elsewhere: Declined | None = None
    total: Below | None = None
    # No limit: one softmax may serve a hundred heads that are taken apart behind it.
    consumers = (
        ()
        if probabilities.producer is None
        else readers(probabilities.producer, hands_on, limit=None)
    )
    for node in consumers:
        if hands_on(node) or len(node.outputs) != 1:
            continue
        output = fresh_axes(node.output.shape)
        product = read_contraction(node, output)
        if product is None:
            continue
        for mine, side in (product.sides, product.sides[::-1]):
            reached = _reach(mine, probabilities, node.output.dtype)
            if reached is None:
                continue
            other, gains = _values_of(side, reached)
            if not other.value.dtype.is_floating_point:
                continue
            if resolve(reached.operand.axes[dim]) != resolve(product.summed):
                elsewhere = elsewhere or _other_axis(node, other, reached.operand)
                continue
            if product.addends or product.factor != 1.0:
                continue
            if node.op == _SUM and any(
                gain.operand is not None and gain.operand.value is other.value for gain in gains
            ):
                continue
            inner = node.inputs[0].producer if node.op == _SUM and node.inputs[0] else None
            nodes = reached.nodes if inner is None else (*reached.nodes, inner)
            below = Below(
                node,
                output,
                reached.operand,
                other,
                product.summed,
                reached.guard,
                reached.gain,
                gains,
                reached.refills,
                nodes,
                reached.nan_to_zero,
            )
            if set(top(other).atoms) - set(reached.operand.atoms):
                return below
            total = total or below
    return total or elsewhere


def _values_of(side: Operand, reached: _Reached) -> tuple[Operand, tuple[Factor, ...]]:
    """The values, and what else multiplies the probabilities: Σ p · v · m is Σ p · m · v.

    A side that has no axes but those of the probabilities is no values, if one of the factors met
    on the way to them has such axes: a mask, say, that multiplies what was weighed already. A guard
    between them may have cleared the values' own NaN.
    """
    known = set(reached.operand.atoms)
    if not set(side.atoms) <= known or reached.guard is not None:
        return side, reached.gains
    wide = [gain for gain in reached.gains if not set(gain.atoms) <= known]
    if len(wide) != 1 or wide[0].operand is None or wide[0].divides:
        return side, reached.gains
    rest = tuple(gain for gain in reached.gains if gain is not wide[0])
    return wide[0].operand, (*rest, Factor(side))


def _other_axis(node: Node, other: Operand, probabilities: Operand) -> Declined:
    # What has no axis of its own is no values, but weights of the weights.
    if other.value.is_constant or set(top(other).atoms) <= set(probabilities.atoms):
        return Refusal.WEIGHTS_MIXED.at(node)
    return Refusal.OTHER_AXIS.at(node)
