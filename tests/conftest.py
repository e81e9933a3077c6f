"""Options of the test suite."""

from __future__ import annotations

import pytest
from hypothesis import settings

# Shared machines are slow now and then, and a run must say the same thing twice.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-fixtures",
        action="store_true",
        help="rewrite the expected halves of tests/passes/**/*.ir, then check them as usual",
    )
