"""Rows of the int8 bench that are measured alone stand beside the earlier ones, if like them."""

from __future__ import annotations

from typing import Any

import pytest

from bench.quantized import in_place, kept_rows

HERE = {"processor": "A", "cores": 2, "packages": {"torch": "2"}, "commit": "new"}
TOLD = {"layers": 2, "threads": 1}


def row(workload: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"workload": workload, "kind": kind, **more}


def test_a_row_takes_the_place_of_its_like() -> None:
    kept = [row("vit", "random", commit="old"), row("bert_padded", "peaked", commit="old")]
    new = [row("llama_prefill", "random", commit="new"), row("vit", "random", commit="new")]
    assert in_place(kept, new) == [kept[1], new[1], new[0]]


@pytest.mark.parametrize(
    "other",
    [{}, {"processor": "B"}, {"cores": 4}, {"packages": {"torch": "3"}}],
)
def test_rows_of_another_machine_go(other: dict[str, Any]) -> None:
    earlier = {**TOLD, "rows": [row("t5", "random")], "measured_on": {**HERE, "commit": "old"}}
    here = {**HERE, **other}
    assert kept_rows(earlier, TOLD, here) == ([] if other else [row("t5", "random", commit="old")])


@pytest.mark.parametrize("other", [{"layers": 4}, {"threads": 2}])
def test_rows_measured_otherwise_go(other: dict[str, int]) -> None:
    earlier = {**TOLD, "rows": [row("t5", "random")], "measured_on": HERE}
    assert kept_rows(earlier, {**TOLD, **other}, HERE) == []
