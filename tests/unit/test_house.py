"""Imports flow one way: ir ← dialect ← analysis ← passes and export ← the driver, by floors."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import networkx as nx
import pytest
import torch

import attngraph
from attngraph.passes import make, registered

ROOT = Path(__file__).parents[2]
HOME = ROOT / "attngraph"
LEAVES = (
    "errors",
    "flag",
    "inference",
    "mapped",
    "metadata",
    "numeric",
    "paths",
    "scratch",
    "stages",
    "versions",
)
LAYERS = (
    *LEAVES,
    *("ir", "dialect", "analysis"),
    *("checkpoints", "frontend", "passes", "export"),
    *("options", "keywords", "reports", "optimized", "checks"),
    *("compiling", "decoding", "runtimes", "verification", "measuring", "deployment"),
    *("sweeping", "cli"),
    *("testing", "api", "__init__", "__main__"),
)
"""The folders and files of attngraph, the lowest first: each may import those before it."""
APART = {"frontend", "passes", "export"}
"""Of these none imports another."""
BASE = {
    "ir": {"errors", "metadata"},
    "dialect": {"errors", "ir"},
    "analysis": {"errors", "ir", "dialect", "mapped"},
}
"""What these layers may import, of those before them."""


def _files() -> Iterator[tuple[Path, str]]:
    """Every file of the package, and its module's name."""
    for folder in (HOME, ROOT / "passes", ROOT / "export"):
        for path in sorted(folder.rglob("*.py")):
            if folder is not HOME or not {"passes", "export"} & {*path.relative_to(HOME).parts}:
                parts = path.relative_to(ROOT).with_suffix("").parts
                inside = parts if folder is HOME else ("attngraph", *parts)
                yield path, ".".join(inside[:-1] if inside[-1] == "__init__" else inside)


MODULES = {name: path for path, name in _files()}


def _layer(module: str) -> str:
    """`export` of attngraph.export.lowering.lower; the package's own file is `__init__`."""
    return [*module.split("."), "__init__"][1]


@functools.cache
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


def _within(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _own_imports(path: Path) -> set[str]:
    """The modules of ours that a file imports anywhere: in functions and for types alone, too."""
    found = {name for name in _imports(path) if _within(name, {"attngraph"})}
    return {name if name in MODULES else name.rpartition(".")[0] for name in found}


def test_every_file_has_a_layer() -> None:
    layers = {_layer(name) for name in MODULES}
    assert layers == set(LAYERS), "name the layer of what is new in LAYERS"


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_lies_below_it(layer: str) -> None:
    allowed = BASE.get(layer, {*LAYERS[: LAYERS.index(layer)]} - (APART & {layer} and APART))
    if layer in LEAVES:
        allowed = {"errors", "scratch"}
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for module, path in MODULES.items()
        for name in _own_imports(path)
        if _layer(module) == layer and _layer(name) not in {*allowed, layer}
    }
    assert not wrong


ALGEBRA = ("analysis.values", "analysis.layout.axes", "passes.weights.folding")


@pytest.mark.parametrize("name", [name for name in MODULES if ".passes.weights." in name])
def test_a_pass_of_weights_needs_the_algebra_and_what_every_pass_does(name: str) -> None:
    graph = nx.DiGraph(
        (module, needed) for module, path in MODULES.items() for needed in _own_imports(path)
    )
    known = {f"attngraph.passes.rewriting.{part}" for part in ("checked", "manager")}
    every = known.union(*(nx.descendants(graph, item) for item in known))
    allowed = [f"attngraph.{part}" for part in ALGEBRA]
    assert not {x for x in nx.descendants(graph, name) - every if not _within(x, allowed)}


