"""What a softmax gives for rows that masks hide: the formulas, next to their text-book results."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attngraph.analysis.masks.row_policy import SOFTMAX, Formula, absorbs, of_mask, rows

LOW = torch.finfo(torch.float32).min
NONE_HIDDEN = torch.tensor([[0.5, -1.0, 2.0]])
ALL = torch.ones_like(NONE_HIDDEN)
FORMULAS = (
    SOFTMAX,
    Formula(),
    Formula(shift="positive"),
    Formula(total="quotient"),
    Formula(total="exponent"),
    Formula(total="summed"),
    Formula(normalised=True),
)


@pytest.mark.parametrize("formula", FORMULAS)
def test_all_spellings_agree_where_nothing_is_hidden(formula: Formula) -> None:
    found = formula.weights(NONE_HIDDEN, ALL)
    torch.testing.assert_close(found, torch.softmax(NONE_HIDDEN, -1))


@pytest.mark.parametrize(
    ("formula", "fill", "weight"),
    [
        (SOFTMAX, LOW, 1 / 3),  # the mean of the values
        (SOFTMAX, -math.inf, math.nan),
        (Formula(), LOW, math.nan),  # 0 / 0
        (Formula(total="exponent"), LOW, 1.0),  # log 3 vanishes beside the fill
        (Formula(addend=True), LOW, 0.0),
        (Formula(addend=True), -math.inf, 0.0),
    ],
)
def test_spellings_part_where_all_is_hidden(formula: Formula, fill: float, weight: float) -> None:
    found = formula.weights(torch.full((1, 3), fill), ALL)
    torch.testing.assert_close(found, torch.full((1, 3), weight), equal_nan=True)


def test_zeroed_exponentials_are_a_mask_of_minus_infinity() -> None:
    kept = torch.tensor([[1.0, 0.0, 1.0]])
    for formula in (SOFTMAX, Formula(), Formula(addend=True)):
        found = formula.weights(NONE_HIDDEN, kept)
        torch.testing.assert_close(found, formula.raised(NONE_HIDDEN, kept))


def test_rows_of_many_masks_and_biases_are_not_listed() -> None:
    """5 ** 40 kinds of keys are counted, and not made, before they are found to be too many."""
    assert rows(0, 40, torch.float32) is None
    assert rows(40, 0, torch.float32) is None


def test_rows_have_keys_of_up_to_three_kinds() -> None:
    found = rows(2, 0, torch.float32)
    assert found is not None
    kinds = torch.stack(found.atoms, -1)
    seen = {frozenset(map(tuple, row.tolist())) for row in kinds}
    assert {len(row) for row in seen} == {1, 2, 3}
    assert len(seen) == 4 + 6 + 4
    assert rows(8, 2, torch.float32) is None


@pytest.mark.parametrize(
    ("facts", "policy"),
    [
        ({}, "nan"),
        ({"finite": 1}, "mean"),
        ({"finite": 2}, None),
        ({"finite": 1, "infinite": 1}, None),
        ({"finite": 1, "masked": True}, None),
        ({"finite": 2, "masked": True, "has_key": True}, "nan"),
        ({"finite": 1, "absorbs": False}, None),
        ({"infinite": 2, "masked": True}, "nan"),
    ],
)
def test_the_policy_once_fills_join_the_mask(facts: dict[str, Any], policy: str | None) -> None:
    given = {"finite": 0, "infinite": 0, "masked": False, "absorbs": True, "has_key": False}
    assert of_mask("nan", **{**given, **facts}) == policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_a_fill_absorbs_changes_nothing(dtype: torch.dtype) -> None:
    fill = float(torch.finfo(dtype).min)
    for bound in (1.0, 1e3, 1e30):
        moved = torch.tensor([fill + 0.0], dtype=dtype)
        if bound <= torch.finfo(dtype).max and absorbs(fill, bound, dtype):
            for term in (bound, -bound):
                assert torch.equal(moved + torch.tensor([term], dtype=dtype), moved)
    assert absorbs(fill, 1.0, dtype)
    assert not absorbs(-1e4, 100.0, dtype)
