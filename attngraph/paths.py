"""Checks of paths, without torch and onnxruntime: can the file be read, or written?"""

from __future__ import annotations

import stat
from pathlib import Path

from attngraph.errors import LoadError, OutputError


def require_file(path: Path) -> None:
    """Raises LoadError where there is no ONNX file, or it is out of reach."""
    try:
        found = stat.S_ISREG(_mode(path))
    except OSError as error:
        raise LoadError(f"The ONNX file {str(path)!r} can't be read: {error.strerror}.") from error
    if not found:
        raise LoadError(f"There is no ONNX file {str(path)!r}; check the path.")


def require_place(path: Path) -> None:
    """Raises OutputError where no file can be written: over a folder or device, or in no folder."""
    try:
        mode = _mode(path)
        if stat.S_ISDIR(mode):
            raise OutputError(f"{path} is a folder; give the name of a file to write.")
        if mode and not stat.S_ISREG(mode):
            raise OutputError(f"{path} is a device or a pipe; give the name of a file to write.")
        if not stat.S_ISDIR(_mode(path.parent)):
            raise OutputError(
                f"There is no folder {path.parent}; create it or choose another path."
            )
    except OSError as error:
        raise unwritable(path, error) from error


def _mode(path: Path) -> int:
    """What stands at a path, as `stat` has it; 0 where nothing does.

    Raises OSError where that can't be told, which pathlib's own questions answer with no from
    Python 3.14 on.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def unwritable(path: Path, error: OSError) -> OutputError:
    """An error of the operating system, as one for the user."""
    reason = error.strerror or str(error)
    return OutputError(f"{path} can't be written: {reason}; choose another path.")


def data_beside(path: Path) -> Path:
    """The file of an ONNX file's weights, under the name that optimum gives it and transformers.js
    looks for.
    """
    return path.with_name(f"{path.name}_data")
