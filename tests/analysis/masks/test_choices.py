"""Elements that are one of two numbers: what an op makes of them, row by row of its truth table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
import torch

from attngraph.analysis.masks.choices import Choice, choice, table
from attngraph.analysis.masks.predicates import (
    KEY,
    QUERY,
    And,
    Const,
    Linear,
    Or,
    Predicate,
    at_most,
    negation,
)
from attngraph.ir import Node, parse

A, B = at_most(KEY - 3), at_most(QUERY - 2)


def _value(predicate: Predicate, holds: Mapping[Predicate, bool]) -> bool:
    match predicate:
        case Const(value):
            return value
        case And(operands):
            return all(_value(one, holds) for one in operands)
        case Or(operands):
            return any(_value(one, holds) for one in operands)
        case Linear():
            return holds[predicate] if predicate in holds else not holds[negation(predicate)]
        case _:
            raise AssertionError(predicate)


def _node(line: str, dtype: str = "f32") -> Node:
    text = f"graph @main {{\n  input %a : {dtype}[4]\n  input %b : {dtype}[4]\n"
    graph = parse(f"{text}  %y = {line}\n  return %y\n}}")
    return next(iter(graph))


@pytest.mark.parametrize(
    ("line", "formula"),
    [
        ("aten.add.Tensor(%a, %b)", lambda a, b: a + b),
        ("aten.mul.Tensor(%a, %b)", lambda a, b: a * b),
        ("aten.maximum(%a, %b)", max),
        ("aten.minimum(%a, %b)", min),
    ],
)
@pytest.mark.parametrize("numbers", [((1.0, 0.0), (1.0, 0.0)), ((0.0, -1e9), (0.0, -1e9))])
def test_a_table_is_the_op_in_every_row(
    line: str,
    formula: Callable[[float, float], float],
    numbers: tuple[tuple[float, float], tuple[float, float]],
) -> None:
    first, second = numbers
    node = _node(line)
    found = table(node, node.output, [Choice(A, *first), Choice(B, *second)])
    rows = list(itertools.product((True, False), repeat=2))
    wanted = [formula(first[not a], second[not b]) for a, b in rows]
    assert (found is None) == (len(set(wanted)) > 2)
    for (a, b), number in zip(rows, wanted, strict=True):
        if found is not None:
            is_yes = _value(found.predicate, {A: a, B: b})
            assert (found.yes if is_yes else found.no) == torch.tensor(number).item()


def test_one_predicate_in_both_operands_is_one_column() -> None:
    node = _node("aten.sub.Tensor(%a, %b)")
    found = table(node, node.output, [Choice(A, 1.0, 0.0), Choice(A, 1.0, 0.0)])
    assert found is not None
    assert found.constant == 0


def test_fills_that_overflow_together_are_infinite() -> None:
    node = _node("aten.add.Tensor(%a, %b)", "f16")
    low = torch.finfo(torch.float16).min
    found = table(node, node.output, [Choice(A, 0.0, low), Choice(A, 0.0, low)])
    assert found == Choice(A, 0.0, -float("inf"))


def test_three_numbers_and_nan_are_no_choice() -> None:
    node = _node("aten.add.Tensor(%a, %b)")
    assert choice(node.output, [A, B], [0.0, 1.0, 1.0, 2.0]) is None
    assert choice(node.output, [A], [0.0, float("nan")]) is None
    assert choice(node.output, [A], [2.0, 2.0]) == Choice(Const(True), 2.0, 2.0)
