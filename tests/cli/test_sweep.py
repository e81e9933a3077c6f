"""`attngraph sweep`: many compiles, their results in one folder, resumed where they stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attngraph.cli import sweep
from attngraph.cli.sweep import attempt, flags
from attngraph.sweeping.records import REFUSED, RIGHT

SPEC = """
[options]
verify = "off"

[[models]]
name = "whole"
factory = "user_models:attention"

[[models]]
name = "none"
factory = "user_models:nothing"
"""


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The attempts are made in this process; the names of those that were made."""
    made: list[str] = []

    def run(attempt: Any, trials: Any, **how: Any) -> Any:
        for arguments, _ in trials:
            made.append(arguments[0])
            yield attempt(*arguments)

    monkeypatch.setattr(sweep, "on_this_machine", run)
    return made


def test_every_flag_of_optimize_may_stand_in_a_spec() -> None:
    found = flags()
    assert found["target"] == "value"
    assert found["exact"] == found["decode"] == "switch"
    assert found["dim"] == found["assume"] == "list"
    assert not {"output", "json", "debug", "report", "help"} & found.keys()


def test_it_compiles_each_and_goes_on_where_it_stopped(
    attngraph: Any, here: Path, in_process: list[str]
) -> None:
    (here / "spec.toml").write_text(SPEC)
    ran = attngraph("sweep", "spec.toml", "-o", "out")
    assert ran.code == 1
    assert in_process == ["whole", "none"]
    assert "1 of 2 tasks right" in ran.out
    assert "✗ none: " in ran.out
    written = {str(p.relative_to(here / "out")) for p in (here / "out").rglob("*") if p.is_file()}
    results = {"sweep.json", "whole/model.onnx", "whole.html", "whole.json"}
    assert written - {".sweep.lock"} == results
    in_process.clear()
    ran = attngraph("sweep", "spec.toml", "-o", "out", "--json")
    records = json.loads(ran.out)
    assert in_process == ["none"]
    assert [record["outcome"] for record in records] == [RIGHT, REFUSED]
    assert records[0]["parity"] is None
    assert records[0]["bytes"] == (here / "out" / "whole" / "model.onnx").stat().st_size
    in_process.clear()
    attngraph("sweep", "spec.toml", "-o", "out", "--again")
    assert in_process == ["whole", "none"]


def test_a_model_is_compiled_as_optimize_does(here: Path) -> None:
    line = ("--factory", "user_models:attention")
    record = attempt("own", line, str(here / "out" / "own" / "model.onnx"), str(here), 1)
    assert record["outcome"] == RIGHT
    assert 0 <= record["parity"] <= 1
    assert record["nodes"] == json.loads((here / "out" / "own.json").read_text())["nodes"]


@pytest.mark.parametrize(
    ("line", "code", "sentence"),
    [
        (("spec.toml", "-o", "out"), 2, "spec.toml can't be read"),
        (("good.toml", "-o", "out", "--ray", "auto", "--jobs", "2"), 2, "--jobs is for this"),
        (("good.toml", "-o", "good.toml"), 9, "good.toml can't be written"),
    ],
)
def test_a_line_that_is_wrong_is_refused(
    line: tuple[str, ...], code: int, sentence: str, attngraph: Any, here: Path
) -> None:
    (here / "good.toml").write_text(SPEC)
    ran = attngraph("sweep", *line)
    assert ran.code == code
    assert sentence in ran.sentence


@pytest.mark.slow
def test_in_processes_of_their_own(attngraph: Any, here: Path) -> None:
    (here / "spec.toml").write_text(SPEC.replace("nothing", "dynamic"))
    ran = attngraph("sweep", "spec.toml", "-o", "out", "--jobs", "2")
    assert ran.code == 0, ran.err
    assert "2 of 2 tasks right" in ran.out
