"""What is said to follow from what, against brute force over the leaves."""

from __future__ import annotations

import itertools

import pytest
import torch

from attngraph.analysis.masks.predicates import (
    BATCH,
    FALSE,
    KEY,
    TRUE,
    Dense,
    Predicate,
    at_most,
    conjunction,
    disjunction,
    element,
    equal,
    negation,
)
from attngraph.analysis.masks.propositions import always, any_of, implies
from attngraph.ir import Builder, Graph, TensorType, Value

A, B, C = (
    Dense(Value(name, TensorType(torch.bool, (2, 5))), (BATCH, KEY)) for name in ("a", "b", "c")
)
LENGTH = at_most(KEY - element("lengths", (BATCH,)) + 1)
TYPE = element("types", (BATCH, KEY))


@pytest.mark.parametrize(
    ("predicate", "holds"),
    [
        (disjunction(A, negation(A)), True),
        (disjunction(conjunction(A, B), negation(A), negation(B)), True),
        (disjunction(LENGTH, negation(LENGTH)), True),
        (disjunction(equal(TYPE, 0), negation(equal(TYPE, 0))), True),
        (disjunction(equal(TYPE, 0), equal(TYPE, 1)), False),
        (disjunction(A, B), False),
        (TRUE, True),
        (FALSE, False),
    ],
)
def test_always(predicate: Predicate, holds: bool) -> None:
    assert always(predicate) is holds


def test_opposite_tests_of_a_tensor_are_one_leaf() -> None:
    graph = Graph("g")
    ids = graph.add_input("ids", TensorType(torch.int64, (2, 5)))
    x = graph.add_input("x", TensorType(torch.float32, (2, 5)))
    build = Builder(graph)

    def both(first: str, second: str, of: Value) -> Predicate:
        nodes = [build.node(f"aten.{op}.Scalar", of, other=3) for op in (first, second)]
        return disjunction(*(Dense(node.output, (BATCH, KEY)) for node in nodes))

    assert always(both("eq", "ne", ids))
    assert always(both("eq", "ne", x))
    assert always(both("lt", "ge", ids))
    assert always(both("gt", "le", ids))
    assert not always(both("lt", "ge", x))  # NaN is neither
    assert not always(both("lt", "gt", ids))
    assert not always(both("eq", "eq", ids))


PREDICATES = [
    A,
    negation(A),
    conjunction(A, B),
    conjunction(A, negation(B), LENGTH),
    disjunction(B, conjunction(A, LENGTH)),
    conjunction(A, C),
    negation(LENGTH),
]


@pytest.mark.parametrize(("given", "wanted"), list(itertools.product(PREDICATES, repeat=2)))
def test_implication_is_that_of_sets(given: Predicate, wanted: Predicate) -> None:
    """The leaves are independent, so what is not implied has a counterexample."""
    counterexample = conjunction(given, negation(wanted))
    assert implies(given, wanted) is always(negation(counterexample))
    assert implies(given, disjunction(given, wanted))
    assert implies(conjunction(given, wanted), wanted)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(PREDICATES, repeat=2)))
def test_any_of_is_the_disjunction(first: Predicate, second: Predicate) -> None:
    found, whole = any_of([first, second]), disjunction(first, second)
    assert implies(found, whole)
    assert implies(whole, found)


def test_shared_parts_are_taken_out() -> None:
    assert any_of([conjunction(A, B), conjunction(A, negation(B))]) == A
    assert any_of([conjunction(A, B), conjunction(B, C), B]) == B
