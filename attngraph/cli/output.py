"""The output path: checked before any work is done, and written to afterwards."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attngraph.errors import UsageError
from attngraph.paths import data_beside, require_place, unwritable


def check_output(path: Path, inputs: tuple[Path | None, ...]) -> None:
    """Raises OutputError where `path` can't be written, UsageError where it is one of `inputs`."""
    require_place(path)
    for source in inputs:
        if source is not None and _same(path, source):
            raise UsageError(f"{path} is also what another option names; choose another path.")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise unwritable(path, error) from error


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:  # one of them doesn't exist
        return path.absolute() == other.absolute()


def write_page(path: Path, text: str) -> None:
    """Writes a text file whole or not at all. Raises OutputError."""
    # It brings torch along, which has been loaded by the time there is something to write.
    from attngraph.export.files.save import write_text

    write_text(path, text)


def written_bytes(path: Path, weight_bytes: int) -> int:
    """The size of a saved model, with the file of its weights where it has one."""
    size = path.stat().st_size
    data = data_beside(path)
    return size + data.stat().st_size if size < weight_bytes and data.exists() else size
