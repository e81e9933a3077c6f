"""Which comparisons are said to come near to their tolerance."""

from __future__ import annotations

import pytest
import torch
from torch.testing._comparison import assert_close

from tests.margins import NEAR, watched

_ONE = torch.tensor([0.0, 1.0])


@pytest.mark.parametrize(
    ("off", "tolerances", "is_near"),
    [
        (4e-6, {"rtol": 0, "atol": 1e-5}, True),
        (2e-6, {"rtol": 0, "atol": 1e-5}, False),
        (0.0, {"rtol": 0, "atol": 0}, False),
        (8e-6, {}, True),  # of float32: 1.3e-6 · |x| + 1e-5
        (2e-6, {}, False),
    ],
)
def test_what_is_equal_by_the_tolerances_alone_is_near(
    off: float, tolerances: dict[str, float], is_near: bool
) -> None:
    found: list[tuple[str, object]] = []
    watched(assert_close, 0.3, found)([_ONE], [_ONE + off], **tolerances)
    assert found == ([(NEAR, 0.3)] if is_near else [])


def test_what_is_not_equal_fails_as_before() -> None:
    found: list[tuple[str, object]] = []
    with pytest.raises(AssertionError, match="not close"):
        watched(assert_close, 0.3, found)(_ONE, _ONE + 1, rtol=0, atol=0.5)
    assert not found
