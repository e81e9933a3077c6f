"""What is said to hold for all sizes of a range, or for none, does: every size is tried."""

from __future__ import annotations

import itertools
import random

import pytest
import sympy

from attngraph.ir.conditions import (
    always,
    arranged,
    at_sizes,
    parse_condition,
    shown,
    ties,
    without_ties,
)
from attngraph.ir.dims import DimInfo, parse_dim

INFOS = {"n": DimInfo(low=2, high=9), "m": DimInfo(low=1, high=6)}

DECIDED = {
    "n*m >= n": True,
    "n*m < n": False,
    "(n - 12)*m < 0": True,
    "(n - 12)*m >= 0": False,
    "(m - 5)**2*n >= 0": True,
    "(n - 12)**3*(m - 5)**2 <= 0": True,
    "(n // 4 + 1)*(m - 9)**2 != 0": True,
    "n*m*(n - 1) > 0": True,
    "m*(n - 4*((n + 3) // 4) + 4) > -1": True,
    "(n - 1) // 2 == (n - 3) // 2 + 1": True,
    "(n - 1) // 2 != (n - 3) // 2": True,
    "(n + 7) // 8 == (n + 15) // 8": False,
    "(8*m + 5) // 4 == 2*m + 1": True,
    "(n // 2 - 1) // 3 == (n // 2 - 4) // 3 + 1": True,
}
OPEN = (
    "n*m > n",
    "(m - 5)**2*n > 0",
    "(m - 5)**3*n >= 0",
    "(n - 3)*(m - 2) >= 0",
    "(n - 3)*m > -1",
    "n*m != 12",
    "(n - 1) // 2 == (n - 2) // 2",
)


@pytest.mark.parametrize("text", DECIDED)
def test_a_product_has_the_sign_of_its_factors(text: str) -> None:
    assert always(parse_condition(text), INFOS) is DECIDED[text]


def test_a_size_modulo_a_multiple_of_it_is_the_size() -> None:
    """Unless the multiple may be the size itself, as h · w is where w is 1."""
    unbounded = {name: DimInfo(low=1) for name in ("h", "w")}
    for text in ("(8*h) % (64*h*w) != 0", "h % (h*(1 + h*w)) != 0"):
        assert always(parse_condition(text), unbounded) is True
    assert always(parse_condition("h % (h*w) != 0"), unbounded) is None


@pytest.mark.parametrize("text", OPEN)
def test_what_holds_for_some_sizes_is_not_decided(text: str) -> None:
    assert always(parse_condition(text), INFOS) is None


def _factor(random_: random.Random) -> str:
    name, other = random_.sample(["n", "m"], 2)
    number, divisor = random_.randint(-3, 11), random_.randint(2, 4)
    forms = (f"{name} - {number}", f"{name} // {divisor} - {number}", f"{other} - {name}")
    return f"({random_.choice(forms)})" + random_.choice(["", "", "**2", "**3"])


@pytest.mark.parametrize("seed", range(8))
def test_no_size_is_against_what_is_decided(seed: int) -> None:
    random_, decided = random.Random(seed), 0
    sizes = [range(INFOS[name].low, (INFOS[name].high or 0) + 1) for name in ("n", "m")]
    for _ in range(25):
        product = "*".join(_factor(random_) for _ in range(random_.randint(1, 3)))
        relation = random_.choice(["<", "<=", ">", ">=", "==", "!="])
        condition = parse_condition(f"{product} {relation} {random_.choice([0, 0, 1, 'n'])}")
        said = always(condition, INFOS)
        symbols = {str(symbol): symbol for symbol in condition.free_symbols}
        for n, m in itertools.product(*sizes):
            given = {"n": sympy.Integer(n), "m": sympy.Integer(m)}
            place = {symbol: given[name] for name, symbol in symbols.items()}
            assert said in (None, bool(at_sizes(condition, place))), (condition, n, m)
        decided += said is not None
    assert decided  # or nothing was shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096 - past - seq >= 0", "past + seq ≤ 4096"),
        ("-1 * seq <= -3", "seq ≥ 3"),
        ("8 * seq * (past + 1) == 8 * seq * far", "far = 1 + past"),
        ("past + seq == far + seq", "far = past"),
        ("past + seq <= 12", "past + seq ≤ 12"),
        ("seq < past", "seq < past"),
        ("seq == 4 * ((seq + 3) // 4)", "seq = 4*((3 + seq) // 4)"),
        ("seq % 8 == 0", "seq % 8 = 0"),
        ("past + seq == 64 - max(0, 64 - past - seq)", "past + seq ≤ 64"),
        ("min(64, seq) == seq", "seq ≤ 64"),
        ("max(8, seq + past) == past + seq", "past + seq ≥ 8"),
        ("past == max(8, seq)", "past = max(8, seq)"),  # it is neither of these
        ("seq == 2 * max(8, seq)", "seq = 2*max(8, seq)"),
    ],
)
def test_terms_stand_once_and_where_they_are_added(text: str, expected: str) -> None:
    assert shown(arranged(parse_condition(text))) == expected


@pytest.mark.parametrize("seed", range(3))
def test_what_is_arranged_holds_for_the_same_sizes(seed: int) -> None:
    draw = random.Random(seed)
    names = ["seq", "past", "far"]
    for _ in range(40):
        sides = [
            " + ".join(
                f"{draw.randint(-3, 9)} * {draw.choice(names)} * {draw.choice([*names, '1'])}"
                for _ in range(draw.randint(1, 3))
            )
            + f" + {draw.randint(-4, 4)}"
            for _ in range(2)
        ]
        if draw.random() < 0.3:
            cut = f"{draw.choice(['min', 'max'])}({draw.randint(0, 9)}, {draw.choice(names)})"
            sides[0] = f"{draw.choice([sides[1], names[0]])} {draw.choice('+-')} {cut}"
        condition = parse_condition(f" {draw.choice(['<', '<=', '==', '!=', '>='])} ".join(sides))
        other = arranged(condition)
        for sizes in itertools.product((1, 2, 5), repeat=3):
            at = {
                sympy.Symbol(name, integer=True, positive=True): sympy.Integer(size)
                for name, size in zip(names, sizes, strict=True)
            }
            assert at_sizes(condition, at) == at_sizes(other, at), (condition, other, at)


def test_equal_dims_have_one_that_stands_for_all() -> None:
    said = ["a == b", "c == d", "d == b", "e == 2*a", "f >= a"]
    tied = ties(map(parse_condition, said))
    assert len(tied) == 3
    assert len({*tied, *map(str, tied.values())}) == 4
    assert len({*map(str, tied.values())}) == 1


def test_only_quotients_are_written_without_equal_dims() -> None:
    tied = ties([parse_condition("k == q")])
    kept, quotient = parse_dim("k + q"), parse_dim("4*((8*k) // q)")
    assert without_ties([kept, (quotient, "name")], tied) == [kept, (32, "name")]
    other = parse_dim("(8*k) // n")
    assert without_ties(other, {}) == other
