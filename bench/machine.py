"""What a figure was measured on: machine, versions, commit."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attngraph.export.families import own_family

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "transformers", "onnxruntime-gpu", "onnxruntime", "onnx", "onnx-ir")


def describe() -> dict[str, Any]:
    """Date, processor, GPU, package versions and commit; a `+` marks uncommitted changes."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.machine(),
        "processor": _processor(),
        "family": own_family(),
        "gpu": _gpu(),
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


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _commit() -> str:
    def git(*arguments: str) -> str:
        try:
            found = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        except OSError:  # a copy of the tree on a machine without git
            return ""
        return found.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    if given := os.environ.get("ATTNGRAPH_COMMIT"):  # of a copy of the tree without its history
        return given
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def told(where: dict[str, Any]) -> str:
    """`describe()` as a sentence."""
    packages = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    parts = [f"Measured on {where['cores']} cores of {where.get('processor') or where['machine']}"]
    parts += [part for part in (where.get("gpu"), where.get("date")) if part]
    parts += [f"Python {where['python']}", packages, f"commit {where['commit']}"]
    return f"{', '.join(parts)}."


def read(name: str) -> dict[str, Any]:
    """What `write` saved under this name."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def was_measured(name: str) -> bool:
    """Whether anything was saved under this name."""
    return (RESULTS / f"{name}.json").exists()


def measured_on(result: dict[str, Any]) -> str:
    """What a result was measured on, as a sentence."""
    return told(result["measured_on"])


def write(name: str, results: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Saves results as bench/results/<name>.json, with the machine they come from."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"measured_on": describe(), **results}, indent=1) + "\n")
    return path
