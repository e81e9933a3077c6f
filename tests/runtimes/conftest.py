"""The tests of `make runtimes`, which are not collected where the runtimes aren't installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.runtimes.page import RESULTS, Ran, merged, renewed

NEEDS = {
    "test_genai.py": "onnxruntime_genai",
    "test_onnxruntime.py": "onnxruntime_genai",
    "test_openvino.py": "openvino",
    "test_optimum.py": "onnxruntime_genai",
    "test_sentence_transformers.py": "sentence_transformers",
    "test_triton.py": "tritonclient",
    "test_transformers.py": "onnxruntime_genai",
}
RECORDS = bool(os.environ.get("RECORD"))
PART = RESULTS.with_suffix(".part")  # what this run has passed, until it ends


def _beside(name: str) -> list[Path]:
    """What lies beside the runtimes that were installed for the tests, by a pattern."""
    found = importlib.util.find_spec("onnxruntime_genai")
    if found is None or found.origin is None:
        return []
    return sorted(Path(found.origin).parents[1].glob(name))


def optimum_python() -> Path | None:
    """The interpreter of the environment that has optimum."""
    return next(iter(_beside("with-optimum/bin/python")), None)


def wheels() -> list[Path]:
    """The folders of other onnxruntimes."""
    return _beside("onnxruntime-*.*.*")


def node_packages() -> Path | None:
    """The folder whose node_modules hold what tests/runtimes/javascript names."""
    found = next(iter(_beside("javascript/.installed")), None)
    return None if found is None or shutil.which("node") is None else found.parent


def ray_folder() -> Path | None:
    """The folder that holds Ray and what it needs."""
    return next(iter(_beside("ray")), None)


collect_ignore = [
    file for file, needed in NEEDS.items() if importlib.util.find_spec(needed) is None
]
if node_packages() is None:
    collect_ignore.append("test_javascript.py")
if ray_folder() is None:
    collect_ignore.append("test_ray.py")

Record = Callable[[str, str, str], None]


def pytest_sessionstart(session: pytest.Session) -> None:
    """With RECORD set, docs/runtimes.md is made of what passes in this run; what others of the
    runtimes passed before stays where not all are run."""
    if RECORDS and not hasattr(session.config, "workerinput"):
        PART.write_text("{}\n")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not RECORDS or hasattr(session.config, "workerinput"):
        return
    ran = json.loads(PART.read_text())
    PART.unlink()
    chosen = session.config.option.keyword or session.config.option.markexpr
    if chosen or not all(Path(each).is_dir() for each in session.config.args):
        ran = renewed(json.loads(RESULTS.read_text()), ran)
    RESULTS.write_text(json.dumps(ran, indent=1, sort_keys=True) + "\n")


@pytest.fixture(scope="session")
def ran() -> Iterator[Ran]:
    """What has passed, by package, family and check."""
    noted: Ran = {}
    yield noted
    if RECORDS:
        PART.write_text(json.dumps(merged(json.loads(PART.read_text()), noted)))


@pytest.fixture
def record(ran: Ran) -> Record:
    """Notes that a family of models passed a check in a runtime, by its name and version, or by
    the name of its package."""

    def note(runtime: str, family: str, check: str) -> None:
        named = runtime if " " in runtime else f"{runtime} {version(runtime)}"
        ran.setdefault(named, {}).setdefault(family, []).append(check)

    return note
