"""A result that is out of budget only in rows without a key says what helps."""

from __future__ import annotations

import pytest

from attngraph.compiling.compilation import of_hidden_rows
from attngraph.export.parity.budget import OutputParity, Parity


def _parity(**failed: bool) -> Parity:
    return Parity(
        tuple(
            OutputParity("out", (2, 3), 1e-2, 1e-3, 2e-3, passed=not fails, case=case)
            for case, fails in failed.items()
        ),
        "fp16",
    )


@pytest.mark.parametrize(
    ("failed", "helps"),
    [
        ({"batch=4, a row hidden": True, "batch=2": False}, True),
        ({"batch=4, a row hidden": True, "batch=2": True}, False),
        ({"batch=4, a row hidden": False, "batch=2": True}, False),
        ({"batch=4, a row hidden": False}, False),
    ],
)
def test_only_what_fails_there_alone_is_advised(failed: dict[str, bool], helps: bool) -> None:
    said = of_hidden_rows(_parity(**failed))
    assert bool(said) is helps
    assert all("--assume no-fully-masked-rows" in each for each in said)
