"""What follows from what among predicates, by truth tables over their leaves.

A leaf is a bool tensor's element or one comparison `expr ≤ 0`; its negation `1 − expr ≤ 0` is the
same leaf, and so are `x == c` and `x != c` of one tensor. Leaves count as independent of each
other, so what is proved here holds for any numbers; what depends on two comparisons of one number
(x ≤ 0 and x ≤ 1) is not seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch

from attngraph.analysis.masks.predicates import (
    TRUE,
    And,
    Const,
    Dense,
    Linear,
    Not,
    Or,
    Predicate,
    conjunction,
    conjuncts,
    disjunction,
    negation,
)
from attngraph.analysis.values.scalars import is_cast
from attngraph.ir.ops import attribute
from attngraph.ir.traits import COMPARISON

_LEAVES = 10
_OPPOSITES = {"ge": "lt", "gt": "le"}


def always(predicate: Predicate) -> bool:
    """Whether it is true however its leaves are; False where it has too many to try."""
    leaves = list(dict.fromkeys(_leaves(predicate)))
    if len(leaves) > _LEAVES:
        return predicate == TRUE
    return all(
        _value(predicate, dict(zip(leaves, row, strict=True)))
        for row in itertools.product((True, False), repeat=len(leaves))
    )


def implies(given: Predicate, wanted: Predicate) -> bool:
    """Whether `wanted` is proved to hold wherever `given` does."""
    if set(conjuncts(wanted)) <= set(conjuncts(given)):
        return True
    return all(always(disjunction(negation(given), part)) for part in conjuncts(wanted))


def any_of(predicates: Sequence[Predicate]) -> Predicate:
    """Their disjunction, with the conjuncts that all of them share taken out of it."""
    first = conjuncts(predicates[0])
    shared = [part for part in first if all(part in conjuncts(p) for p in predicates)]
    rests = [
        conjunction(*(part for part in conjuncts(p) if part not in shared)) for p in predicates
    ]
    rest = disjunction(*rests)
    return conjunction(*shared, TRUE if always(rest) else rest)


def _leaf(predicate: Dense | Linear) -> tuple[Hashable, bool]:
    """What is asked, and the answer for which the predicate holds."""
    if isinstance(predicate, Linear):
        other = 1 - predicate.expr
        name = min(str(predicate.expr), str(other))
        return name, name == str(predicate.expr)
    value, index = predicate.value, predicate.index
    node, holds = value.producer, True
    if node is None or not node.inputs or node.inputs[0] is None:
        return (value, index), holds
    source = node.inputs[0]
    settled = not source.dtype.is_floating_point  # NaN is neither below nor above
    stem = node.op.removeprefix("aten.").partition(".")[0]
    is_test = node.op in COMPARISON and "other" in node.attrs
    test, number = node.op, attribute(node, "other") if is_test else 0
    if is_cast(node) and value.dtype == torch.bool:
        test, holds = "aten.eq.Scalar", False
    elif node.op == "aten.logical_not":
        test = "aten.eq.Scalar"
    elif node.op == "aten.ne.Scalar":
        test, holds = "aten.eq.Scalar", False
    elif is_test and stem in _OPPOSITES and settled:
        test, holds = f"aten.{_OPPOSITES[stem]}.Scalar", False
    elif not is_test:
        return (value, index), holds
    return (test, source, number, index), holds


def _leaves(predicate: Predicate) -> Iterator[Hashable]:
    match predicate:
        case Dense() | Linear():
            yield _leaf(predicate)[0]
        case Not(operand):
            yield from _leaves(operand)
        case And(operands) | Or(operands):
            for one in operands:
                yield from _leaves(one)


def _value(predicate: Predicate, leaves: Mapping[Hashable, bool]) -> bool:
    match predicate:
        case Const(value):
            return value
        case Dense() | Linear():
            leaf, holds = _leaf(predicate)
            return leaves[leaf] == holds
        case Not(operand):
            return not _value(operand, leaves)
        case And(operands):
            return all(_value(one, leaves) for one in operands)
        case Or(operands):
            return any(_value(one, leaves) for one in operands)
