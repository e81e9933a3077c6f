"""Conditions that are proved piece by piece, and some that fail at one size."""

from __future__ import annotations

import pytest
import sympy

from attngraph.ir.conditions import parse_condition
from attngraph.ir.pieces import holds_in_pieces

_STEPS = "+".join(f"2*min(1, max(0, n - {start}))" for start in (1, 2, 7, 20, 54))


@pytest.mark.parametrize("high", [64, 4096, None])
def test_steps_that_stay_below_the_size(high: int | None) -> None:
    """They are 4 at n = 3 and at 4."""
    below = parse_condition(f"{_STEPS} < n")
    assert holds_in_pieces(below, 5, high)
    assert not holds_in_pieces(below, 4, high)
    assert holds_in_pieces(parse_condition(f"{_STEPS} <= n"), 4, high)


def test_one_size_alone_may_fail() -> None:
    apart = parse_condition("max(n, 40) != 41")
    assert holds_in_pieces(apart, 2, 40)
    assert not holds_in_pieces(apart, 2, 64)
    assert holds_in_pieces(apart, 42, None)


def test_what_is_of_several_sizes_or_none_is_left() -> None:
    assert not holds_in_pieces(parse_condition("min(n, m) <= n"), 2, 64)
    assert not holds_in_pieces(sympy.true, 2, 64)
