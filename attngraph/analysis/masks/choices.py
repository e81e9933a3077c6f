"""Elements that are one of two numbers, and what an op makes of them: read from its truth table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attngraph.analysis.masks.predicates import Const, Predicate, from_table
from attngraph.errors import IRError
from attngraph.ir import Node, Value
from attngraph.ir.ops import evaluate

_TABLE_INPUTS = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """`yes` where the predicate holds, else `no`; bools are 1 and 0."""

    predicate: Predicate
    yes: float
    no: float

    @property
    def constant(self) -> float | None:
        """The only value, where there is one."""
        if isinstance(self.predicate, Const):
            return self.yes if self.predicate.value else self.no
        return None


def choice(value: Value, predicates: Sequence[Predicate], elements: list[float]) -> Choice | None:
    """What takes `elements` in the rows of a truth table; None where they are more than two."""
    distinct = list(dict.fromkeys(elements))
    if len(distinct) > 2 or any(element != element for element in distinct):
        return None
    if value.dtype == torch.bool:
        distinct = [1.0, 0.0]
    held = from_table(predicates, [element == distinct[0] for element in elements])
    return Choice(held, distinct[0], distinct[-1])


def table(node: Node, value: Value, operands: Sequence[Choice]) -> Choice | None:
    """Evaluates an elementwise op for every combination of its operands' values."""
    predicates: list[Predicate] = list(
        dict.fromkeys(o.predicate for o in operands if not isinstance(o.predicate, Const))
    )
    if len(predicates) > _TABLE_INPUTS:
        return None
    rows = list(itertools.product((True, False), repeat=len(predicates)))
    tensors = []
    for source, operand in zip(node.inputs, operands, strict=True):
        if source is None:
            return None
        rank = len(source.shape)
        if (only := operand.constant) is not None:
            tensors.append(torch.full([1] if rank else [], only, dtype=source.dtype))
            continue
        if rank == 0 and source.dtype != torch.bool:
            return None  # scalars promote types otherwise than tensors do
        place = predicates.index(operand.predicate)
        column = [operand.yes if row[place] else operand.no for row in rows]
        tensors.append(torch.tensor(column, dtype=source.dtype))
    try:
        (result,) = evaluate(node, tensors, {})
    except (IRError, RuntimeError, TypeError):
        return None  # a symbolic number, or operands that the op takes as scalars only
    elements = result.to(value.dtype).expand(len(rows)).tolist()
    return choice(value, predicates, [float(element) for element in elements])
