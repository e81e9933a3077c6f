"""What is installed, as `--version` and the report say it. Imports none of it."""

from __future__ import annotations

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("torch", "onnxruntime-gpu", "onnxruntime")


def own_version() -> str:
    """attngraph's; `0+source` where it runs from its files and is not installed."""
    try:
        return version("attngraph")
    except PackageNotFoundError:
        return "0+source"


def versions() -> dict[str, str]:
    """Versions of attngraph, Python, torch and onnxruntime, as far as they are installed."""
    found = {"attngraph": own_version(), "Python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
