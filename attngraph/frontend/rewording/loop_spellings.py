"""Other spellings of loops over numbers, as the ones that python_loops.py reads.

`steps = range(n)` that is gone through later is a range there, `while t < n` with `t += 1` at its
end is a loop over a range, and `[None] * n`, of a size, is a list that waits for its elements. What
a step makes of each of a few things, `q, k = (x[:, t] for x in (queries, keys))`, is made of one
after the other.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Collection

from attngraph.frontend.rewording.loop_names import loaded, stored_in
from attngraph.frontend.rewording.loop_statements import expression, located, parsed
from attngraph.frontend.rewording.loop_turns import is_plain

_OWN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LEAVES = (ast.Break, ast.Continue)
_SCOPES = (ast.Lambda, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Syntax that gives a name of its own to something, or a name outside of it."""


def spelled(function: ast.FunctionDef, helpers: str) -> ast.FunctionDef:
    """The function with such loops as `for t in range(…)`; `helpers` is a global name."""
    function = _Ranges(function).visit(function)
    function = _Whiles(function).visit(function)
    function = _Continues().visit(function)
    function = _Listed().visit(function)
    return _Blanks(helpers).visit(function)  # type: ignore[no-any-return]


class _Ranges(ast.NodeTransformer):
    """Has what reads a name that is a range, wherever it has a value, read a range."""

    def __init__(self, function: ast.FunctionDef) -> None:
        times = Counter(
            each.id
            for each in ast.walk(function)
            if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)
        )
        others = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
        for each in ast.walk(function):
            if isinstance(each, (ast.Global, ast.Nonlocal)):
                others.update(each.names)
        self._own = {name for name, count in times.items() if count == 1} - others
        self._ends: dict[str, list[str]] = {}

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Name(id="range"), args=args, keywords=[]),
            ) if name in self._own and not any(isinstance(each, ast.Starred) for each in args):
                ends = [f"__{name}_{at}" for at in range(len(args))]
                self._ends[name] = ends
                names: list[ast.expr] = [ast.Name(end, ast.Store()) for end in ends]
                made = ast.Assign([ast.Tuple(names, ast.Store())], ast.Tuple(args, ast.Load()))
                return located(made, node)
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self._ends or not isinstance(node.ctx, ast.Load):
            return node
        args: list[ast.expr] = [ast.Name(end, ast.Load()) for end in self._ends[node.id]]
        made = ast.Call(ast.Name("range", ast.Load()), args, [])
        return located(made, node)


