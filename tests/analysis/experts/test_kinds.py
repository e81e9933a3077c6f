"""What sums, products and gathers make of what a mixture of experts computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attngraph.analysis.experts.kinds import (
    Kind,
    Rows,
    SwitchError,
    What,
    gathered,
    multiplied,
    summed,
)

FEATURES, WEIGHTS = Rows(features=1), Rows(weights=1)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ([FEATURES, Kind.FIXED], FEATURES),
        ([FEATURES, WEIGHTS], Rows(weights=1, features=1)),  # no more than either may be
        ([FEATURES, Kind.MATCH], Rows(matches=1, features=1)),
        ([Kind.FIXED, Kind.FIXED], Kind.FIXED),
        ([Kind.PLACE, Kind.FIXED], Kind.PLACE),
        ([Kind.PLACE, Kind.COUNT], Kind.COUNT),
        ([Kind.CHOSEN], Kind.CHOSEN),
    ],
)
def test_sums(given: list[What], made: What) -> None:
    assert summed(given) == made


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ([FEATURES, Kind.FIXED], FEATURES),
        ([FEATURES, WEIGHTS], Rows(weights=1, features=1)),
        ([FEATURES, WEIGHTS, Kind.MATCH], Rows(1, 1, 1)),
        ([Kind.MATCH, Kind.FIXED], Kind.MATCH),
        ([], Kind.FIXED),
    ],
)
def test_products(given: list[What], made: What) -> None:
    assert multiplied(given) == made


@pytest.mark.parametrize(
    ("rule", "given"),
    [
        (summed, [FEATURES, Kind.CHOSEN]),  # a row plus the number of an expert
        (summed, [Kind.CHOSEN, Kind.FIXED]),  # the expert after the one that was chosen
        (summed, [Kind.CHOSEN, Kind.PLACE]),
        (multiplied, [FEATURES, FEATURES]),  # a square of rows
        (multiplied, [WEIGHTS, WEIGHTS]),  # a weight that counts twice
        (multiplied, [Kind.MATCH, Kind.MATCH, FEATURES]),
        (multiplied, [Kind.PLACE, FEATURES]),
        (multiplied, [Kind.MATCH, Kind.MATCH]),
    ],
)
def test_what_may_switch_is_refused(rule: Callable[[list[What]], What], given: list[What]) -> None:
    with pytest.raises(SwitchError):
        rule(given)


def test_gathers() -> None:
    assert gathered(Kind.FIXED, [Kind.CHOSEN]) is Kind.MATCH  # a table by the chosen experts
    assert gathered(FEATURES, [Kind.PLACE]) == FEATURES  # rows by their places
    assert gathered(WEIGHTS, [Kind.PLACE, Kind.CHOSEN]) == Rows(weights=1, matches=1)
    for source, indices in [
        (Kind.FIXED, [Kind.PLACE]),  # a table of what comes at which place
        (FEATURES, [FEATURES]),
        (FEATURES, [Kind.SIZED]),
        (Rows(matches=1), [Kind.CHOSEN]),
    ]:
        with pytest.raises(SwitchError):
            gathered(source, indices)
