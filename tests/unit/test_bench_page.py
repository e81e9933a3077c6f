"""What the page of benchmarks calls the fastest other engine."""

from __future__ import annotations

from typing import Any

import pytest

from bench.page import _summary


def _row(engine: str, *ms: float) -> dict[str, Any]:
    parity = {"passed": True}
    return {
        "engine": engine,
        "title": engine,
        "ms": ms,
        "median_ms": sorted(ms)[1],
        "parity": parity,
    }


def test_it_is_the_one_by_which_attngraph_leads_the_least() -> None:
    """Round by round: a machine that was slow in one of them was so for both."""
    rows = [
        _row("eager", 11.0, 24.0, 13.0),  # 1.1, 1.2, 1.3
        _row("compile", 14.0, 21.0, 10.5),  # 1.4, 1.05, 1.05: the larger median
        _row("attngraph", 10.0, 20.0, 10.0),
    ]
    assert _summary({"title": "model", "rows": rows}) == [("model", "compile", pytest.approx(1.05))]


def test_nothing_is_said_without_another_engine() -> None:
    assert _summary({"title": "model", "rows": [_row("attngraph", 1.0, 2.0, 3.0)]}) == []
