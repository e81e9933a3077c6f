"""What each quantized linear adds to the error of a model, and what is done about the worst.

Rounding errors of different linears are all but independent, so their squares add up: with e_k the
error of the first output where linear k alone is quantized, that of a set is about √Σ e_k². What it
is, is measured before a set is taken.

A linear whose error is too large is given its input in 16 bits, which leaves the error of its
weight for twice the price, or stays in float, which leaves none for four times. Of all such steps
those are taken first that take the most of the squared error for their price. So that a linear's
second step never comes before its first, one whose second is the better has both at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from attngraph.checks.rounded import rounded_linears
from attngraph.ir import Graph, Node, clone, interpret

_STRICTER = 0.9
"""How much the sum must fall for another try, where the measured error is over the budget."""
_FINE, _FLOAT = 2, 4
"""Times of a product of 8 bits, where a CPU has instructions for it."""


class Allotted(NamedTuple):
    """The linears that stay in float and those given 16 bits, by the name of what they return, and
    each one's error with 8.
    """

    keep: frozenset[str]
    fine: frozenset[str]
    errors: Mapping[str, float]


class _Step(NamedTuple):
    """What a linear is given next, the squared error that it has then, and what that saves for its
    price.
    """

    worth: float
    name: str
    is_float: bool
    left: float


def errors_of_each(
    plain: Graph, quantized: Graph, inputs: Sequence[torch.Tensor], *, fine: bool = False
) -> dict[str, float]:
    """By the name of what a linear returns, the error of the first output if it alone is quantized;
    with `fine` if its input has 16 bits, of those that can have them.

    Errors are relative, in rms. Both graphs name their linears alike.
    """
    exact = interpret(plain, inputs)
    linears = {
        node.output.name: node
        for node in rounded_linears(quantized)
        if node.op == "attn.int8_linear" or not fine
    }
    return {
        name: error(exact, interpret(_with(plain, {name: node}, [name] if fine else ()), inputs))
        for name, node in linears.items()
    }


def error(exact: Sequence[Any], found: Sequence[Any]) -> float:
    """The relative rms of the difference of the first float output, over what is finite."""
    for target, output in zip(exact, found, strict=True):
        if not target.is_floating_point() or not target.numel():
            continue
        wide, other = target.double(), output.double()
        usual = wide.isfinite() & other.isfinite()
        off = torch.where(usual, other - wide, 0.0).norm()
        size = torch.where(usual, wide, 0.0).norm()
        return float(off / size) if size else float(off > 0)
    return 0.0


def allotted(
    plain: Graph, quantized: Graph, inputs: Sequence[torch.Tensor], budget: float
) -> Allotted:
    """What the linears are given so that the error keeps to the budget.

    Where the measured error is larger than the sum of squares promised, more of them change.
    """
    errors = errors_of_each(plain, quantized, inputs)
    linears = {node.output.name: node for node in rounded_linears(quantized)}
    exact = interpret(plain, inputs)
    steps: list[_Step] | None = None
    allowed = budget**2
    while True:
        left, kept, fine = {name: each**2 for name, each in errors.items()}, set[str](), set[str]()
        if steps is None and sum(left.values()) > allowed:
            with_16 = errors_of_each(plain, quantized, inputs, fine=True)
            each = (_steps(name, linears[name], errors[name], with_16.get(name)) for name in errors)
            steps = sorted((step for found in each for step in found), reverse=True)
        for step in steps or ():
            if sum(left.values()) <= allowed:
                break
            left[step.name] = step.left
            (kept if step.is_float else fine).add(step.name)
        fine -= kept
        taken = {name: node for name, node in linears.items() if name not in kept}
        measured = error(exact, interpret(_with(plain, taken, fine), inputs)) if taken else 0.0
        if measured <= budget:
            return Allotted(frozenset(kept), frozenset(fine), errors)
        total = sum(left.values())
        allowed = _STRICTER * min(total, total * (budget / measured) ** 2)


def _steps(name: str, linear: Node, rough: float, fine: float | None) -> list[_Step]:
    """What a linear may be given, each for what it saves of the squared error for its price."""
    before, cost = rough**2, _cost(linear)
    whole = _Step(before / ((_FLOAT - 1) * cost), name, True, 0.0)
    if fine is None or not fine < rough:
        return [whole]
    after = fine**2
    first = _Step((before - after) / ((_FINE - 1) * cost), name, False, after)
    second = _Step(after / ((_FLOAT - _FINE) * cost), name, True, 0.0)
    return [first, second] if second.worth < first.worth else [whole]


def _cost(linear: Node) -> int:
    """Products of numbers for each row."""
    codes = linear.input(1)
    assert codes.data is not None
    return codes.data.numel()


def _with(plain: Graph, linears: Mapping[str, Node], fine: Collection[str] = ()) -> Graph:
    """The graph with these linears in the place of its own, some with 16 bits of their input."""
    copy = clone(plain)
    for node in list(copy):
        linear = linears.get(node.outputs[0].name) if node.outputs else None
        if linear is None:
            continue
        _, *stored, bias = (*linear.inputs, None)[:4]
        held = [copy.add_constant(each.name, each.data, each.type) for each in stored if each]
        shift = None if bias is None else node.inputs[2]
        attrs = linear.attrs
        if node.outputs[0].name in fine:
            attrs = {**attrs, "fine": True, "one_sided": False}
        inputs = [node.source, *held, *([] if shift is None else [shift])]
        copy.replace(node, copy.twin(node, inputs, attrs, op=linear.op).outputs)
    return copy
