"""Small graphs whose values are tensors, and predicates evaluated on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import sympy
import torch

from attngraph.analysis.masks.predicates import (
    VARIABLES,
    And,
    Const,
    Dense,
    Linear,
    Not,
    Or,
    Predicate,
    elements,
)
from attngraph.ir import Graph, Value, interpret

Places = dict[sympy.Symbol, int]


def numbers(graph: Graph, *values: Value, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the inputs and some values of a graph are, by name; the graph then returns these."""
    graph.set_outputs(values, [value.name for value in values])
    given = [inputs[value.name] for value in graph.inputs]
    found = interpret(graph, given)
    return inputs | {value.name: one for value, one in zip(values, found, strict=True)}


def holds(predicate: Predicate, places: Places, known: Mapping[str, torch.Tensor]) -> bool:
    """Whether it is true at one index; `known` are the tensors that it reads, by name."""
    match predicate:
        case Const(value):
            return value
        case Linear(expr):
            for item in elements(expr):
                at = tuple(int(sympy.sympify(p).xreplace(places)) for p in item.args)
                expr = expr.xreplace({item: int(known[item.func.__name__][at])})
            return bool(expr.xreplace(places) <= 0)
        case Dense(value, index):
            data = value.data if value.data is not None else known[value.name]
            return bool(data[tuple(int(sympy.sympify(p).xreplace(places)) for p in index)])
        case Not(operand):
            return not holds(operand, places, known)
        case And(operands):
            return all(holds(part, places, known) for part in operands)
        case Or(operands):
            return any(holds(part, places, known) for part in operands)


def box(*sizes: int) -> Iterator[Places]:
    """Each (b, h, q, k) of a box."""
    for at in itertools.product(*map(range, sizes)):
        yield dict(zip(VARIABLES, at, strict=True))
