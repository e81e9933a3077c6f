"""Which answer a loop goes on by is read off the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngraph.frontend.watching.statements import goes_on_if


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("while x.any():\n    x = f(x)", True),
        ("while not x.all():\n    x = f(x)", False),
        ("while not (not x.all()):\n    x = f(x)", True),
        ("while (i < n) & x.any():\n    i += 1", True),
        ("while i < n and x.any():\n    i += 1", None),
        ("while x.any():\n    if i > n: break\n    i += 1", None),
        ("while x.any():\n    if i > n: raise ValueError\n    i += 1", None),
        ("for i in range(n):\n    x = f(x)", None),
        ("if x.any():\n    x = f(x)", None),
        ("while", None),
    ],
)
def test_the_condition_of_a_loop(tmp_path: Path, code: str, expected: bool | None) -> None:
    file = tmp_path / "model.py"
    file.write_text(code)
    assert goes_on_if(str(file), 1) is expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("while True:\n    x = f(x)\n    if x.all(): break", False),
        ("while 1:\n    x = f(x)\n    if not x.all(): return x", True),
        ("while True:\n    if i > n: break\n    if x.all(): break", None),
        ("while True:\n    x = f(x)\n    if x.all(): x = g(x)", None),
        ("while True:\n    x = f(x)\n    if x.all() or i > n: break", None),
        ("while i < n:\n    x = f(x)\n    if x.all(): break", None),
    ],
)
def test_the_only_way_out_of_a_loop(tmp_path: Path, code: str, expected: bool | None) -> None:
    file = tmp_path / "model.py"
    file.write_text(code)
    assert goes_on_if(str(file), 3) is expected
