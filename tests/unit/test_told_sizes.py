"""Sizes as a note tells them."""

from __future__ import annotations

import pytest

from attngraph.compiling.told_sizes import where
from attngraph.ir import DimInfo
from attngraph.ir.conditions import parse_condition

_DIMS = {"t": DimInfo(1, None), "late": DimInfo(3, None)}


@pytest.mark.parametrize(
    ("conditions", "told"),
    [
        (["t != 6"], "t ≠ 6"),
        (["t != 6", "t <= late"], "t ≠ 6 and t ≤ late"),
        (["128 * ((7 + t) // 8) != 128"], "t is none of 1 to 8"),
        (
            ["128 * ((7 + t) // 8) != 128", "8 * ((7 + t) // 8) != t"],
            "t is none of 1 to 8, 16, 24, 32, …",
        ),
        (["t // 8 <= 1"], "t // 8 ≤ 1"),
        (["late // 4 != 1"], "late is none of 4 to 7"),
        (["t // 2 == late"], "t // 2 = late"),
        (["t % 128 != t"], "t is none of 1 to 127"),
        (["t // 100 != 1"], "t is none of 100 to 199"),
        (["t // 1000 != 1"], "t // 1000 ≠ 1"),
    ],
)
def test_where_conditions_hold(conditions: list[str], told: str) -> None:
    assert where([parse_condition(each) for each in conditions], _DIMS) == told
