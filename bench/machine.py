"""What a figure was measured on: machine, versions, commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "transformers", "onnxruntime-gpu", "onnxruntime", "onnx", "onnx-ir")


def describe() -> dict[str, Any]:
    """Processor, cores, package versions and commit; a `+` marks uncommitted changes."""
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "commit": _commit(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    def git(*arguments: str) -> str:
        found = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return found.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def write(name: str, results: dict[str, Any]) -> Path:
    """Saves results as bench/results/<name>.json, with the machine they come from."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"measured_on": describe(), **results}, indent=1) + "\n")
    return path
