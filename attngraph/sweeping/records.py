"""What came of a sweep's tasks, kept in its folder, so that it goes on where it stopped."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attngraph.errors import OutputError
from attngraph.paths import unwritable
from attngraph.scratch import whole_file
from attngraph.sweeping.isolation import Record
from attngraph.sweeping.spec import Task
from attngraph.versions import versions

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two sweeps apart there
    fcntl = None  # type: ignore[assignment]

NAME, _LOCK = "sweep.json", ".sweep.lock"
RIGHT, REFUSED, LOST = "right", "refused", "lost"
"""Compiled and checked; ended with a sentence and an exit code; its process died or was late."""


class Records:
    """The records of a folder, by the names of their tasks. Written whole after each."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / NAME
        self._by_name: dict[str, Record] = {}
        try:
            stored = json.loads(self._path.read_text("utf-8"))
            self._by_name = {record["task"]: record for record in stored["records"]}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OutputError(
                f"{self._path} is no record of a sweep: move it away, or choose another folder."
            ) from error

    def of(self, task: Task) -> Record | None:
        """The record of a task that need not be run: it ended, by the same arguments, of the same
        files, with the same versions, and what it wrote is there. What a factory alone makes is
        tried again where it was refused: its code may have been mended.
        """
        record = self._by_name.get(task.name)
        if record is None or record["outcome"] == LOST or record["made_of"] != made_of(task):
            return None
        stays = task.model is not None
        if record["outcome"] == RIGHT:
            stays = task.output(self._folder).exists()
        return record if stays else None

    def add(self, task: Task, record: Record) -> Record:
        """Keeps what came of a task. Raises OutputError."""
        record = {"task": task.name, **record, "made_of": made_of(task)}
        self._by_name[task.name] = record
        text = json.dumps({"records": list(self._by_name.values())}, indent=1)
        try:
            with whole_file(self._path) as written:
                written.write_text(text + "\n", "utf-8")
        except OSError as error:
            raise unwritable(self._path, error) from error
        return record


def made_of(task: Task) -> dict[str, Any]:
    """What a task's result depends on; the code of a factory isn't looked at."""
    return {"arguments": [*task.arguments], "files": _stamps(task.model), "versions": versions()}


def _stamps(model: str | None) -> list[list[Any]]:
    """Name, size and time of every file of a model."""
    if model is None:
        return []
    path = Path(model)
    with contextlib.suppress(OSError):
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        stats = [(str(file.relative_to(path)), file.stat()) for file in files]
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return []


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes the folder of a sweep and keeps other sweeps out of it. Raises OutputError."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if fcntl is not None:
                # Not the folder itself: who renames files in it locks that.
                handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
                stack.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"Another sweep is at work in {folder}; wait for it, or choose another folder."
            ) from error
        except OSError as error:
            raise unwritable(folder, error) from error
        yield
