"""Statements of a loop's body in fewer forms, and how new ones are made of text."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TypeVar

from attngraph.frontend.rewording.loop_names import loaded, stored_in

HELPERS = "__attngraph_loops__"
"""The global name under which a rewritten function finds what it calls."""

_Node = TypeVar("_Node", bound=ast.AST)


class Plain:
    """Statements of a step in fewer forms: each assigns one thing, and a list is appended to."""

    def __init__(self, number: str) -> None:
        self._number, self._made = number, 0

    def of(self, statement: ast.stmt) -> list[ast.stmt]:
        match statement:
            case ast.If() | ast.For():
                statement.body = [made for part in statement.body for made in self.of(part)]
                statement.orelse = [made for part in statement.orelse for made in self.of(part)]
                if isinstance(statement, ast.If):
                    return [statement, *self._appended(statement)]
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=ast.List(elts=[one])):
                return [_called(f"{name}.append(None)", one, statement)]
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.BinOp(left=ast.List(elts=[one]), op=ast.Add(), right=ast.Name(id=other)),
            ) if name == other:
                return [_called(f"{name}.insert(0, None)", one, statement)]
            case ast.Assign(targets=[ast.Tuple(elts=parts)]) if any(
                isinstance(part, ast.Subscript) for part in parts
            ):
                return self._apart(statement, parts)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if (
                _are_apart(names, values)
            ):
                return [
                    located(ast.Assign([name], value), statement)
                    for name, value in zip(names, values, strict=True)
                ]
        return [statement]

    def _appended(self, statement: ast.If) -> list[ast.stmt]:
        """What both sides append to a list, and don't read it afterwards, appended behind them."""
        sides = [_appends(side) for side in (statement.body, statement.orelse)]
        after: list[ast.stmt] = []
        for name in [name for name in sides[0] if name in sides[1]]:
            made = f"__part_{self._number}_{self._made}"
            self._made += 1
            for side, found in zip((statement.body, statement.orelse), sides, strict=True):
                call, value = found[name]
                side[side.index(call)] = assigned_to(made, value, call)
            either = located(ast.Name(made, ast.Load()), statement)
            after.append(_called(f"{name}.append(None)", either, statement))
        return after

    def _apart(self, statement: ast.Assign, parts: Sequence[ast.expr]) -> list[ast.stmt]:
        """`h[i], c[i] = …` as names that are assigned to these places."""
        after: list[ast.stmt] = []
        names: list[ast.expr] = []
        for part in parts:
            if isinstance(part, ast.Subscript):
                name = f"__part_{self._number}_{self._made}"
                self._made += 1
                value = located(ast.Name(name, ast.Load()), part)
                after.append(located(ast.Assign([part], value), statement))
                names.append(located(ast.Name(name, ast.Store()), part))
            else:
                names.append(part)
        target = located(ast.Tuple(names, ast.Store()), statement)
        return [located(ast.Assign([target], statement.value), statement), *after]


def _are_apart(names: Sequence[ast.expr], values: Sequence[ast.expr]) -> bool:
    """Whether `a, b = x, y` is `a = x` and then `b = y`."""
    given = [name.id for name in names if isinstance(name, ast.Name)]
    is_each = len(given) == len(names) == len(values) == len({*given})
    return is_each and loaded(values).isdisjoint(given)


def _appends(statements: Sequence[ast.stmt]) -> dict[str, tuple[ast.Expr, ast.expr]]:
    """The statements that append to a list, and what they append, by the list's name, if nothing
    behind them names it.
    """
    found: dict[str, tuple[ast.Expr, ast.expr]] = {}
    for at, statement in enumerate(statements):
        behind = loaded(statements[at + 1 :]) | stored_in(statements[at + 1 :])
        match statement:
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value]
                )
            ) if name not in behind and added_to(statements)[name] == ["append"]:
                found[name] = statement, value
    return found


def called_name(node: ast.AST) -> str:
    """The name of a function that is called by it, such as Python's min, which a loop around may
    have made ours; "" of anything else.
    """
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr=name)) if of == HELPERS:
            return name
    return ""


def located(node: _Node, at: ast.AST) -> _Node:
    return ast.fix_missing_locations(ast.copy_location(node, at))


def _called(text: str, value: ast.expr, at: ast.stmt) -> ast.stmt:
    """A statement that is a call, with a value as its last argument."""
    (made,) = parsed(text, at)
    assert isinstance(made, ast.Expr)
    assert isinstance(made.value, ast.Call)
    made.value.args[-1] = value
    return made


def assigned_to(name: str, value: ast.expr, at: ast.AST) -> ast.Assign:
    (made,) = parsed(f"{name} = None", at)
    assert isinstance(made, ast.Assign)
    made.value = value
    return made


def parsed(text: str, at: ast.AST) -> list[ast.stmt]:
    """Statements that stand where another does."""
    found = ast.parse(text).body
    for part in found:
        _move(part, at)
    return found


def expression(text: str, at: ast.AST) -> ast.expr:
    """One that stands where another does, all of it: a method's call is where its name ends."""
    found = ast.parse(text, mode="eval").body
    _move(found, at)
    return found


def _move(tree: ast.AST, at: ast.AST) -> None:
    for each in ast.walk(tree):
        ast.copy_location(each, at)


def added_to(statements: Sequence[ast.stmt]) -> dict[str, list[str]]:
    """By the name of a list, how statements add an element to it, for each that does."""
    found: dict[str, list[str]] = {}
    for statement in statements:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=how))):
                if how in ("append", "insert"):
                    found.setdefault(name, []).append(how)
    return found
