"""Loops over the rows of tensors, and lists made in one expression, as loops over a count.

`for row in x`, `for a, b in zip(x, y)` and `[f(row) for row in x]` go through the rows of tensors
as `for i in range(x.shape[0])` does, which python_loops.py runs as a scan. So do `x.unbind(1)` and
`x.split(1, dim=1)`, whose parts are the rows of one tensor where that axis is open. Where the
values turn out to be no tensors of one open length, the code is run as it stands.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Sequence
from typing import TypeGuard

import torch

_OWN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_CUTS = frozenset(cut.__name__ for cut in (torch.unbind, torch.split, torch.chunk))
_MAYBE = (ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def counted(function: ast.FunctionDef, helpers: str) -> ast.FunctionDef:
    """The function with such loops counted where `helpers`, a global name, finds them open.

    Those within other loops stay: these are traced as a whole.
    """
    writer = _Writer(helpers)
    function.body = writer.statements(function.body)
    return function


class _Writer:
    def __init__(self, helpers: str) -> None:
        self._helpers, self._made = helpers, 0

    def statements(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [made for statement in body for made in self._statement(statement)]

    def _statement(self, statement: ast.stmt) -> list[ast.stmt]:
        match statement:
            case ast.For():
                statement.iter, made = self._cut(statement.iter)
                return [*made, self._loop(statement)]
            case ast.If():
                statement.body = self.statements(statement.body)
                statement.orelse = self.statements(statement.orelse)
            case ast.With() | ast.Try():
                statement.body = self.statements(statement.body)
            case ast.Assign(targets=[ast.Name()], value=value) if _cuts(value):
                statement.value = self._parts(value)
            case ast.Return() | ast.Assign() | ast.AnnAssign() | ast.Expr():
                found: list[ast.stmt] = []
                for listed in _lists(statement):
                    for generator in listed.generators[:1]:
                        generator.iter, cut = self._cut(generator.iter)
                        found += cut
                return [*found, self._listed(statement)]
        return [statement]

    def _cut(self, iterated: ast.expr) -> tuple[ast.expr, list[ast.stmt]]:
        """What is iterated over, with names in the place of cuts, and statements that make them."""
        if _is_call(iterated, "zip") or _is_call(iterated, "enumerate"):
            pairs = [self._cut(each) for each in iterated.args]
            iterated.args = [each for each, _ in pairs]
            return iterated, [each for _, made in pairs for each in made]
        if not _cuts(iterated):
            return iterated, []
        name = f"__parts_{self._made}"
        self._made += 1
        made = ast.Assign([ast.Name(name, ast.Store())], self._parts(iterated))
        ast.fix_missing_locations(ast.copy_location(made, iterated))
        return ast.copy_location(ast.Name(name, ast.Load()), iterated), [made]

    def _parts(self, call: ast.Call) -> ast.expr:
        """The helper's call in the place of a cut."""
        assert isinstance(call.func, ast.Attribute)
        of = [] if ast.unparse(call.func.value) == "torch" else [call.func.value]
        helper = ast.parse(f"{self._helpers}.parts", mode="eval").body
        found = ast.Call(helper, [ast.Constant(call.func.attr), *of, *call.args], call.keywords)
        return ast.fix_missing_locations(ast.copy_location(found, call))

    def _loop(self, loop: ast.For) -> ast.stmt:
        """A loop over rows, counted where they are open."""
        rows = _rows(loop.target, loop.iter)
        if rows is None or loop.orelse or _assigns(loop.body, rows.values()):
            return loop
        index, of = self._names(rows)
        lines = [
            f"if {self._helpers}.rows({of}) is not None:",
            f"    for {index} in range({self._helpers}.rows({of})):",
            *(f"        {name} = {value}[{index}]" for name, value in rows.items() if value),
            "        pass",
        ]
        written = _parsed(lines, loop)
        inner = written.body[0]
        assert isinstance(inner, ast.For)
        inner.body[-1:] = copy.deepcopy(loop.body)
        inner.end_lineno = loop.end_lineno
        written.orelse = [loop]
        return written

    def _listed(self, statement: ast.stmt) -> ast.stmt:
        """A statement with one list, which is filled in a loop where it is of rows or a count."""
        lists = [*_lists(statement)]
        if len(lists) != 1 or len(lists[0].generators) != 1:
            return statement
        made, (generator,) = lists[0], lists[0].generators
        if generator.ifs or generator.is_async:
            return statement
        renamed = {
            each.id: f"__each_{each.id}_{self._made}"
            for each in ast.walk(generator.target)
            if isinstance(each, ast.Name)
        }
        target, element = (_renamed(part, renamed) for part in (generator.target, made.elt))
        rows = _rows(target, generator.iter)
        if rows is not None:
            index, of = self._names(rows)
            asked = f"{self._helpers}.rows({of}) is not None"
            count = f"{self._helpers}.rows({of})"
        elif _is_call(generator.iter, "range") and isinstance(target, ast.Name):
            bounds = ast.unparse(ast.Tuple(generator.iter.args, ast.Load()))
            index, rows, count = target.id, {}, bounds[1:-1]
            asked = f"{self._helpers}.is_open({bounds})"
        else:
            return statement
        name = f"__made_{self._made}"
        self._made += 1
        lines = [
            f"if {asked}:",
            f"    {name} = []",
            f"    for {index} in range({count}):",
            *(f"        {each} = {value}[{index}]" for each, value in rows.items() if value),
            f"        {name}.append({ast.unparse(element)})",
            "    pass",
        ]
        written = _parsed(lines, statement)
        written.body[-1] = _replaced(copy.deepcopy(statement), made, name)
        written.orelse = [statement]
        return written

    def _names(self, rows: dict[str, str]) -> tuple[str, str]:
        """The name of the count, and the values whose rows are taken, as arguments."""
        index = next((name for name, value in rows.items() if not value), None)
        self._made += index is None
        return index or f"__turn_{self._made}", ", ".join(filter(None, rows.values()))


