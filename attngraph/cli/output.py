"""The output path, before any work is done and after."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attngraph.errors import OutputError, UsageError


def check_output(path: Path, inputs: tuple[Path | None, ...]) -> None:
    """Raises OutputError where `path` can't be written, UsageError where it is one of `inputs`."""
    if path.is_dir():
        raise OutputError(f"{path} is a folder; give the name of a file to write.")
    for source in inputs:
        if source is not None and _same(path, source):
            raise UsageError(f"{path} is also what another option names; choose another path.")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except FileNotFoundError as error:
        raise OutputError(
            f"There is no folder {path.parent}; create it or choose another path."
        ) from error
    except OSError as error:
        raise OutputError(
            f"{path} can't be written: {error.strerror}; choose another path."
        ) from error


def _same(path: Path, other: Path) -> bool:
    if path.exists() and other.exists():
        return path.samefile(other)
    return path.absolute() == other.absolute()


def write_page(path: Path, text: str) -> None:
    """Writes a text file whole or not at all. Raises OutputError."""
    from attngraph.export.save import whole_file

    try:
        with whole_file(path) as temporary:
            temporary.write_text(text, "utf-8")
    except OSError as error:
        raise OutputError(
            f"{path} can't be written: {error.strerror}; choose another path."
        ) from error


def written_bytes(path: Path, weight_bytes: int) -> int:
    """The size of a saved model, with the file of its weights where it has one."""
    size = path.stat().st_size
    data = path.with_name(f"{path.name}.data")
    return size + data.stat().st_size if size < weight_bytes and data.exists() else size
