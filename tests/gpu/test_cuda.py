"""On a GPU: every model of the suite is right in every precision, on the kernels of the table."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.gpu.checks import NAMES, PRECISIONS, examine, faults, target, why_not

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not())]

each = pytest.mark.parametrize("precision", PRECISIONS)
of = pytest.mark.parametrize("case", NAMES)


@functools.cache
def _found(case: str, precision: str) -> dict[str, Any]:
    return examine(case, precision, target())


@each
@of
def test_parity(case: str, precision: str) -> None:
    assert faults(_found(case, precision), kernels=False) == []


@each
@of
def test_kernels_are_those_of_the_table(case: str, precision: str) -> None:
    found = _found(case, precision)
    assert "expected" in found.get("dispatch", {}), found
    assert faults(found) == []
