"""Unfinished files: what a killed process leaves is removed, what another one holds is not."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attngraph.deployment.folder import place_of
from attngraph.scratch import scratch_folder, whole_file, whole_files

HOLDER = """
import sys, time
from pathlib import Path
from attngraph.scratch import scratch_folder
with scratch_folder("m.onnx", Path(sys.argv[1])) as folder:
    (folder / "half").write_bytes(b"half")
    print(folder, flush=True)
    time.sleep(60)
"""
WRITER = """
import sys
from pathlib import Path
from attngraph.scratch import whole_files
place, own = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
count = 0
while True:
    count += 1
    with whole_files(place / "m.data", place / "m") as (data, main):
        text = f"{own} {count} " * 5000
        data.write_text(text)
        main.write_text(text)
"""
DIES = """
import os, sys
from pathlib import Path
from attngraph.scratch import whole_files
place, left = Path(sys.argv[1]), int(sys.argv[2])
rename = os.replace
def replace(*places):
    global left
    if left == 0:
        os._exit(9)
    left -= 1
    rename(*places)
os.replace = replace
with whole_files(place / "m.data", place / "m") as (data, main):
    data.write_text("new")
    main.write_text("new")
"""


@contextlib.contextmanager
def _started(program: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has said that it is at work; killed at the end of the block."""
    command = [sys.executable, "-c", program, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_a_leftover_of_a_killed_process_is_removed_and_no_living_one(tmp_path: Path) -> None:
    place = str(tmp_path)
    with _started(HOLDER, place) as dead, _started(HOLDER, place):
        assert len(list(tmp_path.iterdir())) == 2
        dead.kill()
        dead.wait()
        assert len(list(tmp_path.iterdir())) == 2, "a kill leaves its folder"
        with scratch_folder("other.onnx", tmp_path):
            assert len(list(tmp_path.iterdir())) == 3, "that of another output is let be"
        with scratch_folder("m.onnx", tmp_path) as own:
            assert own.is_dir()
            assert len(list(tmp_path.iterdir())) == 2
        (left,) = tmp_path.iterdir()
        assert (left / "half").exists()


def test_nothing_but_folders_of_ours_is_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("kept")
    (tmp_path / ".m.onnx.1234.partial").symlink_to(kept)
    (tmp_path / ".m.onnx.file.partial").write_text("a file")
    (tmp_path / ".m.onnx.folder").mkdir()
    with scratch_folder("m.onnx", tmp_path):
        pass
    assert (kept / "file").read_text() == "kept"
    assert len(list(tmp_path.iterdir())) == 4


def test_an_error_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text("old")

    def write() -> None:
        with whole_file(path) as written:
            written.write_text("half")
            raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"):
        write()
    assert [each.name for each in tmp_path.iterdir()] == ["m"]
    assert path.read_text() == "old"


def test_a_file_whose_data_has_no_place_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text("old")
    (tmp_path / "m.data").mkdir()

    def write() -> None:
        with whole_files(tmp_path / "m.data", path) as (data, main):
            data.write_text("new")
            main.write_text("new")

    with pytest.raises(IsADirectoryError):
        write()
    assert path.read_text() == "old"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m", "m.data"]


def test_files_are_whole_in_a_scratch_folder_too(tmp_path: Path) -> None:
    with scratch_folder("m.onnx", tmp_path) as folder:
        with whole_files(folder / "m.data", folder / "m") as (data, main):
            data.write_text("new")
            main.write_text("new")
        assert sorted(os.listdir(folder)) == ["m", "m.data"]


def test_two_threads_may_write_one_file(tmp_path: Path) -> None:
    path, failures = tmp_path / "m", []

    def write(text: str) -> None:
        try:
            for _ in range(50):
                with whole_file(path) as written:
                    written.write_text(text * 1000)
                    assert written.read_text() == text * 1000
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert path.read_text() in ("a" * 1000, "b" * 1000)
    assert [each.name for each in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("renames", "left"),
    [
        (0, {"m": "old", "m.data": "old"}),
        (1, {"m.data": "old"}),
        (2, {"m.data": "new"}),
        (3, {"m": "new", "m.data": "new"}),
    ],
)
def test_a_death_between_two_renames_leaves_no_wrong_pair(
    renames: int, left: dict[str, str], tmp_path: Path
) -> None:
    for name in ("m", "m.data"):
        (tmp_path / name).write_text("old")
    command = [sys.executable, "-c", DIES, str(tmp_path), str(renames)]
    assert subprocess.run(command).returncode == (9 if renames < 3 else 0)
    files = (path for path in tmp_path.iterdir() if path.is_file())
    assert {path.name: path.read_text() for path in files} == left


def test_kills_leave_no_file_beside_data_of_another_time(tmp_path: Path) -> None:
    """Two writers of one pair of files, killed at random moments: the pair is of one or absent."""
    chance = random.Random(0)
    for turn in range(12):
        place, own = str(tmp_path), str(turn)
        with _started(WRITER, place, f"{own}a") as one, _started(WRITER, place, f"{own}b") as other:
            for writer in (one, other):
                time.sleep(chance.uniform(0.0, 0.02))
                writer.kill()
        main, data = tmp_path / "m", tmp_path / "m.data"
        if main.exists():
            assert main.read_text() == data.read_text()
    with whole_files(tmp_path / "m.data", tmp_path / "m") as (data, main):
        data.write_text("last")
        main.write_text("last")
    assert sorted(os.listdir(tmp_path)) == ["m", "m.data"]


FOLDER = """
import sys, time
from pathlib import Path
from attngraph.deployment.folder import place_of
class Part:
    def save(self, path):
        Path(path).write_text("half")
        print("at work", flush=True)
        time.sleep(60)
with place_of(Path(sys.argv[1]), None, parts=True) as place:
    place.write({"model.onnx": Part()}, {})
"""


class _Part:
    def save(self, path: str | Path) -> None:
        Path(path).write_text("whole")


def test_what_a_kill_leaves_of_a_folder_is_removed_by_the_next_call(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with _started(FOLDER, str(out)) as process:
        process.kill()
        process.wait()
    assert not out.exists()
    assert list(tmp_path.iterdir()), "a kill leaves its folder"
    with place_of(out, None, parts=True) as place:
        place.write({"model.onnx": _Part()}, {"config.json": "{}"})
    assert list(tmp_path.iterdir()) == [out]
    assert (out / "model.onnx").read_text() == "whole"
