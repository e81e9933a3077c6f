"""Checks of paths, without torch and onnxruntime: can the file be read, or written?"""

from __future__ import annotations

from pathlib import Path

from attngraph.errors import LoadError, OutputError


def require_file(path: Path) -> None:
    """Raises LoadError where there is no ONNX file, or it is out of reach."""
    try:
        found = path.is_file()
    except OSError as error:
        raise LoadError(f"The ONNX file {str(path)!r} can't be read: {error.strerror}.") from error
    if not found:
        raise LoadError(f"There is no ONNX file {str(path)!r}; check the path.")


def require_place(path: Path) -> None:
    """Raises OutputError where no file can be written: over a folder or device, or in no folder."""
    try:
        if path.is_dir():
            raise OutputError(f"{path} is a folder; give the name of a file to write.")
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is a device or a pipe; give the name of a file to write.")
        if not path.parent.is_dir():
            raise OutputError(
                f"There is no folder {path.parent}; create it or choose another path."
            )
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> OutputError:
    """An error of the operating system, as one for the user."""
    reason = error.strerror or str(error)
    return OutputError(f"{path} can't be written: {reason}; choose another path.")


def data_beside(path: Path) -> Path:
    """The file of an ONNX file's weights, under the name that optimum gives it and transformers.js
    looks for.
    """
    return path.with_name(f"{path.name}_data")
