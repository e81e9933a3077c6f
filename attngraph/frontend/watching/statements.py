"""What the line of a branch does with its condition: `if (lengths <= 0).any(): raise …`."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache

_SAYING = frozenset({"print", "warn", "warn_once", "warning", "warning_once", "info", "debug"})
"""Functions that only tell somebody of a value."""
_LEAVES = (ast.Return, ast.Break, ast.Continue)
_ENDS = (ast.Return, ast.Break, ast.Raise)


def answer_without_effect(file: str, line: int) -> bool | None:
    """The answer to the conditions of a line with which it neither raises nor tells anything.

    None where it does anything else on either side, where its conditions need different answers, or
    where what it raises is caught in the same function.
    """
    found: set[bool] = set()
    for statement in _statements(file).get(line, ()):
        if isinstance(statement, ast.Assert):
            found |= set(_answers(statement.test, wanted=True))
        elif _only_raises_or_tells(statement.body) and not statement.orelse:
            found |= set(_answers(statement.test, wanted=False))
        elif statement.orelse and _only_raises(statement.orelse):
            found |= set(_answers(statement.test, wanted=True))
        else:
            return None
    return found.pop() if len(found) == 1 else None


def only_tells(file: str, line: int) -> bool:
    """Whether all branches of a line print or warn at most: what they choose is no result."""
    statements = _statements(file).get(line, ())
    return bool(statements) and all(
        isinstance(each, ast.If) and all(map(_tells, each.body)) for each in statements
    )


def goes_on_if(file: str, line: int) -> bool | None:
    """The answer to the one condition of a line with which a loop goes on, if no other ends it.

    It is that of a `while` that nothing leaves, or of the only `if done: break` in a `while True`.
    """
    return _endless("".join(linecache.getlines(file))).get(line)


@lru_cache(maxsize=64)
def _endless(source: str) -> dict[int, bool]:
    try:
        loops = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.While)]
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, bool] = {}
    for loop in loops:
        leaves = [each for part in loop.body for each in ast.walk(part) if isinstance(each, _ENDS)]
        choices = [
            each
            for each in loop.body
            if isinstance(each, ast.If) and not each.orelse and isinstance(each.body[-1], _ENDS)
        ]
        if not leaves:
            test, wanted = loop.test, True
        elif (
            isinstance(loop.test, ast.Constant)
            and loop.test.value
            and len(leaves) == 1 == len(choices)
        ):
            test, wanted = choices[0].test, False
        else:
            continue
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, wanted = test.operand, not wanted
        if not isinstance(test, (ast.BoolOp, ast.Constant)):
            for line in range(test.lineno, (test.end_lineno or test.lineno) + 1):
                found[line] = wanted
    return found


def _only_raises_or_tells(body: list[ast.stmt]) -> bool:
    return _only_raises(body) or all(map(_tells, body))


def _only_raises(body: list[ast.stmt]) -> bool:
    """Whether a block ends in an error, whatever it does before, such as making its message."""
    leaves = (each for part in body for each in ast.walk(part) if isinstance(each, _LEAVES))
    return isinstance(body[-1], ast.Raise) and not any(leaves)


def _tells(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Pass):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = statement.value.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in _SAYING


def _answers(test: ast.expr, *, wanted: bool) -> Iterator[bool]:
    """The answer to each condition in a test that makes the test as `wanted`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _answers(test.operand, wanted=not wanted)
    elif isinstance(test, ast.BoolOp):
        for operand in test.values:
            yield from _answers(operand, wanted=wanted)
    elif not _is_of_python(test):
        yield wanted


def _is_of_python(test: ast.expr) -> bool:
    """Whether a condition is none of a tensor's values: `mask is not None`, `self.training`."""
    if isinstance(test, ast.Compare):
        return any(isinstance(each, (ast.Is, ast.IsNot)) for each in test.ops)
    return False


@lru_cache(maxsize=64)
def _parsed(source: str) -> dict[int, list[ast.If | ast.Assert]]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, list[ast.If | ast.Assert]] = {}
    caught = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and node.handlers
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.Assert)) and node not in caught:
            # Python 3.11 places the jump at the statement, whose condition may begin below it.
            for line in range(node.lineno, (node.test.end_lineno or node.lineno) + 1):
                found.setdefault(line, []).append(node)
    return found


def _statements(file: str) -> dict[int, list[ast.If | ast.Assert]]:
    return _parsed("".join(linecache.getlines(file)))
