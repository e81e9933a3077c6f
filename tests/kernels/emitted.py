"""Which ONNX operators a lowering can emit, read off the lowerings' source and torchlib's."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import onnx
from onnxruntime.capi import onnxruntime_pybind11_state
from onnxscript.function_libs.torch_lib.registration import default_registry

from attngraph.export.lowering import registered

FOLDER = Path(__file__).parents[2] / "export" / "lowering"
_SCHEMAS = onnxruntime_pybind11_state.get_all_operator_schema()
NAMES = frozenset(schema.name for schema in onnx.defs.get_all_schemas()) | frozenset(
    schema.name for schema in _SCHEMAS if schema.domain == "com.microsoft"
)
"""Every operator there is."""

_SYMBOLS = {
    ast.Add: "Add",
    ast.Sub: "Sub",
    ast.Mult: "Mul",
    ast.Div: "Div",
    ast.Mod: "Mod",
    ast.Pow: "Pow",
    ast.MatMult: "MatMul",
}
"""What Python's operators between ONNX values become (export/lowering/emission/values.py)."""


def own() -> set[str]:
    """Names of operators in our lowerings; torchlib.py emits what torchlib's functions name."""
    return {
        node.value
        for path in FOLDER.rglob("*.py")
        if path.name != "torchlib.py"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES
    }


def composed() -> list[str]:
    """Where a lowering puts an operator's name together, so that `own` doesn't see it."""
    return [
        f"{path.name}:{node.lineno}"
        for path in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("op", "ops")
        and node.args
        and isinstance(node.args[0], (ast.JoinedStr, ast.BinOp))
    ]


def of_torchlib() -> dict[str, set[str]]:
    """Operators in torchlib's functions of aten ops without a lowering of ours, with these ops."""
    found: dict[str, set[str]] = {}
    for name, entry in default_registry._registry.items():
        op = name.replace("::", ".", 1)
        if not op.startswith("aten.") or registered(op) or not entry.overloads:
            continue
        for operator in _named(entry.overloads[0], set()):
            found.setdefault(operator, set()).add(op)
    return found


def _named(function: Any, seen: set[FunctionType]) -> Iterator[str]:
    """The operators that a function of torchlib and those it calls name."""
    plain = getattr(function, "func", getattr(function, "function", function))
    if not isinstance(plain, FunctionType) or plain in seen:
        return
    seen.add(plain)
    tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id.startswith("op") and node.attr in NAMES:
                yield node.attr
        elif isinstance(node, ast.Name):
            other = plain.__globals__.get(node.id)
            if getattr(other, "__module__", "").startswith("onnxscript.function_libs"):
                yield from _named(other, seen)
        elif isinstance(node, ast.BinOp) and type(node.op) in _SYMBOLS:
            yield _SYMBOLS[type(node.op)]
