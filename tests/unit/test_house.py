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


# Files that dispatch on ops: what they list is what they have a rule for, no trait of an op.
OPS_BY_NAME: dict[str, str] = {}
# Files whose sets still have to become traits.
OP_SETS = {
    "attngraph/analysis/branches.py",
    "attngraph/analysis/layout/axes.py",
    "attngraph/analysis/layout/feature_sums.py",
    "attngraph/analysis/layout/generalize.py",
    "attngraph/analysis/layout/index_maps.py",
    "attngraph/analysis/masks/fills.py",
    "attngraph/analysis/masks/propositions.py",
    "attngraph/analysis/masks/reading.py",
    "attngraph/analysis/masks/terms.py",
    "attngraph/analysis/recurrence/unrolled.py",
    "attngraph/analysis/rows/row_wise.py",
    "attngraph/analysis/values/affine.py",
    "attngraph/analysis/values/intervals.py",
    "attngraph/analysis/values/matching.py",
    "attngraph/analysis/values/scalars.py",
    "attngraph/decoding/placing.py",
    "attngraph/frontend/cache.py",
    "attngraph/frontend/functional.py",
    "attngraph/frontend/translate.py",
    "attngraph/ir/ops.py",
    "attngraph/reports/attention_weights.py",
    "export/kernels/facts.py",
    "export/kernels/prologue.py",
    "export/lowering/ops/elementwise.py",
    "export/lowering/ops/reduction.py",
    "export/precision/policy.py",
    "passes/attention/distribute.py",
    "passes/attention/raise_softmax.py",
    "passes/attention/sink_gate.py",
    "passes/attention/sinks.py",
    "passes/attention/stacking/joins.py",
    "passes/attention/stacking/rules.py",
    "passes/attention/stacking/stacking.py",
    "passes/fusion/fuse_norms.py",
    "passes/loops/raise_recurrence.py",
    "passes/loops/stacked.py",
    "passes/rewriting/conditions.py",
    "passes/rewriting/regions.py",
    "passes/rewriting/sparse_products.py",
    "passes/weights/compose_linears.py",
    "passes/weights/fold_norms.py",
    "passes/weights/fold_scales.py",
    "passes/weights/merge_projections.py",
}


def _op_sets(path: Path) -> list[int]:
    """The lines with a collection of two or more names of ops, or one that is put together."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            names = sum(map(_names_an_op, node.elts))
        elif isinstance(node, ast.Dict):
            names = sum(map(_names_an_op, filter(None, node.keys)))
        elif isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp)):
            names = 2 * _names_an_op(node.elt)
        elif isinstance(node, ast.DictComp):
            names = 2 * _names_an_op(node.key)
        else:
            continue
        if names > 1:
            lines.append(node.lineno)
    return lines


def _names_an_op(node: ast.expr) -> bool:
    """Whether it is "aten.add", f"aten.{name}" or "aten." + name."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    if isinstance(node, ast.BinOp):
        node = node.left
    return isinstance(node, ast.Constant) and str(node.value).startswith(("aten.", "attn."))


def test_no_set_of_ops_stands_outside_the_traits() -> None:
    """What an op is stands in attngraph/ir/traits.py, or with the op in the dialect."""
    folders = [ROOT / "attngraph", ROOT / "passes", ROOT / "export"]
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in sorted(files)
        if (lines := _op_sets(path)) and not path.is_relative_to(ROOT / "passes" / "canonical")
    }
    found.pop("attngraph/ir/traits.py")
    wrong = {path: lines for path, lines in found.items() if path not in {*OPS_BY_NAME, *OP_SETS}}
    assert not wrong, "sets of ops: use or add a trait of attngraph/ir/traits.py"
