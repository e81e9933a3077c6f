"""ONNX files on the disk, as far as it takes neither torch nor onnxruntime."""

from __future__ import annotations

from pathlib import Path

from attngraph.errors import LoadError


def require_file(path: Path) -> None:
    """Raises LoadError where there is no file."""
    if not path.is_file():
        raise LoadError(f"There is no ONNX file {str(path)!r}.")
