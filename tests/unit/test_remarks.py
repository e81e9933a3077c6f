"""docs/remarks.md has an entry for each code that anything gives, and for no other."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from attngraph.analysis.attention.refusals import Refusal

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "remarks.md"
TABLE = "attngraph/analysis/attention/refusals.py"
FOLDERS = (ROOT / "attngraph" / "analysis", ROOT / "passes")
_ENTRY = re.compile(r"^### `([^`]+)`$", re.MULTILINE)


def _calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    """Each call of a function, and where it is."""
    for path in sorted(path for folder in FOLDERS for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def _codes() -> dict[str, str]:
    """Each code, and a place that gives it."""
    found = {refusal.code: f"{TABLE}: {refusal.name}" for refusal in Refusal}
    calls = [(place, call, 1) for place, call in _calls("Remark")]
    calls += [(place, call, 2) for place, call in _calls("remark_on")]
    for place, call, at in calls:
        named = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
        code = named[0] if named else call.args[at]
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


def test_reasons_stand_in_the_table_alone() -> None:
    assert {place.partition(":")[0] for place, _ in _calls("Declined")} == {TABLE}


def test_each_row_says_something_of_its_own() -> None:
    # Equal rows would be one member of the enum under two names.
    assert len(Refusal.__members__) == len(Refusal)
    said = Counter((refusal.code, refusal.sentence) for refusal in Refusal)
    assert max(said.values()) == 1
    assert all(re.search(r"[.}]$", refusal.sentence) for refusal in Refusal)


def test_every_row_is_given_somewhere() -> None:
    source = "".join(
        path.read_text(encoding="utf-8") for folder in FOLDERS for path in folder.rglob("*.py")
    )
    assert not [r.name for r in Refusal if not re.search(rf"\bRefusal\.{r.name}\b", source)]
