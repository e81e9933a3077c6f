"""Variants of one claim, of which `make test` runs some, and `make test-wide` the others."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def some_wide(names: Iterable[str], *, every: int = 2) -> list[ParameterSet]:
    """A parameter for each name: `wide`, but for every second, or `every` so many."""
    return [
        pytest.param(name, id=name, marks=[pytest.mark.wide] if number % every else [])
        for number, name in enumerate(names)
    ]
