"""What the test suite says in other interpreters: bench/results/versions.json.

python -m bench.versions [--quick] PYTHON [PART ...]

PYTHON is an interpreter with the packages of `.[dev]` installed; PART is a folder of tests, all of
them if none is given. Results of other parts and interpreters stay as they are. --quick leaves out
what is marked slow, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.machine import RESULTS

ROOT = Path(__file__).parents[1]
FILE = RESULTS / "versions.json"
_DESCRIBE = "import json; from bench.machine import describe; print(json.dumps(describe()))"


def parts() -> list[str]:
    """The folders of tests that need no other machine or tool."""
    tests = ROOT / "tests"
    folders = sorted({file.relative_to(tests).parts[0] for file in tests.rglob("*/test_*.py")})
    return [name for name in folders if name not in ("gpu", "placement")]


def run(python: Path, part: str, *, quick: bool) -> dict[str, Any]:
    """The numbers of tests that passed, failed and were skipped. Raises SystemExit without any."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.xml"
        options = ["-q", "-n", "1", "-p", "no:cacheprovider", f"--junitxml={file}"]
        options += ["-m", "not slow"] if quick else []
        command = [str(python), "-m", "pytest", *options, f"tests/{part}"]
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if not file.exists():
            raise SystemExit(f"{' '.join(command)} ran no test; see what it printed.")
        (suite,) = ElementTree.parse(file).getroot()
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    return {
        "passed": count["tests"] - failed - count["skipped"],
        "failed": failed,
        "skipped": count["skipped"],
        "quick": quick,
    }


def rows() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(Python, torch, results by part) of each interpreter that was measured."""
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in sorted(found):
        python, torch = name.split()
        yield python, torch, found[name]


def page() -> str:
    """The table of the documentation."""
    lines = ["| Python | torch | passed | skipped | failed | folders |", "| --- | --- " * 3 + "|"]
    for python, torch, results in rows():
        sums = [sum(part[key] for part in results.values()) for key in _SHOWN]
        numbers = " | ".join(map(str, sums))
        folders = ", ".join(name + "*" * results[name]["quick"] for name in sorted(results))
        lines.append(f"| {python} | {torch} | {numbers} | {folders} |")
    if any(part["quick"] for _, _, results in rows() for part in results.values()):
        lines += ["", "\\* without the tests marked slow"]
    return "\n".join(lines) + "\n"


_SHOWN = ("passed", "skipped", "failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("python", type=Path)
    parser.add_argument("parts", nargs="*", choices=[*parts(), []])
    chosen = parser.parse_args()
    told = subprocess.run(
        [chosen.python, "-c", _DESCRIBE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    about = json.loads(told.stdout)
    key = f"{about['python']} {about['packages']['torch']}"
    for part in chosen.parts or parts():
        ran = run(chosen.python, part, quick=chosen.quick)
        found = {**ran, "commit": about["commit"], "date": about["date"]}
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        known.setdefault(key, {})[part] = found
        FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
