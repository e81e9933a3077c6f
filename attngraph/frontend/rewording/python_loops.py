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
import gc
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import CodeType, FunctionType
from typing import Any
from unittest.mock import patch

from attngraph.frontend.rewording.loop_bodies import Body
from attngraph.frontend.rewording.loop_choices import PLAIN
from attngraph.frontend.rewording.loop_lists import Lists, Unread
from attngraph.frontend.rewording.loop_names import loaded, read_after, stored
from attngraph.frontend.rewording.loop_spellings import spelled
from attngraph.frontend.rewording.loop_statements import HELPERS, parsed
from attngraph.frontend.rewording.loop_steps import Helpers
from attngraph.frontend.rewording.loop_turns import range_of
from attngraph.frontend.rewording.row_loops import counted


@contextmanager
def scanned_loops(
    codes: Sequence[CodeType],
    blocks: set[int],
    steps: frozenset[int] = frozenset(),
    *,
    parted: bool = False,
) -> Iterator[None]:
    """Within it, functions with this code run their loops over open sizes as scans.

    So do those of as many steps as one of `steps`. The sizes of blocks of which the last may be
    shorter are added to `blocks`. Where an axis is `parted`, so are the parts of a split.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(Helpers, "met", blocks))
        stack.enter_context(patch.object(Lists, "steps", steps))
        stack.enter_context(patch.object(Lists, "parted", parted))
        objects = gc.get_objects() if codes else []
        functions = [each for each in objects if type(each) is FunctionType]
        for code in sorted(codes, key=lambda code: "<locals>" in code.co_qualname):  # makers first
            with suppress(OSError, SyntaxError, Unread):
                new = _rewritten(code)
                for function in _with_code(code, functions):
                    own = function.__code__
                    stack.enter_context(patch.dict(function.__globals__, {HELPERS: Helpers}))
                    stack.callback(setattr, function, "__code__", own)
                    function.__code__ = _with(own, code, new)
        yield


def _with_code(code: CodeType, functions: Iterable[FunctionType]) -> list[FunctionType]:
    """The functions that run this code, and those that make such functions when they are called."""
    name, inner, _ = code.co_qualname.partition(".<locals>.")

    def has_it(other: CodeType) -> bool:
        is_maker = inner and (other.co_filename, other.co_qualname) == (code.co_filename, name)
        return other is code or bool(is_maker)

    return [each for each in functions if has_it(each.__code__)]


def _with(outer: CodeType, code: CodeType, new: CodeType) -> CodeType:
    """The code with another in the place of one that is it, or that it holds at some depth."""
    if outer is code:
        return new
    consts = (
        _with(each, code, new) if isinstance(each, CodeType) else each for each in outer.co_consts
    )
    return outer.replace(co_consts=tuple(consts))


def _rewritten(code: CodeType) -> CodeType:
    """The code with its loops as scans. Raises Unread where it has none, or its source is gone."""
    source = textwrap.dedent(inspect.getsource(code))
    (function,) = ast.parse(source).body
    if not isinstance(function, ast.FunctionDef):
        raise Unread
    function.decorator_list = []
    function, cuts = counted(spelled(function, HELPERS), HELPERS)
    writer = _Writer(function)
    function = writer.visit(function)
    if not writer.written and not cuts:
        raise Unread
    outer = ast.parse(f"def outer({', '.join(code.co_freevars)}):\n    pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [function]
    tree = ast.fix_missing_locations(ast.Module([outer], []))
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    made = compile(tree, code.co_filename, "exec", dont_inherit=True)
    for name in (outer.name, function.name):  # from Python 3.14 on, annotations are code as well
        codes = (each for each in made.co_consts if isinstance(each, CodeType))
        made = next(each for each in codes if each.co_name == name)
    if made.co_freevars != code.co_freevars:
        raise Unread
    return made.replace(co_name=code.co_name, co_qualname=code.co_qualname)


class _Writer(ast.NodeTransformer):
    """Rewrites the loops of a function that range over numbers."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._function, self.written = function, 0
        self._around: list[Body] = []
        given = function.args
        args = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        self._locals = stored(function.body) | {each.arg for each in args if each is not None}

    def visit_For(self, node: ast.For) -> Any:
        with suppress(Unread):
            return self._scanned(node)
        return self.generic_visit(node)

    def _scanned(self, loop: ast.For) -> list[ast.stmt]:
        given = range_of(loop.iter)
        if given is None or loop.orelse or not isinstance(loop.target, ast.Name):
            raise Unread
        call, turn = given
        after = read_after(self._function, loop)
        statements = getattr(loop, PLAIN, loop.body)
        body = Body(loop.target.id, statements, after, str(self.written))
        carried = sorted(body.assigned & (body.read_first | after) | body.changed)
        step, bounds = f"__step_{self.written}", ast.unparse(ast.Tuple(call.args, ast.Load()))
        if turn:
            bounds = f"{HELPERS}.backwards({bounds})"
        self.written += 1
        known = {body.index, *body.assigned, *body.changed, *body.sequences}
        own = (stored(each.statements).union(each.sequences) for each in self._around)
        held = sorted((loaded(body.statements) & self._locals.union(*own)) - known)
        given_to = {body.index, *carried, *body.sequences, *held}
        given_names = ", ".join(
            [f"__known_{body.number}", body.index, *carried, *body.sequences, *held]
        )
        made = [*body.appended, *body.rows]
        results = f"return [{', '.join(carried)}], [{', '.join(made)}]"
        initial = ", ".join(f"lambda: {body.before.get(name, name)}" for name in carried)
        wanted = [name in after or name in body.before for name in carried]
        sequences = ", ".join(map(str, body.sequences.values()))
        rows = ", ".join(map(str, body.rows.values()))
        lists = ", ".join(f"({each.name}, {each.offset}, {each.depth})" for each in body.places)
        is_open, until = f"__open_{body.number}", "None"
        written: list[str] = []
        if self._around and not turn and (moved := self._around[-1].blocks.of_index(call.args)):
            known_of, pair = f"__known_{self._around[-1].number}", f"__bounds_{body.number}"
            written = [f"{pair} = {HELPERS}.up_to({known_of}, {bounds}, {moved})"]
            bounds, until = f"{pair}[0]", f"{pair}[1]"
        lines = [
            *written,
            f"{is_open} = {HELPERS}.is_open({bounds}, [{lists}])",
            f"if {is_open}:",
            f"    def {step}({given_names}):",
            *(f"        {name} = {HELPERS}.own({name})" for name in sorted(body.changed)),
            *(f"        {name} = {HELPERS}.undefined" for name in sorted(body.chosen - given_to)),
            f"        {results}",
            f"    {step}_found = {HELPERS}.run({bounds}, {step}, [{initial}], "
            f"[{sequences}], {wanted}, [{', '.join(f'lambda: {name}' for name in held)}], "
            f"{body.by_first}, {until})",
            f"    {is_open} = {step}_found is not None",
            f"if {is_open}:",
            f"    {step}_after, {step}_made = {step}_found",
            *(
                f"    {HELPERS}.change({name}, {step}_after[{at}])"
                if name in body.changed
                else f"    {name} = {_after(body, name, f'{step}_after[{at}]')}"
                for at, name in enumerate(carried)
                if name not in body.before
            ),
            *(
                f"    {each.of} = {HELPERS}.Steps({each.of}, {step}_made[{at}], {each.in_front}, "
                f"{each.every}, {bounds})"
                for at, each in enumerate(body.appended.values())
            ),
            f"    {HELPERS}.put({bounds}, [{rows}], {step}_made[{len(body.appended)}:])",
        ]
        *asked, tried, taken = parsed("\n".join(lines), loop)
        assert isinstance(tried, ast.If)
        assert isinstance(taken, ast.If)
        assert isinstance(tried.body[0], ast.FunctionDef)
        inner = tried.body[0].body
        self._around.append(body)
        inner[-1:-1] = self._visited(body.statements)
        self._around.pop()
        self.generic_visit(loop)
        taken.orelse = [loop]
        return [*asked, tried, taken]

    def _visited(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Statements whose own loops are written as well."""
        block = ast.If(ast.Constant(True), [*statements], [])
        self.generic_visit(block)
        return block.body


def _after(body: Body, name: str, value: str) -> str:
    """What a name is given after the last step, which leaves `value` there."""
    return f"{HELPERS}.left(lambda: {name}, {value})" if name in body.in_place else value
