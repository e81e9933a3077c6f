"""Loops over the rows of tensors, and lists made in one expression, as loops over a count.

`for row in x`, `for a, b in zip(x, y)` and `[f(row) for row in x]` go through the rows of tensors
as `for i in range(x.shape[0])` does, which python_loops.py runs as a scan. So do `x.unbind(1)` and
`x.split(1, dim=1)`, whose parts are the rows of one tensor where that axis is open, and lists that
a loop has filled. Where the values turn out to be of no open length, or of several, the code is run
as it stands.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeGuard

import torch

from attngraph.frontend.rewording.loop_statements import expression, parsed
from attngraph.frontend.rewording.loop_turns import Turns, is_call, is_plain, is_range, range_of

_OWN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_CUTS = frozenset(cut.__name__ for cut in (torch.unbind, torch.split, torch.chunk))
_TENSOR = re.compile(
    r"torch\.(tensor|as_tensor|(?P<typed>([A-Z]\w*)?Tensor))|.*\.new_tensor", re.DOTALL
)
"""What makes a tensor of a list."""
_ASKED = {
    "list": "listed",
    "tuple": "as_tuple",
    "reversed": "turned",
    "len": "length",
    "sum": "total",
}
"""Functions of Python that are asked of lists, and what helpers answer them."""
_MAYBE = (ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def counted(function: ast.FunctionDef, helpers: str) -> tuple[ast.FunctionDef, int]:
    """The function with such loops counted where `helpers`, a global name, finds them open.

    And how often it cuts a tensor, which gives a list there.
    """
    writer, lists = _Writer(helpers), _Lists(helpers)
    function = lists.visit(function)
    function.body = writer.statements(function.body)
    return function, lists.cuts


class _Lists(ast.NodeTransformer):
    """Has a function ask our helpers what it asks of a list that may be of an open length."""

    def __init__(self, helpers: str) -> None:
        self._helpers, self.cuts = helpers, 0

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if _cuts(node):
            self.cuts += 1
            return self._parts(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        made = _TENSOR.fullmatch(ast.unparse(node.func)) if node.args else None
        if (made or name in ("list", "tuple")) and node.args and is_call(node.args[0], "range"):
            self.cuts += 1
            kind = ast.Name("list", ast.Load()) if made else node.func
            counting = [kind, node.args[0].func, *node.args[0].args]
            node.args[0] = self._asking("counting", node, counting)
            if not made:
                return node.args[0]
        if made and made["typed"] and len(node.args) == 1:
            return self._asking("typed", node, [node.func, *node.args])
        if name not in _ASKED or len(node.args) != 1 or node.keywords:
            return node
        (value,) = node.args
        if isinstance(value, ast.GeneratorExp) and name in ("list", "tuple", "sum"):
            value = ast.copy_location(ast.ListComp(value.elt, value.generators), value)
        elif is_call(value, "map") and len(value.args) == 2 and is_plain(value.args[0]):
            each = ast.comprehension(ast.Name("each", ast.Store()), value.args[1], [], 0)
            applied = ast.Call(value.args[0], [ast.Name("each", ast.Load())], [])
            value = ast.copy_location(ast.ListComp(applied, [each]), value)
        if name == "reversed" and is_call(value, "range"):
            return node
        return self._asking(_ASKED[name], node, [node.func, value])

    def visit_List(self, node: ast.List | ast.Tuple) -> Any:
        """`[*some, another]`"""
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load) or not any(
            isinstance(each, ast.Starred) for each in node.elts
        ):
            return node
        parts = [
            each.value if isinstance(each, ast.Starred) else ast.List([each], ast.Load())
            for each in node.elts
        ]
        name = "chained_tuple" if isinstance(node, ast.Tuple) else "chained"
        return self._asking(name, node, parts)

    visit_Tuple = visit_List

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        """An index may be no call."""
        node.value = self.visit(node.value)
        return node

    def _parts(self, call: ast.Call) -> ast.expr:
        """The helper's call in the place of a cut."""
        assert isinstance(call.func, ast.Attribute)
        of = [] if ast.unparse(call.func.value) == "torch" else [call.func.value]
        given = [ast.Constant(call.func.attr), *of, *call.args]
        return self._asking("parts", call, given, call.keywords)

    def _asking(
        self,
        name: str,
        at: ast.expr,
        given: list[ast.expr],
        named: list[ast.keyword] | None = None,
    ) -> ast.expr:
        """A helper's call in the place of an expression."""
        helper = expression(f"{self._helpers}.{name}", at)
        return ast.fix_missing_locations(
            ast.copy_location(ast.Call(helper, given, named or []), at)
        )


