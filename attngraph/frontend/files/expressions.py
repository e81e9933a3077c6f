"""An allowlist for the expression strings of a `.pt2` file, which torch evaluates as Python.

Symbolic sizes go through `sympy.sympify`, which calls `eval`; guards are pasted into a function
that is `exec`ed on the first call. Both are parsed here as an AST, and only the shapes torch writes
pass, within the bounds of expression_cost.py.
"""

from __future__ import annotations

import ast
import functools
import keyword
import re

from attngraph.frontend.files.expression_cost import LONGEST, cost

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
QUALIFIED_NAME = re.compile(r"[A-Za-z0-9_.\-]*\Z")
_LONGEST_NAME = 512
_MOST_DIGITS = 256
_NUMBER = re.compile(r"-?\d+(\.\d*)?([eE][+-]?\d+)?\Z")

_FUNCTIONS = frozenset(
    [
        "Symbol",
        "Integer",
        "Float",
        "Rational",
        "Add",
        "Mul",
        "Pow",
        "Max",
        "Min",
        "Abs",
        "And",
        "Or",
        "Not",
        "Xor",
        "Eq",
        "Ne",
        "Equality",
        "Unequality",
        "Lt",
        "Le",
        "Gt",
        "Ge",
        "StrictLessThan",
        "LessThan",
        "StrictGreaterThan",
        "GreaterThan",
        "ITE",
        "Piecewise",
        "FloorDiv",
        "ModularIndexing",
        "Where",
        "PythonMod",
        "Mod",
        "CleanDiv",
        "CeilToInt",
        "FloorToInt",
        "CeilDiv",
        "LShift",
        "RShift",
        "PowByNatural",
        "FloatPow",
        "FloatTrueDiv",
        "IntTrueDiv",
        "IsNonOverlappingAndDenseIndicator",
        "TruncToFloat",
        "TruncToInt",
        "RoundToInt",
        "RoundDecimal",
        "ToFloat",
        "Identity",
    ]
)
_TEXT_FUNCTIONS = {"Symbol": IDENTIFIER, "Float": _NUMBER}
"""The only constructors that take text: any other sympy call would evaluate a string argument."""
_KEYWORDS = frozenset(
    ["positive", "nonnegative", "integer", "real", "finite", "precision", "evaluate"]
)
_GUARD_FUNCTIONS = frozenset(
    [
        "FloorDiv",
        "PythonMod",
        "Mod",
        "Max",
        "Min",
        "PowByNatural",
        "FloatTrueDiv",
        "IntTrueDiv",
        "CeilDiv",
        "CleanDiv",
        "ToFloat",
        "TruncToInt",
        "FloorToInt",
        "CeilToInt",
        "Eq",
        "Ne",
        "And",
        "Or",
        "Not",
        "max",
        "min",
    ]
)
_GUARD_METHODS = frozenset(("size", "stride", "storage_offset", "dim", "numel", "item"))

_ARITHMETIC = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Load,
    ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip

_TAKEN = frozenset(["__debug__", "self", "torch", "pytree", "fx_pytree"])
"""What the code that torch generates for a graph assigns or reads under these names."""


def is_plain_name(text: str) -> bool:
    """Whether it can be a variable of the Python code that torch generates."""
    plain = IDENTIFIER.match(text) is not None and not keyword.iskeyword(text)
    return plain and len(text) <= _LONGEST_NAME and text not in _TAKEN


def is_plain_size(text: str) -> bool:
    """Whether a size, e.g. `Mul(Integer(4), Symbol('s27', integer=True))`, is only arithmetic."""
    return size_cost(text) is not None


@functools.lru_cache(4096)
def size_cost(text: str) -> int | None:
    """The nodes of a size's syntax tree; None where it isn't plain, or costs too much."""
    tree = _parse(text)
    return cost(tree) if tree is not None and _plain_size(tree) else None


def is_plain_guard(text: str) -> bool:
    """Whether a guard, e.g. `L['x'].size()[0] >= 2`, only compares sizes of inputs."""
    tree = _parse(text)
    return tree is not None and _plain_guard(tree) and cost(tree) is not None


def from_tree(text: str) -> str:
    """A plain guard as its syntax tree says it, whatever way it was written."""
    return ast.unparse(ast.parse(text, mode="eval"))


def _parse(text: str) -> ast.AST | None:
    # sympify drops newlines before it evaluates, and a comment could hide what follows.
    if len(text) > LONGEST or not text.isascii() or "\n" in text or "#" in text:
        return None
    try:
        return ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _plain_size(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            if name not in _FUNCTIONS or any(word.arg not in _KEYWORDS for word in keywords):
                return False
            if not all(_is_setting(word.value) for word in keywords):
                return False
            pattern = _TEXT_FUNCTIONS.get(name)
            if pattern is not None and arguments and _is_text(arguments[0], pattern):
                return len(arguments) == 1
            return all(_plain_size(argument) for argument in arguments)
        case ast.Constant():
            return _is_number(node)
        case ast.Name(id=name):
            return name in ("true", "false", "oo", "int_oo") or bool(re.match(r"[a-z]+\d+\Z", name))
        case _ if isinstance(node, _ARITHMETIC):
            return all(_plain_size(child) for child in ast.iter_child_nodes(node))
    return False


def _plain_guard(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return name in _GUARD_FUNCTIONS and all(map(_plain_guard, arguments))
        case ast.Call(func=ast.Attribute(value=owner, attr=name), args=arguments, keywords=[]):
            if isinstance(owner, ast.Name) and owner.id == "math":
                return name in ("isnan", "floor", "ceil", "trunc", "sqrt") and all(
                    map(_plain_guard, arguments)
                )
            return name in _GUARD_METHODS and not arguments and _plain_source(owner)
        case ast.Subscript():
            return _plain_source(node)
        case ast.Attribute(value=ast.Name(id="math"), attr="inf"):
            return True
        case ast.Constant(value=None):
            return True
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=str())]):
            return _plain_guard(left) and _is_text(node.comparators[0], QUALIFIED_NAME)
        case ast.Constant():
            return _is_number(node)
        case _ if isinstance(node, _ARITHMETIC):
            return all(_plain_guard(child) for child in ast.iter_child_nodes(node))
    return False


def _plain_source(node: ast.AST) -> bool:
    """`L['name']…`, indexed by names and integers, possibly through `.size()`."""
    match node:
        case ast.Name(id="L"):
            return True
        case ast.Call(func=ast.Attribute(value=owner, attr=name), args=[], keywords=[]):
            return name in _GUARD_METHODS and _plain_source(owner)
        case ast.Subscript(value=owner, slice=index):
            return _plain_source(owner) and (_is_number(index) or _is_text(index, QUALIFIED_NAME))
    return False


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float | bool)


def _is_setting(node: ast.AST) -> bool:
    """Whether it is a keyword's value: a switch, or digits of precision, which cost time."""
    return isinstance(node, ast.Constant) and (
        isinstance(node.value, bool)
        or (isinstance(node.value, int) and 0 <= node.value <= _MOST_DIGITS)
    )


def _is_text(node: ast.AST, pattern: re.Pattern[str]) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and pattern.match(node.value) is not None
    )
