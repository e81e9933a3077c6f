"""What tests name of the package is there, in those too that make test leaves out.

A function that moves to another file leaves `monkeypatch.setattr(module, "_name", …)` behind, which
only running that test would show.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("test_*.py"))


def _modules(tree: ast.AST) -> dict[str, ModuleType]:
    """The modules of attngraph that a file imports, by the names it gives them."""
    found: dict[str, ModuleType] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("attngraph"):
            continue
        for alias in node.names:
            owner = importlib.import_module(str(node.module))
            value = getattr(owner, alias.name, None)
            if isinstance(value, ModuleType):
                found[alias.asname or alias.name] = value
    return found


def _named(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """(module's name, what is read or replaced of it, line) for each place of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr, node.lineno
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("setattr", "delattr")
            and len(node.args) > 1
            and isinstance(node.args[0], ast.Name)
            and isinstance(node.args[1], ast.Constant)
            and not any(option.arg == "raising" for option in node.keywords)
        ):
            yield node.args[0].id, str(node.args[1].value), node.lineno


def _missing(source: str) -> list[str]:
    tree = ast.parse(source)
    modules = _modules(tree)
    return [
        f"line {line}: {modules[module].__name__} has no {name}"
        for module, name, line in _named(tree)
        if module in modules and not hasattr(modules[module], name)
    ]


def test_what_tests_name_of_the_package_is_there() -> None:
    missing = {
        path.relative_to(TESTS).as_posix(): lines
        for path in FILES
        if (lines := _missing(path.read_text(encoding="utf-8")))
    }
    assert not missing


@pytest.mark.parametrize("line", ['monkeypatch.setattr(moved, "_gone", 1)', "moved.gone()"])
def test_a_name_that_moved_is_found(line: str) -> None:
    assert len(_missing(f"from attngraph import numeric as moved\n{line}")) == 1
    assert not _missing(f"from attngraph import numeric\n{line}")
