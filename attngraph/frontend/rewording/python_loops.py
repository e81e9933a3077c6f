"""Loops of Python over a size, `for t in range(x.shape[1])`, as scans.

A trace runs such a loop, and makes a constant of the size. While a model is traced, its functions
with such loops are compiled from source that was rewritten: where the size is open, the body is a
function of the step, of what is carried from step to step, and of the slices `x[:, t]`, and
torch's scan runs it; where nothing is carried, it is computed for all steps at once. What the body
appends to a list is stacked, and what it writes to `y[:, t]` is copied there. Where the size is a
number, the loop is run as it stands.

Only loops are taken of which the source says all of this; a body that asks a tensor for its value
fails in the scan, and the trace without scans remains.
"""

from __future__ import annotations

import ast
import copy
import gc
import inspect
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import CodeType, FunctionType
from typing import Any
from unittest.mock import patch

from attngraph.frontend.rewording.loop_blocks import Blocks, Taken
from attngraph.frontend.rewording.loop_steps import Helpers, Unread
from attngraph.frontend.rewording.row_loops import counted

_HELPERS = "__attngraph_loops__"
_LEAVES = (
    *(ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await),
    *(ast.Global, ast.Nonlocal, ast.Delete, ast.Try, ast.With),
    *(ast.FunctionDef, ast.ClassDef, ast.Lambda),
)
"""Syntax that a body may not have, or that hides which names it assigns."""


@contextmanager
def scanned_loops(codes: Iterable[CodeType]) -> Iterator[None]:
    """Within it, functions with this code run their loops over open sizes as scans."""
    with ExitStack() as stack:
        for code in codes:
            for function in gc.get_referrers(code):
                if type(function) is not FunctionType or function.__code__ is not code:
                    continue
                with suppress(OSError, SyntaxError, Unread):
                    new = _rewritten(code)
                    stack.enter_context(patch.dict(function.__globals__, {_HELPERS: Helpers}))
                    stack.callback(setattr, function, "__code__", code)
                    function.__code__ = new
        yield


def _rewritten(code: CodeType) -> CodeType:
    """The code with its loops as scans. Raises Unread where it has none, or its source is gone."""
    source = textwrap.dedent(inspect.getsource(code))
    (function,) = ast.parse(source).body
    if not isinstance(function, ast.FunctionDef):
        raise Unread
    function.decorator_list = []
    function = counted(function, _HELPERS)
    writer = _Writer(function)
    function = writer.visit(function)
    if not writer.written:
        raise Unread
    outer = ast.parse(f"def outer({', '.join(code.co_freevars)}):\n    pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [function]
    tree = ast.fix_missing_locations(ast.Module([outer], []))
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    made = compile(tree, code.co_filename, "exec", dont_inherit=True)
    for _ in range(2):
        made = next(each for each in made.co_consts if isinstance(each, CodeType))
    if made.co_freevars != code.co_freevars:
        raise Unread
    return made.replace(co_name=code.co_name, co_qualname=code.co_qualname)


def _names(nodes: Iterable[ast.AST], context: type[ast.expr_context]) -> set[str]:
    return {
        each.id
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, context)
    }


def _read_first(statements: Iterable[ast.stmt], known: set[str]) -> tuple[set[str], set[str]]:
    """The names that statements may read before they assign them, and those that are known then."""
    read: set[str] = set()
    for part in statements:
        if isinstance(part, ast.If):
            read |= _names([part.test], ast.Load) - known
            sides = [_read_first(side, known) for side in (part.body, part.orelse)]
            read = read.union(*(names for names, _ in sides))
            known = known | (sides[0][1] & sides[1][1])
            continue
        is_sum = isinstance(part, ast.AugAssign)
        loaded = _names([part], ast.Load) | (_names([part], ast.Store) if is_sum else set())
        read |= loaded - known
        if isinstance(part, (ast.Assign, ast.AnnAssign)):
            known = known | _names([part], ast.Store)
    return read, known


