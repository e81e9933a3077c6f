"""docs/remarks.md has an entry for each code that anything gives, and for no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "remarks.md"
FOLDERS = (ROOT / "attngraph" / "analysis", ROOT / "passes")
_CODE_POSITION = {"Declined": 0, "Remark": 1}
_ENTRY = re.compile(r"^### `([^`]+)`$", re.MULTILINE)


def _calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node


def _code(name: str, call: ast.Call) -> ast.expr:
    named = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
    return named[0] if named else call.args[_CODE_POSITION[name]]


def _codes() -> dict[str, str]:
    """Each code, and a place that gives it."""
    found: dict[str, str] = {}
    for path in sorted(path for folder in FOLDERS for path in folder.rglob("*.py")):
        for name, call in _calls(path):
            if name not in _CODE_POSITION:
                continue
            code, place = _code(name, call), f"{path.relative_to(ROOT)}:{call.lineno}"
            if isinstance(code, ast.Attribute) and code.attr == "code":
                continue  # handed on from a Declined
            assert isinstance(code, ast.Constant), f"{place}: write the code as a string here"
            found.setdefault(code.value, place)
    return found


def test_every_code_has_one_entry_and_every_entry_a_code() -> None:
    entries = _ENTRY.findall(PAGE.read_text(encoding="utf-8"))
    assert len(entries) == len(set(entries))
    codes = _codes()
    assert not codes.keys() - set(entries), "not in docs/remarks.md: " + ", ".join(
        f"{code} ({place})" for code, place in codes.items() if code not in entries
    )
    assert not set(entries) - codes.keys(), "in docs/remarks.md, but nothing gives it"


def test_codes_are_words_joined_by_dashes() -> None:
    assert not [code for code in _codes() if not re.fullmatch(r"[a-z]+(-[a-z]+)*", code)]