class _Whiles(ast.NodeTransformer):
    """Has a loop count whose end no step changes."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._function = function

    def visit_While(self, node: ast.While) -> ast.stmt | list[ast.stmt]:
        self.generic_visit(node)
        return self._counted(node) or node

    def _counted(self, node: ast.While) -> list[ast.stmt] | None:
        *body, last = node.body
        match node.test:
            case ast.Compare(
                left=ast.Name(id=name), ops=[ast.Lt() | ast.LtE() as sign], comparators=[end]
            ) if ast.unparse(last) in (f"{name} += 1", f"{name} = {name} + 1"):
                pass
            case _:
                return None
        written = stored_in(body) | {
            each.value.id
            for part in body
            for each in ast.walk(part)
            if isinstance(each, (ast.Subscript, ast.Attribute))
            and isinstance(each.value, ast.Name)
            and not isinstance(each.ctx, ast.Load)
        }
        if not body or node.orelse or name in written or loaded([end]) & {name, *written}:
            return None
        if not _is_fixed(end, loaded(body)) or any(
            isinstance(each, (*_LEAVES, *_OWN)) for part in body for each in ast.walk(part)
        ):
            return None
        to = ast.unparse(end) + (" + 1" if isinstance(sign, ast.LtE) else "")
        first = f"__first_{name}"
        (before, loop, after) = parsed(
            f"{first} = {name}\n"
            f"for {name} in range({first}, {to}): pass\n"
            f"{name} = max({first}, {to})",
            node,
        )
        assert isinstance(loop, ast.For)
        loop.body = body
        loop.end_lineno = node.end_lineno
        return [before, loop, after]


class _Continues(ast.NodeTransformer):
    """Has what comes behind `if …: continue` be its other side."""

    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        node.body = self._nested(node.body)
        return node

    def _nested(self, body: list[ast.stmt]) -> list[ast.stmt]:
        for at, statement in enumerate(body):
            match statement:
                case ast.If(body=[*before, ast.Continue()], orelse=[]) if body[at + 1 :]:
                    if any(
                        isinstance(each, ast.Continue) for part in before for each in ast.walk(part)
                    ):
                        return body
                    ends = ast.copy_location(ast.Pass(), statement)
                    statement.body, statement.orelse = (
                        before or [ends],
                        self._nested(body[at + 1 :]),
                    )
                    return body[: at + 1]
        return body


class _Listed(ast.NodeTransformer):
    """Has a loop make a list of known things without a comprehension, whose slices are none of the
    loop's own: `[f(a), f(b)]` for `[f(x) for x in (a, b)]` and for `map(lambda x: f(x), (a, b))`.
    """

    def __init__(self) -> None:
        self._depth = 0

    def visit_For(self, node: ast.For) -> ast.For:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        self.generic_visit(node)
        made = self._each(node.elt, node.generators)
        return node if made is None else located(ast.List(made, ast.Load()), node)

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        made: list[ast.expr] | None = None
        match node:
            case ast.Assign(
                targets=[ast.Tuple()],
                value=ast.GeneratorExp(elt=element, generators=generators),
            ):
                made = self._each(element, generators)
            case ast.Assign(
                targets=[ast.Tuple()],
                value=ast.Call(
                    func=ast.Name(id="map"),
                    args=[
                        ast.Lambda(
                            args=ast.arguments(
                                posonlyargs=[],
                                args=[ast.arg(arg=name)],
                                vararg=None,
                                kwonlyargs=[],
                                kwarg=None,
                                defaults=[],
                            ),
                            body=element,
                        ),
                        given,
                    ],
                    keywords=[],
                ),
            ):
                own = ast.comprehension(ast.Name(name, ast.Store()), given, [], 0)
                made = self._each(element, [own])
        if made is not None:
            node.value = located(ast.Tuple(made, ast.Load()), node.value)
        return node

    def _each(
        self, element: ast.expr, generators: list[ast.comprehension]
    ) -> list[ast.expr] | None:
        """The elements by themselves; None where they aren't written down, or it isn't known that
        the code is the same with one of them in the place of the name that stands for it.
        """
        match generators:
            case [
                ast.comprehension(
                    target=ast.Name(id=name),
                    iter=ast.Tuple(elts=given) | ast.List(elts=given),
                    ifs=[],
                    is_async=0,
                )
            ] if self._depth and all(map(is_plain, given)):
                pass
            case _:
                return None
        if any(isinstance(each, _SCOPES) for each in ast.walk(element)):
            return None

        class Standing(ast.NodeTransformer):
            def __init__(self, own: ast.expr) -> None:
                self._own = own

            def visit_Name(self, node: ast.Name) -> ast.expr:
                is_it = node.id == name
                return located(copy.deepcopy(self._own), node) if is_it else node

        return [Standing(own).visit(copy.deepcopy(element)) for own in given]


class _Blanks(ast.NodeTransformer):
    """Has `[None] * n` be a list of our own where n is a size."""

    def __init__(self, helpers: str) -> None:
        self._helpers = helpers

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.BinOp(left=ast.List(elts=[ast.Constant()]) as one, op=ast.Mult(), right=times):
                pass
            case ast.BinOp(left=times, op=ast.Mult(), right=ast.List(elts=[ast.Constant()]) as one):
                pass
            case _:
                return node
        helper = expression(f"{self._helpers}.blank", node)
        made = ast.Call(helper, [one, times], [])
        return located(made, node)


def _is_fixed(end: ast.expr, read: Collection[str]) -> bool:
    """Whether it stays the same where its names do, of which a body has `read` some: sizes and
    arithmetic. A list that is read may grow, and an attribute change in what is called.
    """
    shapes = {id(each.func) for each in ast.walk(end) if isinstance(each, ast.Call)}
    for each in ast.walk(end):
        match each:
            case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]):
                if name in read:
                    return False
            case ast.Call(func=ast.Attribute(value=ast.Name(), attr="size")):
                pass
            case ast.Attribute(value=ast.Name(), attr="shape"):
                pass
            case ast.Call():
                return False
            case ast.Attribute() if id(each) not in shapes:
                return False
    return True