class _Writer(ast.NodeTransformer):
    """Rewrites the loops of a function that range over numbers."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._function, self.written = function, 0

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        with suppress(Unread):
            return self._scanned(node)
        return node

    def _scanned(self, loop: ast.For) -> list[ast.stmt]:
        call = loop.iter
        is_range = isinstance(call, ast.Call) and ast.unparse(call.func) == "range"
        if not is_range or loop.orelse or not isinstance(loop.target, ast.Name):
            raise Unread
        assert isinstance(call, ast.Call)
        after = self._names_after(loop)
        body = _Body(loop.target.id, loop.body, after)
        carried = sorted(body.assigned & (body.read_first | after))
        step, bounds = f"__step_{self.written}", ast.unparse(ast.Tuple(call.args, ast.Load()))
        self.written += 1
        given = ", ".join([body.index, *carried, *body.sequences])
        results = f"return [{', '.join(carried)}], [{', '.join([*body.appended, *body.rows])}]"
        initial = ", ".join(f"lambda: {name}" for name in carried)
        sequences = ", ".join(map(str, body.sequences.values()))
        rows = ", ".join(map(str, body.rows.values()))
        lines = [
            f"if {_HELPERS}.is_open({bounds}):",
            f"    def {step}({given}):",
            f"        {results}",
            f"    {step}_after, {step}_made = {_HELPERS}.run({bounds}, {step}, [{initial}], "
            f"[{sequences}])",
            *(f"    {name} = {step}_after[{at}]" for at, name in enumerate(carried)),
            *(
                f"    {name} = {_HELPERS}.Steps({name}, {step}_made[{at}])"
                for at, name in enumerate(body.appended.values())
            ),
            f"    {_HELPERS}.put({bounds}, [{rows}], {step}_made[{len(body.appended)}:])",
        ]
        (written,) = _parsed("\n".join(lines), loop)
        assert isinstance(written, ast.If)
        assert isinstance(written.body[0], ast.FunctionDef)
        written.body[0].body[:0] = body.statements
        written.orelse = [loop]
        return [written]

    def _names_after(self, loop: ast.For) -> set[str]:
        """The names that the function reads beyond a loop; all that it reads, if within another."""
        end = loop.end_lineno or 0
        outer = [
            each
            for each in ast.walk(self._function)
            if isinstance(each, (ast.For, ast.While))
            and each.lineno <= loop.lineno
            and each is not loop
            and (each.end_lineno or 0) >= end
        ]
        return {
            each.id
            for each in ast.walk(self._function)
            if isinstance(each, ast.Name)
            and isinstance(each.ctx, ast.Load)
            and (each.lineno > end or (outer and not loop.lineno <= each.lineno <= end))
        }


class _Body:
    """The body of a loop over `index`, as statements of a function.

    `assigned` are its names, and `read_first` those that it may read before it assigns them.
    `sequences` are what it reads of a tensor in each step, by the name of that slice. `appended`
    are lists, by the name of what is appended, and `rows` what it writes of a tensor, by the
    slice's name. Raises Unread for anything else that outlives a step.
    """

    def __init__(self, index: str, statements: Sequence[ast.stmt], after: Collection[str]) -> None:
        self.index = index
        self.sequences: dict[str, Taken] = {}
        self.appended: dict[str, str] = {}
        self.rows: dict[str, Taken] = {}
        if any(isinstance(each, _LEAVES) for part in statements for each in ast.walk(part)):
            raise Unread
        statements = [_appending(copy.deepcopy(statement)) for statement in statements]
        self.assigned = _names(statements, ast.Store)
        if index in self.assigned:
            raise Unread
        self._blocks = Blocks(index, statements, self.assigned)
        slices = _Slices(self)
        self.statements: list[ast.stmt] = []
        for statement in statements:
            written = self._kept(statement)
            self.statements.append(slices.visit(written))
        self.statements = self._blocks.without_ends(self.statements, after)
        left = _names(self.statements, ast.Load)
        if left & {*self.appended.values(), *(taken.of for taken in self.rows.values())}:
            raise Unread  # reads what it fills
        for part in self.statements:
            for each in ast.walk(part):
                stored = isinstance(each, (ast.Subscript, ast.Attribute)) and not isinstance(
                    each.ctx, ast.Load
                )
                called = isinstance(each, ast.Expr) and not isinstance(each.value, ast.Constant)
                if stored or called:
                    raise Unread
        self.read_first, _ = _read_first(self.statements, set())

    def _kept(self, statement: ast.stmt) -> ast.stmt:
        """A statement that keeps something of a step, as one that gives it a name."""
        match statement:
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value]
                )
            ) if name not in self.assigned and name not in self.appended.values():
                made = f"__appended_{len(self.appended)}"
                self.appended[made] = name
                return _assigned(made, value, statement)
            case ast.Assign(targets=[ast.Subscript() as target], value=value):
                found = self.slice_of(target)
                if found is None or found[0].of in (row.of for row in self.rows.values()):
                    raise Unread
                row, rest = found
                made = f"__row_{len(self.rows)}"
                self.rows[made] = row
                taken = ast.unparse(self.sequence(row, statement))
                at = ast.Subscript(ast.Name("index", ast.Load()), rest or ast.Tuple([]), ast.Load())
                index = f"{_HELPERS}.{ast.unparse(at)}" if rest else "()"
                (written,) = _parsed(f"{made} = {_HELPERS}.row({taken}, {index}, None)", statement)
                assert isinstance(written, ast.Assign)
                assert isinstance(written.value, ast.Call)
                written.value.args[2] = value
                return written
        return statement

    def sequence(self, taken: Taken, at: ast.AST) -> ast.expr:
        """The slice of this step."""
        known = {what: own for own, what in self.sequences.items()}
        own = known.get(taken) or f"__slice_{len(self.sequences)}"
        self.sequences[own] = taken
        return ast.copy_location(ast.Name(own, ast.Load()), at)

    def slice_of(self, target: ast.Subscript) -> tuple[Taken, ast.expr | None] | None:
        """What `x[:, t, …]` or `x[:, t : t + size, …]` takes, and the rest of the index that is
        taken of that; None for others.
        """
        items = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
        blocks = {at: block for at, item in enumerate(items) if (block := self._blocks.of(item))}
        single = [at for at, item in enumerate(items) if ast.unparse(item) == self.index]
        places = [*single, *blocks]
        of = target.value
        while isinstance(of, ast.Attribute):
            of = of.value
        is_known = isinstance(of, ast.Name) and of.id not in self.assigned
        new = [ast.unparse(item) == "None" for item in items]
        dots = [ast.unparse(item) == "..." for item in items]
        if len(places) != 1 or not is_known or any(map(_is_list, items)):
            return None
        at = places[0]
        axis = at - sum(new[:at])  # of the tensor, which lacks the new axes
        if any(dots[:at]):
            axis = at - len(items) + sum(new[at:])
        rest = [
            ast.Slice() if place in blocks else item
            for place, item in enumerate(items)
            if place not in single
        ]
        while rest and not any(dots) and ast.unparse(rest[-1]) == ":":  # counted from the start
            rest.pop()
        left = ast.Tuple(rest, ast.Load()) if rest else None
        return Taken(ast.unparse(target.value), axis, blocks.get(at, "None")), left


def _appending(statement: ast.stmt) -> ast.stmt:
    """`found += [value]` as `found.append(value)`."""
    match statement:
        case ast.AugAssign(target=ast.Name(), op=ast.Add(), value=ast.List(elts=[value])):
            (made,) = _parsed(f"{ast.unparse(statement.target)}.append(None)", statement)
            assert isinstance(made, ast.Expr)
            assert isinstance(made.value, ast.Call)
            made.value.args = [value]
            return made
    return statement


def _is_list(item: ast.expr) -> bool:
    return isinstance(item, (ast.List, ast.Starred))


class _Slices(ast.NodeTransformer):
    """Has a body read slices of this step, and compute with numbers that may be tensors."""

    def __init__(self, body: _Body) -> None:
        self._body = body

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        found = self._body.slice_of(node) if isinstance(node.ctx, ast.Load) else None
        if found is None:
            return self.generic_visit(node)
        taken, rest = found
        own = self._body.sequence(taken, node)
        if rest is None:
            return own
        return ast.copy_location(ast.Subscript(own, self.visit(rest), ast.Load()), node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        if name in ("min", "max") and len(node.args) > 1 and not node.keywords:
            node.func = self._helper(name, node)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Pow):
            return node
        call = ast.Call(self._helper("power", node), [node.left, node.right], [])
        return ast.copy_location(call, node)

    def _helper(self, name: str, at: ast.AST) -> ast.expr:
        found = ast.parse(f"{_HELPERS}.{name}", mode="eval").body
        return ast.fix_missing_locations(ast.copy_location(found, at))


def _assigned(name: str, value: ast.expr, at: ast.AST) -> ast.Assign:
    (made,) = _parsed(f"{name} = None", at)
    assert isinstance(made, ast.Assign)
    made.value = value
    return made


def _parsed(text: str, at: ast.AST) -> list[ast.stmt]:
    """Statements that stand where another does."""
    found = ast.parse(text).body
    for part in found:
        for each in ast.walk(part):
            ast.copy_location(each, at)
    return found
