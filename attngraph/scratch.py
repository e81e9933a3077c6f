"""Scratch folders, which outlive a killed process, and files that are written whole or not at all.

A folder for unfinished work is held by a lock of the operating system, which ends with its process
however that ends. So a folder that isn't locked is a leftover, and whoever works at the same place
next removes it; a process id would say nothing across containers that share a disk.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there, and so no leftover is told from work
    fcntl = None  # type: ignore[assignment]

_ENDING = ".partial"


@contextlib.contextmanager
def scratch_folder(name: str = "attngraph", parent: Path | None = None) -> Iterator[Path]:
    """A new folder `.NAME.….partial` in `parent`, removed at the end of the block.

    Folders of the same name whose process is gone are removed first. `parent` is by default the
    folder of temporary files. Raises OSError where no folder can be made.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_leftovers(name, parent)
    folder, lock = _locked_folder(name, parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextlib.contextmanager
def whole_files(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """New files that take the places of `paths`, in one folder, when the block ends well.

    What isn't written in the block leaves its place alone. The last of `paths` refers to the
    others: where several are written, it is the first to go and the last to come, and no other
    process renames in that folder meanwhile. So whoever dies in between leaves nothing that refers
    to files of another time.
    """
    *_, main = paths
    with scratch_folder(main.name, main.parent) as folder:
        written = tuple(folder / path.name for path in paths)
        yield written
        ready = [(new, path) for new, path in zip(written, paths, strict=True) if new.exists()]
        with _alone_in(main.parent):
            old = folder / f"{main.name}.old"
            if len(ready) > 1 and main.exists():
                os.replace(main, old)
            try:
                os.replace(*ready[0])
            except OSError:
                if old.exists():
                    os.replace(old, main)
                raise
            for new, path in ready[1:]:
                os.replace(new, path)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A new file that takes `path`'s place when the block ends well, else is removed."""
    with whole_files(path) as (written,):
        yield written


def _locked_folder(name: str, parent: Path) -> tuple[Path, int | None]:
    """A folder and the descriptor that holds it; None where the file system has no locks."""
    while True:
        folder = parent / f".{name}.{secrets.token_hex(4)}{_ENDING}"
        folder.mkdir(mode=0o700)  # in /tmp, weights are nobody else's to read
        if fcntl is None:
            return folder, None
        try:
            lock = _lock(folder)
        except OSError:
            return folder, None
        if lock is not None:
            return folder, lock
        # Before it was locked, another process took it for a leftover.


def _remove_leftovers(name: str, parent: Path) -> None:
    if fcntl is None:
        return
    with contextlib.suppress(OSError):  # without locks, or without the right to list or remove
        for entry in list(os.scandir(parent)):
            is_ours = entry.name.startswith(f".{name}.") and entry.name.endswith(_ENDING)
            lock = _lock(Path(entry.path)) if is_ours and entry.is_dir() else None
            if lock is not None:
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder; None where another process does, or it is gone.

    Raises OSError where the file system has no locks.
    """
    try:
        held = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(held), os.stat(folder)):
            return held
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(held)
        raise
    os.close(held)
    return None


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Waits until no other process renames files in this folder; without locks it goes on.

    A scratch folder is its own process's alone, and held by it already.
    """
    if fcntl is None or folder.name.endswith(_ENDING):
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
