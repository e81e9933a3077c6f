"""What each quantized linear adds to the error of a model, and which of them to leave in float.

Rounding errors of different linears are all but independent, so their squares add up: with e_k the
error of the first output where linear k alone is quantized, that of a set is about √Σ e_k². What it
is, is measured before a set is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attngraph.checks.rounded import rounded_linears
from attngraph.ir import Graph, Node, clone, interpret

_STRICTER = 0.9
"""How much the sum must fall for another try, where the measured error is over the budget."""


def errors_of_each(
    plain: Graph, quantized: Graph, inputs: Sequence[torch.Tensor]
) -> dict[str, float]:
    """By the name of what a linear returns, the error of the first output if it alone is quantized.

    Errors are relative, in rms. Both graphs name their linears alike.
    """
    exact = interpret(plain, inputs)
    return {
        node.output.name: error(exact, interpret(_with(plain, {node.output.name: node}), inputs))
        for node in rounded_linears(quantized)
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


def to_keep(
    plain: Graph, quantized: Graph, inputs: Sequence[torch.Tensor], budget: float
) -> tuple[frozenset[str], dict[str, float]]:
    """The linears that stay in float, so that the error keeps to the budget; and each one's error.

    Those go first that take the most of the error for what their product costs. Where the measured
    error is larger than the sum of squares promised, more of them do.
    """
    errors = errors_of_each(plain, quantized, inputs)
    linears = {node.output.name: node for node in rounded_linears(quantized)}
    exact = interpret(plain, inputs)
    dearest = sorted(errors, key=lambda name: errors[name] ** 2 / _cost(linears[name]))
    allowed = budget**2
    while True:
        taken = list(dearest)
        while taken and sum(errors[name] ** 2 for name in taken) > allowed:
            taken.pop()
        chosen = {name: linears[name] for name in taken}
        measured = error(exact, interpret(_with(plain, chosen), inputs)) if chosen else 0.0
        if measured <= budget:
            return frozenset(errors) - frozenset(taken), errors
        left = sum(errors[name] ** 2 for name in taken)
        allowed = _STRICTER * min(left, left * (budget / measured) ** 2)


def _cost(linear: Node) -> int:
    """Products of numbers for each row."""
    codes = linear.inputs[1]
    assert codes is not None
    assert codes.data is not None
    return codes.data.numel()


def _with(plain: Graph, linears: Mapping[str, Node]) -> Graph:
    """The graph with these linears in the place of its own."""
    copy = clone(plain)
    for node in list(copy):
        linear = linears.get(node.outputs[0].name) if node.outputs else None
        if linear is None:
            continue
        _, codes, scales, bias = (*linear.inputs, None)[:4]
        assert codes is not None
        assert scales is not None
        held = [copy.add_constant(each.name, each.data, each.type) for each in (codes, scales)]
        shift = None if bias is None else node.inputs[2]
        new = copy.create(
            linear.op,
            [node.inputs[0], *held, *([] if shift is None else [shift])],
            linear.attrs,
            types=[node.output.type],
            loc=node.loc,
            before=node,
        )
        copy.replace_uses(node.output, new.output)
        copy.erase(node)
    return copy
