"""Each reason that fuse-attention gives for leaving a site has a fixture that shows it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# No input is known for them: "unequal" tells of a defect (test_evidence.py plants one), and heads
# whose number is symbolic are read as batch.
WITHOUT_FIXTURE = {"unequal", "not-evaluated", "heads-dynamic"}


def _given() -> set[str]:
    calls = (
        node
        for folder in (ROOT / "attngraph" / "analysis", ROOT / "passes")
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )
    return {
        call.args[0].value
        for call in calls
        if call.func.id == "Declined" and call.args and isinstance(call.args[0], ast.Constant)
    }


def _shown() -> dict[str, set[str]]:
    """The codes in each file's remarks."""
    folder = ROOT / "tests" / "passes" / "fuse-attention"
    given = r"^# remark: (?:declined|named) \[([a-z-]+)\]"
    return {
        path.stem: set(re.findall(given, path.read_text(), re.M)) for path in folder.glob("*.ir")
    }


def test_each_code_has_a_fixture() -> None:
    given, shown = _given(), set().union(*_shown().values())
    assert len(given) > 15
    assert given - shown == WITHOUT_FIXTURE
    assert shown <= given


def test_a_fixture_named_after_a_code_shows_that_code_alone() -> None:
    for name, codes in _shown().items():
        if name.startswith("declined-"):
            assert codes == {name.removeprefix("declined-")}, name