def _rows(target: ast.expr, iterated: ast.expr) -> dict[str, str] | None:
    """The tensor whose row each name of a target is; an empty string for the counter."""
    if _is_call(iterated, "enumerate"):
        if len(iterated.args) != 1 or not isinstance(target, ast.Tuple) or len(target.elts) != 2:
            return None
        count, rest = target.elts
        inner = _rows(rest, iterated.args[0])
        if inner is None or not isinstance(count, ast.Name) or "" in inner.values():
            return None
        return {count.id: "", **inner}
    targets, values = [target], [iterated]
    if _is_call(iterated, "zip"):
        if not isinstance(target, ast.Tuple) or len(target.elts) != len(iterated.args):
            return None
        targets, values = target.elts, iterated.args
    found: dict[str, str] = {}
    for name, value in zip(targets, values, strict=True):
        if not isinstance(name, ast.Name) or not _is_plain(value):
            return None
        found[name.id] = ast.unparse(value)
    return found


def _cuts(value: ast.expr) -> TypeGuard[ast.Call]:
    """Whether it is `x.unbind(1)`, `torch.split(x, 1, 1)` or the like."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    return value.func.attr in _CUTS


def _is_call(node: ast.expr, name: str) -> TypeGuard[ast.Call]:
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != name:
        return False
    return all(each.arg == "strict" for each in node.keywords)


def _is_plain(value: ast.expr) -> bool:
    """Whether it is a name or an attribute, which may be read more than once."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name)


def _assigns(body: Sequence[ast.stmt], values: Collection[str]) -> bool:
    """Whether statements assign to the names that values are read from."""
    names = {value.partition(".")[0] for value in values if value}
    return any(
        isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id in names
        for statement in body
        for each in ast.walk(statement)
    )


def _lists(node: ast.AST) -> list[ast.ListComp]:
    """The lists that a statement always makes, each in one expression."""
    found: list[ast.ListComp] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ListComp):
            found.append(child)
        elif not isinstance(child, (*_OWN, *_MAYBE)):
            found += _lists(child)
    return found


def _renamed(node: ast.expr, names: dict[str, str]) -> ast.expr:
    node = copy.deepcopy(node)
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            each.id = names.get(each.id, each.id)
    return node


def _replaced(statement: ast.stmt, made: ast.ListComp, name: str) -> ast.stmt:
    """The statement, which reads a name in place of its list."""

    class Replacing(ast.NodeTransformer):
        def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
            is_it = (node.lineno, node.col_offset) == (made.lineno, made.col_offset)
            return ast.copy_location(ast.Name(name, ast.Load()), node) if is_it else node

    found = Replacing().visit(statement)
    assert isinstance(found, ast.stmt)
    return found


def _parsed(lines: Sequence[str], at: ast.stmt) -> ast.If:
    (found,) = ast.parse("\n".join(lines)).body
    assert isinstance(found, ast.If)
    for each in ast.walk(found):
        ast.copy_location(each, at)
    return found
