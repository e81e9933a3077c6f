"""`make bench-quick` fails below a bar, and says nothing on a busy machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attngraph.export.families import FAMILIES
from attngraph.measuring.contest import Contest, Row, engines_named
from attngraph.measuring.load import Load
from bench import page, quick
from bench.quick import BARS, Bar, misses
from bench.workloads import BY_NAME

QUIET, BUSY = Load(0.01), Load(0.4)


def contest(theirs: list[float], load: Load = QUIET, **more: Any) -> Contest:
    """Ours takes a millisecond each time."""
    ours = Row("attngraph", "attngraph", ms=[1.0] * len(theirs), error=0.01)
    other = Row("onnx", "torch.onnx.export", ms=theirs, error=0.02)
    for name, value in more.items():
        setattr(ours, name, value)
    return Contest([ours, other], [], 2, load)


@pytest.mark.parametrize(
    ("found", "bar", "missed"),
    [
        (contest([1.2, 1.3, 9.0]), Bar("w", "onnx", 1.25), False),
        (contest([1.2, 1.2, 9.0]), Bar("w", "onnx", 1.25), True),
        (contest([2.0, 2.0]), Bar("w", "onnx", 1.0, error=0.5), False),
        (contest([2.0, 2.0]), Bar("w", "onnx", 1.0, error=0.4), True),
        (contest([2.0, 2.0], error=None), Bar("w", "onnx", 1.0, error=0.5), True),
        (contest([2.0], status="out of parity", reason="off"), Bar("w", "onnx", 1.0), True),
    ],
)
def test_a_ratio_below_its_bar_is_missed(found: Contest, bar: Bar, missed: bool) -> None:
    ((answer, line),) = misses(found, [bar])
    assert answer == missed
    assert "onnx" in line


@pytest.mark.parametrize(
    ("before", "during", "ratio", "code"),
    [
        (QUIET, QUIET, 2.0, 0),
        (QUIET, QUIET, 0.5, 1),
        (BUSY, QUIET, 2.0, 2),
        (QUIET, BUSY, 0.5, 2),
        (QUIET, Load(None), 2.0, 2),
    ],
)
def test_a_busy_machine_gets_no_verdict(
    before: Load,
    during: Load,
    ratio: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(quick, "BARS", (Bar("per_head", "onnx", 1.0),))
    monkeypatch.setattr(quick, "before", lambda: before)
    monkeypatch.setattr(quick, "hold", lambda *_, **__: contest([ratio] * 3, during))
    monkeypatch.setenv("BENCH_LAYERS", "")
    monkeypatch.setenv("BENCH_TINY", "")
    assert quick.main([]) == code
    assert ("No verdict" in capsys.readouterr().out) == (code == 2)


def test_what_is_not_done_in_time_gets_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quick, "BARS", (Bar("per_head", "onnx", 1.0),))
    monkeypatch.setattr(quick, "before", lambda: QUIET)
    monkeypatch.setenv("BENCH_LAYERS", "")
    monkeypatch.setenv("BENCH_TINY", "1")
    monkeypatch.chdir(tmp_path)
    assert quick.main(["--minutes", "0"]) == 2
    assert "per_head was not done after 0 minutes" in capsys.readouterr().out


def test_a_machine_that_is_busy_to_begin_with_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quick, "before", lambda: BUSY)
    monkeypatch.setattr(quick, "hold", lambda *_, **__: pytest.fail("it was measured"))
    assert quick.main([]) == 2


def test_bars_are_of_workloads_and_engines_that_exist() -> None:
    assert {bar.workload for bar in BARS} <= {*BY_NAME}
    engines_named([name for bar in BARS for name in (bar.theirs, bar.ours)])


def _result(title: str, theirs: float) -> dict[str, Any]:
    rows = [
        {"engine": name, "title": name, "ms": [ms], "median_ms": ms, "parity": {"error": 0}}
        for name, ms in (("attngraph", 1.0), ("eager", theirs), ("onnx", 2 * theirs))
    ]
    return {"title": title, "rows": rows}


def test_the_weakest_family_is_the_headline_and_none_is_left_out() -> None:
    wide, narrow = FAMILIES[0], FAMILIES[-1]
    families = {
        wide: {"a": _result("A", 1.1), "b": _result("B", 1.3)},
        narrow: {"a": _result("A", 1.05)},
    }
    assert page.weakest(families) == narrow
    table = page.headline(families)
    assert table[0] == f"| workload | {wide} | {narrow} |"
    assert table[2:] == [
        "| A | 1.10 (eager) | 1.05 (eager) |",
        "| B | 1.30 (eager) | not measured |",
    ]


def test_a_workload_that_one_family_lacks_says_nothing_of_which_is_weaker() -> None:
    wide, narrow = FAMILIES[0], FAMILIES[-1]
    families = {
        wide: {"a": _result("A", 1.1)},
        narrow: {"a": _result("A", 1.05), "b": _result("B", 9.0)},
    }
    assert page.weakest(families) == narrow
    apart = {wide: {"a": _result("A", 1.1)}, narrow: {"b": _result("B", 9.0)}}
    assert page.weakest(apart) == wide
