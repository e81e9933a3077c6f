"""The journeys of docs/architecture.md pass through files and functions that exist, and few."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = {"From safetensors to external data": 10, "From a traced mask to an Attention input": 12}
ROW = re.compile(r"\| (\S+\.py) \| (`.+`) \| .+ \|")


def _rows(title: str) -> list[tuple[str, list[str]]]:
    """(file, names) of each step of a journey."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = text.partition(f"### {title}\n")[2].partition("\n#")[0]
    return [(file, re.findall(r"`(\w+)`", names)) for file, names in ROW.findall(section)]


def _defined(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name


@pytest.mark.parametrize("title", LONGEST)
def test_a_journey_names_what_is_there_and_is_short(title: str) -> None:
    rows = _rows(title)
    assert 3 < len(rows) <= LONGEST[title]
    for file, names in rows:
        assert names
        assert set(names) <= set(_defined(ROOT / file)), file