def test_no_module_and_no_folder_imports_in_a_circle() -> None:
    """Imports in functions and under TYPE_CHECKING count. The analyses are one folder here.

    A package's own file passes on what its folders hold, so it counts as none of them.
    """
    modules, folders = nx.DiGraph(), nx.DiGraph()

    def folder(module: str) -> Path:
        place = MODULES[module]
        if "analysis" in place.parts:
            return HOME / "analysis"
        return place if place.parent == HOME else place.parent

    for module, path in MODULES.items():
        for name in _own_imports(path):
            modules.add_edge(module, name)
            is_facade = "__init__.py" in (path.name, MODULES[name].name) or folder(
                module
            ) == folder(name)
            if not is_facade:
                folders.add_edge(folder(module), folder(name))
    circles = [
        sorted(map(str, circle))
        for graph in (modules, folders)
        for circle in nx.strongly_connected_components(graph)
        if len(circle) > 1
    ]
    assert not circles


def test_an_import_in_a_function_says_why() -> None:
    """Of our own modules: in a comment above the first of several, or by the stage that a command
    enters for it, which says on the terminal that torch is being imported."""
    wrong = []
    for path in MODULES.values():
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if not isinstance(node, (ast.Import, ast.ImportFrom)):
                    continue
                names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                if not any(name and _within(name, {"attngraph"}) for name in names):
                    continue
                above = node.lineno - 2
                while lines[above].lstrip().startswith(("from ", "import ")):
                    above -= 1
                if "#" not in lines[above] and lines[above].strip() != 'stages("import torch")':
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
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
    files += MODULES.values()
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
    for name in ("passes", "export"):
        module = sys.modules[f"attngraph.{name}"]
        assert module.__file__ is not None
        assert Path(module.__file__).resolve() == ROOT / name / "__init__.py"
    assert not {"passes", "export"} & sys.modules.keys()


# Files that name ops for another reason than to say what they are.
NAMES_OPS = {
    "attngraph/analysis/masks/reading.py": "what each comparison and each sum of positions says",
    "attngraph/analysis/rows/batching.py": "the registry of batching rules",
    "attngraph/analysis/values/complex_parts.py": "what has a form on the parts of complex numbers",
    "attngraph/dialect/recurrent.py": "the kinds of cells",
    "attngraph/frontend/files/expressions.py": "what expressions over sizes call",
    "attngraph/frontend/translation/functional.py": "what traces call ops that no graph has",
    "attngraph/frontend/files/pt2_check.py": "what expressions over sizes call",
    "attngraph/frontend/translation/python_numbers.py": "Python's operators on numbers, as ops",
    "attngraph/frontend/rewording/recurrent.py": "the functions of torch that step through time",
    "attngraph/frontend/translation/translate.py": "what traces call ops that no graph has",
    "attngraph/ir/ops.py": "how torch wants to be called",
    "attngraph/ir/traits.py": "the traits",
    "export/lowering/fallback/pointwise_formulas.py": "the registry of formulas",
    "export/lowering/ops/creation.py": "the registry of lowerings",
    "export/lowering/ops/elementwise.py": "the registry of lowerings",
    "export/lowering/ops/reduction.py": "the registry of lowerings",
    "export/parity/half_rounding.py": "what torch's dispatcher calls the ops of a module",
    "passes/rewriting/sparse_products.py": "the axes that each product sums over",
    "export/parity/saturation.py": "what each bounded function is bounded by",
    "export/parity/summation.py": "how each sum over rows is rounded",
}
_OP = re.compile(r"\b(?:aten|attn)\.")
_BARE = frozenset(
    name.removeprefix("aten::").partition(".")[0]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("aten::")
)
_SOME = 3  # bare names in a row that mean ops: one or two are words as well


def _op_sets(tree: ast.AST) -> list[int]:
    """The lines with a collection of two or more names of ops, or one that is put together.

    Three or more names without `aten.` are such a collection too, if all are of ops.
    """
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            names = sum(map(_names_an_op, node.elts)) + _bare(node.elts)
        elif isinstance(node, ast.Dict):
            keys = list(filter(None, node.keys))
            names = sum(map(_names_an_op, keys)) + _bare(keys)
        elif isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp)):
            names = 2 * _names_an_op(node.elt)
        elif isinstance(node, ast.DictComp):
            names = 2 * _names_an_op(node.key)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split()  # of which prose has others too
            names = len(words) * all(map(_OP.match, words))
            names += _bare([ast.Constant(word) for word in words]) * (len(words) > _SOME)
        else:
            continue
        if names > 1:
            lines.append(node.lineno)
    return lines


