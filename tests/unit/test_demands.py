"""What is told of conditions on sizes: the sizes that they exclude, and nothing twice."""

from __future__ import annotations

import pytest
import sympy

from attngraph.frontend.sizes.demands import demands, excluded_sizes, told
from attngraph.ir.conditions import Condition, parse_condition, shown
from attngraph.ir.dims import DimInfo

DIMS = {"a": DimInfo(low=1), "b": DimInfo(low=1), "c": DimInfo(low=4, high=6), "d": DimInfo(1, 60)}


def _read(*texts: str) -> list[Condition]:
    return [parse_condition(text) for text in texts]


@pytest.mark.parametrize(
    ("texts", "sizes"),
    [
        (["a != 3"], {"a": [3]}),
        (["a % (a - a // 2) != 0 or a > 4", "a != 5"], {"a": [1, 2, 4, 5]}),
        (["a % (a - 2) != 1"], {"a": [2]}),  # which divides by 0 there
        (["a // (a - 2) <= 2"], {"a": [2, 3]}),
        (["a % 2 == 0"], {}),
        (["a <= 9000"], {}),
        (["a*b != 1"], {}),
        (["c != 5", "b != 1"], {"b": [1], "c": [5]}),
        (["a % (3*a*(b // 2)) != 0"], {"b": [1]}),  # by the size of b alone
        (["a % (3*a*(b // 2)) != 0", "b != 3", "a*b != a"], {"b": [1, 3]}),
        (["a*(b - 1)*(b - 2) != 0", "a % 2 == 0"], {"b": [1, 2]}),
        (["a*(b // 50) <= a"], {}),  # of b from 100 on
        (["(a - 1)*(b - 1) != 0"], {}),
    ],
)
def test_a_few_small_sizes_are_told_one_by_one(
    texts: list[str], sizes: dict[str, list[int]]
) -> None:
    found = {name: excluded for name, excluded, _ in excluded_sizes(_read(*texts), DIMS)}
    assert found == sizes


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        (["a % 4 == 0", "a % 2 == 0"], ["a % 4 = 0"]),
        (["a % 4 == 0", "a % 6 == 0"], ["a % 4 = 0", "a % 6 = 0"]),
        (["a <= b", "a <= 2*b", "a <= 3*b"], ["a ≤ b"]),
        (["a <= b", "b <= a"], ["a ≤ b", "b ≤ a"]),
        (["a*b <= 90000"], ["a*b ≤ 90000"]),
        (["a <= 90000", "c >= 3"], ["a ≤ 90000"]),
        (["a + b + c + other <= 7"], ["a + b + c + other ≤ 7"]),
        (["a != b + 41"], ["a ≠ 41 + b"]),  # which no small sizes are
        (["c + d <= 65"], ["c + d ≤ 65"]),  # by the largest alone
    ],
)
def test_what_others_say_is_not_told_again(texts: list[str], kept: list[str]) -> None:
    assert sorted(map(shown, told(_read(*texts), DIMS))) == sorted(kept)


def test_what_is_known_is_not_told() -> None:
    known = _read("a % 4 == 0")
    assert told(_read("a % 2 == 0"), DIMS, known) == []
    assert told([sympy.Ne(sympy.Symbol("a"), 3)], {}) != []


def test_what_no_size_breaks_is_not_told() -> None:
    def said(*texts: str) -> list[str]:
        return list(demands(_read(*texts), DIMS, lambda each: " at model.py:3"))

    assert said("3*a*(b // 2) != a", "a % (3*a*(b // 2)) != 0") == [
        "Dim 'b' can't be 1: the model demands it at model.py:3."
    ]
    assert said("a <= b", "a <= 2*b") == ["Sizes have a ≤ b: the model demands it at model.py:3."]


def test_what_no_line_asks_is_told_of_the_trace() -> None:
    def said(text: str) -> list[str]:
        return list(demands(_read(text), DIMS, lambda _: ""))

    assert said("b != 1") == ["Dim 'b' can't be 1, as torch.export traces the model."]
    assert said("a <= b") == ["Sizes have a ≤ b, as torch.export traces the model."]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a - a // 2 >= 2", "a - a // 2 ≥ 2"),
        ("16*b*(a - a // 2) >= 2", "16*b*(a - a // 2) ≥ 2"),
        ("a*b - 4*b != 3", "a*b - 4*b ≠ 3"),
        ("b - a > 3", "b - a > 3"),
        ("-a - b < -3", "((-1)*a) + ((-1)*b) < -3"),
        ("(a - 1 + b // 2) // (b // 2) == 2", "(a + b // 2 - 1) // (b // 2) = 2"),
        ("a % (a - a // 2) != 0", "a % (a - a // 2) ≠ 0"),
    ],
)
def test_what_is_taken_off_is_shown_as_a_difference(text: str, said: str) -> None:
    condition = parse_condition(text)
    assert shown(condition) == said
    signs = {"≥": ">=", "≠": "!=", " = ": " == "}
    for sign, word in signs.items():
        said = said.replace(sign, word)
    assert parse_condition(said) == condition