class _Writer:
    def __init__(self, helpers: str) -> None:
        self._helpers, self._made = helpers, 0

    def statements(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [made for statement in body for made in self._statement(statement)]

    def _statement(self, statement: ast.stmt) -> list[ast.stmt]:
        match statement:
            case ast.For():
                statement.body = self.statements(statement.body)
                statement.iter, made = self._cut(statement.iter)
                return [*made, *self._loop(statement)]
            case ast.If():
                statement.body = self.statements(statement.body)
                statement.orelse = self.statements(statement.orelse)
            case ast.With() | ast.Try():
                statement.body = self.statements(statement.body)
            case ast.Return() | ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Expr():
                found: list[ast.stmt] = []
                while (listed := next((each for each in _lists(statement)), None)) is not None:
                    made, statement = self._listed(statement, listed)
                    found += made
                return [*found, statement]
        return [statement]

    def _cut(self, iterated: ast.expr) -> tuple[ast.expr, list[ast.stmt]]:
        """What is iterated over, with names in the place of what is no name, and statements that
        make them.
        """
        if is_call(iterated, "zip") or is_call(iterated, "enumerate", "start"):
            pairs = [self._cut(each) for each in iterated.args]
            iterated.args = [each for each, _ in pairs]
            return iterated, [each for _, made in pairs for each in made]
        if is_plain(iterated) or is_range(iterated):
            return iterated, []
        name = f"__parts_{self._made}"
        self._made += 1
        made = ast.Assign([ast.Name(name, ast.Store())], iterated)
        ast.fix_missing_locations(ast.copy_location(made, iterated))
        return ast.copy_location(ast.Name(name, ast.Load()), iterated), [made]

    def _next(self) -> int:
        self._made += 1
        return self._made

    def _loop(self, loop: ast.For) -> list[ast.stmt]:
        """A loop over rows, counted where they are open."""
        turns = Turns.read(loop.target, loop.iter, self._next(), self._helpers)
        if turns is None or loop.orelse or _assigns(loop.body, turns.names):
            return [loop]
        count = f"{self._helpers}.rows({', '.join(turns.of)})"
        lines = [
            *turns.made,
            f"if {count} is not None:",
            f"    for {turns.index} in range({count}):",
            *(f"        {text}" for text in turns.given),
            "        pass",
        ]
        *before, written = _parsed(lines, loop)
        inner = written.body[0]
        assert isinstance(inner, ast.For)
        inner.body[-1:] = copy.deepcopy(loop.body)
        inner.end_lineno = loop.end_lineno
        written.orelse = [loop]
        return [*before, written]

    def _listed(self, statement: ast.stmt, listed: ast.ListComp) -> tuple[list[ast.stmt], ast.stmt]:
        """What makes a list, in a loop where it is of rows or a count, and the statement, which
        reads it by a name.
        """
        name = f"__made_{self._made}"
        self._made += 1
        (generator,) = listed.generators
        generator.iter, found = self._cut(generator.iter)
        renamed = {
            each.id: f"__each_{each.id}_{self._made}"
            for each in ast.walk(generator.target)
            if isinstance(each, ast.Name)
        }
        target, element = (_renamed(part, renamed) for part in (generator.target, listed.elt))
        turns = Turns.read(target, generator.iter, self._next(), self._helpers)
        plain = ast.Assign([ast.Name(name, ast.Store())], copy.deepcopy(listed))
        plain = ast.fix_missing_locations(ast.copy_location(plain, statement))
        first: list[str] = []
        asked = ""
        if turns is not None:
            index, first, given = turns.index, turns.made, turns.given
            counted = f"range({self._helpers}.rows({', '.join(turns.of)}))"
            asked = f"{self._helpers}.rows({', '.join(turns.of)}) is not None"
        elif isinstance(target, ast.Name) and (ranged := range_of(generator.iter)) is not None:
            index, given, counted = target.id, [], ast.unparse(generator.iter)
            ends = ast.unparse(ast.Tuple(ranged[0].args, ast.Load()))
            asked = f"{self._helpers}.is_open({ends})"
        if not asked:
            return [*found, plain], _replaced(statement, listed, name)
        lines = [
            *first,
            f"if {asked}:",
            f"    {name} = []",
            f"    for {index} in {counted}:",
            *(f"        {text}" for text in given),
            f"        {name}.append(None)",
        ]
        *before, written = _parsed(lines, statement)
        loop = written.body[-1]
        assert isinstance(loop, ast.For)
        (*own, last) = loop.body
        assert isinstance(last, ast.Expr)
        assert isinstance(last.value, ast.Call)
        last.value.args = [element]
        loop.body = [*own, *self._statement(last)]
        written.orelse = [plain]
        return [*found, *before, written], _replaced(statement, listed, name)


def _cuts(value: ast.expr) -> TypeGuard[ast.Call]:
    """Whether it is `x.unbind(1)`, `torch.split(x, 1, 1)` or the like."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    return value.func.attr in _CUTS


def _assigns(body: Sequence[ast.stmt], names: Collection[str]) -> bool:
    """Whether statements assign to some of these names."""
    return any(
        isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id in names
        for statement in body
        for each in ast.walk(statement)
    )


def _lists(node: ast.AST) -> Iterator[ast.ListComp]:
    """The lists that a statement always makes, each in one expression of all elements."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ListComp):
            generator, *others = child.generators
            if not others and not generator.ifs and not generator.is_async:
                yield child
        elif not isinstance(child, (*_OWN, *_MAYBE)):
            yield from _lists(child)


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
            is_it = node is made
            return ast.copy_location(ast.Name(name, ast.Load()), node) if is_it else node

    found = Replacing().visit(statement)
    assert isinstance(found, ast.stmt)
    return found


def _parsed(lines: Sequence[str], at: ast.stmt) -> list[Any]:
    """Statements of which the last one is an if."""
    found = parsed("\n".join(lines), at)
    assert isinstance(found[-1], ast.If)
    return found
