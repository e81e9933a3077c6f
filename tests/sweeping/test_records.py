"""What is kept of a sweep, and which of its tasks are run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngraph.errors import OutputError
from attngraph.sweeping import records
from attngraph.sweeping.records import LOST, NAME, REFUSED, RIGHT, Records, held
from attngraph.sweeping.spec import Task


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """One whose model is a file and whose result lies in out/."""
    model = tmp_path / "model.pt2"
    model.write_text("weights")
    (tmp_path / "out" / "bert").mkdir(parents=True)
    (tmp_path / "out" / "bert" / "model.onnx").write_text("file")
    return Task("bert", (str(model),), str(model), makes_folder=False)


def test_what_ended_is_kept_and_read_again(task: Task, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert Records(out).of(task) is None
    Records(out).add(task, {"outcome": RIGHT, "nodes": 3})
    found = Records(out).of(task)
    assert found is not None
    assert (found["task"], found["nodes"]) == ("bert", 3)
    assert {path.name for path in out.iterdir()} == {"bert", NAME}


@pytest.mark.parametrize("change", ["model", "arguments", "versions", "output", "process"])
def test_what_changed_is_run_again(
    change: str, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    Records(out).add(task, {"outcome": LOST if change == "process" else RIGHT})
    if change == "model":
        Path(task.arguments[0]).write_text("other weights")
    elif change == "arguments":
        task = Task("bert", (*task.arguments, "--exact"), task.model, makes_folder=False)
    elif change == "versions":
        monkeypatch.setattr(records, "versions", lambda: {"torch": "9"})
    elif change == "output":
        task.output(out).unlink()
    assert Records(out).of(task) is None


def test_a_refusal_stays_where_the_model_is_a_file_and_not_where_it_is_code(
    task: Task, tmp_path: Path
) -> None:
    of_code = Task("own", ("--factory", "my:build"), None, makes_folder=False)
    store = Records(tmp_path / "out")
    for each in (task, of_code):
        store.add(each, {"outcome": REFUSED, "error": "it can't be traced"})
    assert store.of(task) is not None
    assert store.of(of_code) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"records": [{}]}', '{"records": 3}'])
def test_a_file_that_is_no_record_is_left_alone(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(OutputError, match="is no record of a sweep: move it away"):
        Records(tmp_path)
    assert (tmp_path / NAME).read_text() == text


def test_one_sweep_at_a_time_has_a_folder(task: Task, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with held(out):
        Records(out).add(task, {"outcome": RIGHT})
        with pytest.raises(OutputError, match="Another sweep is at work"), held(out):
            pass
    with held(out):
        pass


def test_the_folder_is_made_or_it_is_said_why_not(tmp_path: Path) -> None:
    with held(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can't be written"), held(tmp_path / "file"):
        pass
