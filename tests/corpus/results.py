"""Where the records of the corpora are kept, and what they were made with."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coverage.md"


def write_results(
    path: Path, environment: Mapping[str, str], records: Iterable[Mapping[str, Any]]
) -> None:
    """JSON with a record to a line: small, and a diff shows which rows changed."""
    lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) for record in records]
    head, body = json.dumps(environment), ",\n".join(lines)
    text = f'{{"environment": {head},\n"records": [\n{body}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def environment(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of those packages that are installed, and the machine."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the tree, with a + where files of the compiler differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    compiler = ("attngraph", "passes", "export")
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *compiler])
    return head.stdout.strip() + ("+" if changed.returncode else "")
