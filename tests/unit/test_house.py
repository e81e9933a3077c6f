"""Imports flow one way: ir ← dialect ← analysis ← passes and export; the driver sees them all."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import pytest

import attngraph
from attngraph.passes import make, registered

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "attngraph.ir": ROOT / "attngraph" / "ir",
    "attngraph.dialect": ROOT / "attngraph" / "dialect",
    "attngraph.analysis": ROOT / "attngraph" / "analysis",
    "attngraph.frontend": ROOT / "attngraph" / "frontend",
    "attngraph.passes": ROOT / "passes",
    "attngraph.export": ROOT / "export",
}
ALLOWED = {
    "attngraph.ir": {"attngraph.errors"},
    "attngraph.dialect": {"attngraph.errors", "attngraph.ir"},
    "attngraph.analysis": {"attngraph.errors", "attngraph.ir", "attngraph.dialect"},
    "attngraph.passes": {
        "attngraph.errors",
        "attngraph.ir",
        "attngraph.dialect",
        "attngraph.analysis",
    },
    "attngraph.export": {
        "attngraph.errors",
        "attngraph.inference",
        "attngraph.ir",
        "attngraph.mapped",
        "attngraph.versions",
        "attngraph.dialect",
        "attngraph.analysis",
    },
}


def _imports(path: Path) -> set[str]:
    """The full names that a file imports; `from a import b` counts as a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_layer_imports_only_what_lies_below_it(package: str) -> None:
    files = sorted(FOLDERS[package].rglob("*.py"))
    assert files
    allowed = ALLOWED[package] | {package}
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in _imports(path)
        if _within(name, {"attngraph"}) and not _within(name, allowed)
    }
    assert not wrong


def test_no_pass_imports_a_pass() -> None:
    """What two passes need lies in an analysis, in passes/rewriting or beside them."""
    homes = {inspect.getmodule(make(name)[0]).__name__ for name in registered()}  # type: ignore
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "passes").rglob("*.py"))
        for name in _imports(path)
        if path.name != "__init__.py" and _within(name, homes)
    }
    assert not wrong


def test_nobody_imports_a_second_copy() -> None:
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    files += [path for folder in FOLDERS.values() for path in folder.rglob("*.py")]
    files += (ROOT / "attngraph").glob("*.py")
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in _imports(path)
        if _within(name, {"passes", "export"})
    }
    assert not wrong


def test_neither_name_is_loaded_after_importing_everything() -> None:
    names = [info.name for info in pkgutil.walk_packages(attngraph.__path__, "attngraph.")]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    for package, folder in FOLDERS.items():
        module = sys.modules[package]
        assert module.__file__ is not None
        assert Path(module.__file__).resolve() == folder / "__init__.py"
    assert not {"passes", "export"} & sys.modules.keys()
