"""The mask algebra against brute force over small boxes of indices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import sympy
import torch

from attngraph.analysis.masks.predicates import (
    FALSE,
    KEY,
    QUERY,
    TRUE,
    VARIABLES,
    And,
    Const,
    Dense,
    Domain,
    Linear,
    Not,
    Or,
    Predicate,
    at_most,
    conjunction,
    disjunction,
    element,
    equal,
    from_table,
    negation,
    substitute,
    variables,
)
from attngraph.ir import DimInfo, TensorType, Value
from attngraph.ir.dims import symbol

SEQ, PAST = symbol("seq"), symbol("past")
DIMS = {"seq": DimInfo(2, 64), "past": DimInfo(0)}
PADDING = Value("padding", TensorType(torch.bool, (2, SEQ)))
Places = dict[sympy.Symbol, int]


def _holds(predicate: Predicate, places: Places, padding: torch.Tensor) -> bool:
    match predicate:
        case Const(value):
            return value
        case Linear(expr):
            return bool(expr.xreplace({s: sympy.Integer(n) for s, n in places.items()}) <= 0)
        case Dense(_, index):
            at = tuple(int(sympy.sympify(place).xreplace(places)) for place in index)
            return bool(padding[at])
        case Not(operand):
            return not _holds(operand, places, padding)
        case And(operands):
            return all(_holds(part, places, padding) for part in operands)
        case Or(operands):
            return any(_holds(part, places, padding) for part in operands)


def _random(draw: random.Random, depth: int = 3) -> Predicate:
    kind = draw.randrange(5 if depth else 2)
    if kind == 0:
        return Dense(PADDING, (VARIABLES[0], KEY))
    if kind == 1:
        a, b, c = draw.choice([-1, 0, 1]), draw.choice([-1, 0, 1]), draw.randint(-3, 3)
        return at_most(a * QUERY + b * KEY + c + draw.choice([0, 0, -SEQ]))
    parts = [_random(draw, depth - 1) for _ in range(2)]
    if kind == 2:
        return conjunction(*parts)
    return disjunction(*parts) if kind == 3 else negation(parts[0])


def _boxes() -> Iterator[tuple[int, list[Places]]]:
    for seq in (1, 2, 4):
        box = itertools.product(range(2), range(1), range(seq), range(seq))
        yield seq, [dict(zip(VARIABLES, at, strict=True)) | {SEQ: seq} for at in box]


@pytest.mark.parametrize("seed", range(60))
def test_simplified_predicates_hold_where_the_originals_do(seed: int) -> None:
    predicate = _random(random.Random(seed))
    domain = Domain((2, 1, SEQ, SEQ), DIMS)
    simple, opposite = domain.simplify(predicate), negation(predicate)
    for seq, box in _boxes():
        padding = torch.rand(2, seq, generator=torch.Generator().manual_seed(seed)) < 0.5
        for places in box:
            expected = _holds(predicate, places, padding)
            assert _holds(simple, places, padding) == expected
            assert _holds(opposite, places, padding) != expected


def _claims_a_key(seed: int) -> bool:
    return Domain((2, 1, SEQ, SEQ), DIMS).always_a_key(_random(random.Random(seed)))


CLAIMED = [seed for seed in range(60) if _claims_a_key(seed)]


def test_a_key_for_each_query_is_claimed_of_some_predicates() -> None:
    assert 10 < len(CLAIMED) < 50


@pytest.mark.parametrize("seed", CLAIMED)
def test_a_key_for_each_query_is_claimed_only_where_there_is_one(seed: int) -> None:
    predicate = _random(random.Random(seed))
    for seq, box in _boxes():
        nothing = torch.zeros(2, seq, dtype=torch.bool)
        rows: dict[tuple[int, ...], bool] = {}
        for places in box:
            row = tuple(places[variable] for variable in VARIABLES[:3])
            rows[row] = rows.get(row, False) or _holds(predicate, places, nothing)
        assert all(rows.values())


@pytest.mark.parametrize("table", list(itertools.product([False, True], repeat=4)))
def test_truth_tables_are_kept(table: tuple[bool, ...]) -> None:
    inputs = [at_most(KEY - QUERY), Dense(PADDING, (VARIABLES[0], KEY))]
    found = from_table(inputs, table)
    for row, expected in zip(itertools.product((True, False), repeat=2), table, strict=True):
        places = {VARIABLES[0]: 0, QUERY: 0, KEY: 0 if row[0] else 1}
        assert _holds(found, places, torch.full((1, 2), row[1])) == expected


def test_proofs_use_the_range_of_every_dim() -> None:
    domain = Domain((2, 1, SEQ, SEQ + PAST), DIMS)
    assert domain.simplify(at_most(-QUERY)) == TRUE
    assert domain.simplify(at_most(QUERY - SEQ + 1)) == TRUE
    assert domain.simplify(at_most(KEY - 63 - PAST)) == TRUE
    assert domain.simplify(at_most(SEQ + 1 - QUERY)) == FALSE
    for unproved in (KEY - SEQ, KEY - 62 - PAST, 1 - PAST, QUERY * KEY - 10000):
        assert domain.simplify(at_most(unproved)) == Linear(unproved)


def test_a_dim_may_be_one_whatever_its_range_says() -> None:
    domain = Domain((2, 1, SEQ, SEQ), DIMS)
    assert domain.simplify(at_most(2 - SEQ)) == Linear(2 - SEQ)


def test_causal_leaves_a_key_to_each_query_and_a_strict_one_does_not() -> None:
    domain = Domain((2, 1, SEQ, symbol("other")), DIMS)
    window = at_most(QUERY - KEY - 3)
    assert domain.always_a_key(at_most(KEY - QUERY))
    assert not domain.always_a_key(at_most(KEY - QUERY + 1))
    assert not domain.always_a_key(conjunction(at_most(KEY - QUERY), window))
    same = Domain((2, 1, SEQ, SEQ), DIMS)
    assert same.always_a_key(conjunction(at_most(KEY - QUERY), window))


def test_constant_rows_count_only_whole_rows() -> None:
    data = torch.tensor([[True, False], [False, True]])
    constant = Value("c", TensorType(torch.bool, (2, 2)), data=data, is_constant=True)
    domain = Domain((2, 1, 2, 2), {})
    assert domain.always_a_key(Dense(constant, (QUERY, KEY)))
    assert not domain.always_a_key(Dense(constant, (KEY, KEY)))
    half = Domain((2, 1, 2, 1), {})
    assert not half.always_a_key(Dense(constant, (QUERY, KEY)))
    assert not domain.always_a_key(Not(Dense(Value("x", constant.type), (QUERY, KEY))))


def test_distances_are_two_comparisons() -> None:
    near = at_most(sympy.Abs(QUERY - KEY) - 2)
    assert isinstance(near, And)
    assert set(near.operands) == {Linear(QUERY - KEY - 2), Linear(KEY - QUERY - 2)}
    assert isinstance(negation(near), Or)


def test_opposites_meet_in_false_and_join_in_true() -> None:
    lower = at_most(KEY - QUERY)
    assert conjunction(lower, negation(lower)) == FALSE
    assert disjunction(lower, negation(lower)) == TRUE
    assert substitute(equal(QUERY, KEY), KEY, QUERY) == TRUE
    assert variables(conjunction(lower, Dense(PADDING, (VARIABLES[0], KEY)))) == {
        VARIABLES[0],
        QUERY,
        KEY,
    }


def test_nothing_is_proved_of_integers_that_a_caller_gives() -> None:
    domain = Domain((2, 1, SEQ, SEQ), DIMS)
    length, ids = element("n", (VARIABLES[0],)), [element("s", (0, at)) for at in (QUERY, KEY)]
    for unproved in (KEY - length, length, -length, element("one", ()) - 1, ids[0] - ids[1]):
        assert domain.simplify(at_most(unproved)) == Linear(unproved)
        assert not domain.never_positive(unproved)
    assert domain.always_a_key(equal(*ids))
    assert not domain.always_a_key(at_most(KEY + 1 - length))


def test_the_newest_keys_are_seen_through_a_window_after_a_past() -> None:
    causal, window = at_most(KEY - QUERY - PAST), at_most(QUERY + PAST - KEY - 3)
    assert Domain((2, 1, SEQ, SEQ + PAST), DIMS).always_a_key(conjunction(causal, window))
    assert not Domain((2, 1, SEQ, SEQ), DIMS).always_a_key(conjunction(causal, window))