def _bare(items: Sequence[ast.expr]) -> int:
    """How many items there are, where all are ATen names without their namespace."""
    words = [item.value for item in items if isinstance(item, ast.Constant)]
    is_set = len(items) >= _SOME and len(words) == len(items) and _BARE.issuperset(words)
    return len(items) if is_set else 0


def _names_an_op(node: ast.expr) -> bool:
    """Whether it is "aten.add", f"aten.{name}" or "aten." + name."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    if isinstance(node, ast.BinOp):
        node = node.left
    return isinstance(node, ast.Constant) and _OP.match(str(node.value)) is not None


@pytest.mark.parametrize(
    "source",
    [
        'frozenset(["aten.softmax.int", "aten._softmax"])',
        'node.op in ("aten.add.Tensor", "aten.sub.Tensor")',
        '{"aten.add.Tensor": 1.0, "aten.sub.Tensor": -1.0}',
        'frozenset(f"aten.{name}" for name in "mul div".split())',
        '["aten." + name for name in NAMES]',
        '{f"aten.{name}": rule for name, rule in RULES.items()}',
        '"aten.add.Tensor aten.sub.Tensor".split()',
        'stem in ("permute", "transpose", "mT")',
        '"reshape view squeeze t".split()',
    ],
)
def test_a_set_of_ops_is_found(source: str) -> None:
    assert _op_sets(ast.parse(source)) == [1]


@pytest.mark.parametrize(
    "source",
    [
        'node.op in ADDITIVE or node.op == "aten.neg"',
        'build("aten.add.Tensor", x, build("aten.neg", y))',
        '"aten.add and aten.sub are sums"',
        '("aten.neg", "shape")',
        '("mean", "sum")',
        '"needs dim to equal dim"',
        '("mean", "zero", "nan")',
    ],
)
def test_an_op_that_is_named_is_no_set(source: str) -> None:
    assert not _op_sets(ast.parse(source))


def test_no_set_of_ops_stands_outside_the_traits() -> None:
    """What an op is stands in attngraph/ir/traits.py, or with the op in the dialect."""
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in MODULES.values()
        if (lines := _op_sets(ast.parse(path.read_text(encoding="utf-8"))))
        and not path.is_relative_to(ROOT / "passes" / "canonical")
    }
    wrong = {path: lines for path, lines in found.items() if path not in NAMES_OPS}
    assert not wrong, "sets of ops: use or add a trait of attngraph/ir/traits.py"
    assert not NAMES_OPS.keys() - found.keys()


_MASKING = frozenset(["masked_rows", "causal", "window"])
_OTHER_WINDOWS = "attngraph.passes.canonical.signals"  # that of a short-time Fourier transform


def _asked_for(path: Path) -> set[str]:
    """The names of an attention's arguments that a file asks a node for."""
    calls = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if _asks(node))
    return {call.args[1].value for call in calls if isinstance(call.args[1], ast.Constant)}


def _asks(node: ast.AST) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return is_call and node.func.id in ("attribute", "input_of") and len(node.args) == 2


def test_what_masks_an_attention_is_read_in_one_place() -> None:
    """masking_of, which the lowering, the kernel table, the padding and the folding share."""
    home = "attngraph.analysis.masks.masking"
    assert _asked_for(MODULES[home]) >= _MASKING
    others = {
        name
        for name, path in MODULES.items()
        if name not in (home, "attngraph.passes.attention.remasking", _OTHER_WINDOWS)
        if _MASKING & _asked_for(path)
    }
    assert not others, "masking_of says what masks an attention"
