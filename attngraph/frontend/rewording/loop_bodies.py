"""The body of a loop over numbers, as statements of a function: what its steps read and keep."""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from attngraph.frontend.rewording.loop_blocks import Blocks, Taken
from attngraph.frontend.rewording.loop_choices import Choosing
from attngraph.frontend.rewording.loop_in_place import apart
from attngraph.frontend.rewording.loop_lags import Place, ahead, latest
from attngraph.frontend.rewording.loop_lists import Unread
from attngraph.frontend.rewording.loop_names import counted, loaded, read_first, stored, stored_in
from attngraph.frontend.rewording.loop_statements import (
    HELPERS,
    Plain,
    added_to,
    assigned_to,
    expression,
    located,
    parsed,
)

_LEAVES = (
    *(ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await),
    *(ast.Global, ast.Nonlocal, ast.Delete, ast.Try, ast.With),
    *(ast.FunctionDef, ast.ClassDef, ast.Lambda),
)
"""Syntax that a body may not have, or that hides which names it assigns."""
_BACK = 3
"""How far back a step may read in a list that it appends to."""


class _Filled(NamedTuple):
    """A list that each step adds to, behind what it holds or in front of that.

    With `every`, a divisor and a rest, only steps whose number leaves that rest do. With `firm` one
    does where its number says so that is known while it is traced.
    """

    of: str
    in_front: bool
    every: str = "None"
    firm: bool = False


class Body:
    """The body of a loop over `index`, as statements of a function.

    `assigned` are its names, and `read_first` those that it may read before it assigns them.
    `changed` are tensors, lists and dicts of which it writes a part that is none of this step, and
    `in_place` the names of what it changes as a whole.
    `sequences` are what it reads of a tensor in each step, by the name of that slice. `appended`
    are lists, by the name of what is appended, and `rows` what it writes of a tensor, by the
    slice's name. `before` says what a name of our own is before the first step: the last elements
    of a list that is appended to. Such names have the loop's own `number`. Raises Unread for
    anything else that outlives a step.
    """

    def __init__(
        self, index: str, statements: Sequence[ast.stmt], after: Collection[str], number: str
    ) -> None:
        self.index, self.number = index, number
        self.sequences: dict[str, Taken] = {}
        self.appended: dict[str, _Filled] = {}
        self.rows: dict[str, Taken] = {}
        self.before: dict[str, str] = {}
        self.some: list[str] = []
        self.places: list[Place] = []
        self.changed: set[str] = set()
        if any(isinstance(each, _LEAVES) for part in statements for each in ast.walk(part)):
            raise Unread
        plain = Plain(number)
        statements = [made for part in statements for made in plain.of(copy.deepcopy(part))]
        statements, self.in_place = apart(statements, HELPERS)
        self.assigned, self.bound = stored(statements), stored_in(statements)
        if index in self.bound:
            raise Unread
        self.blocks = Blocks(index, statements, self.bound)
        self.changed = self._changed(statements)
        for statement in statements:
            self._fill(statement)
        self.counted, self._last = counted(index, statements), latest(index, statements)
        slices = _Slices(self)
        self.statements = [slices.visit(statement) for statement in statements]
        unset = [f"{name} = {HELPERS}.nothing" for name in self.some]
        self.statements = [
            *(made for text in unset for made in parsed(text, statements[0])),
            *self._first_rows(),
            *self._shifted(self.statements),
        ]
        self.statements = [
            self.blocks.sized(each, HELPERS, f"__known_{number}")
            for each in self.blocks.without_ends(self.statements, after)
        ]
        self.assigned = stored(self.statements)
        left = loaded(self.statements)
        filled = {each.of for each in self.appended.values()}
        if left & {*filled, *(taken.of for taken in self.rows.values())}:
            raise Unread  # reads what it fills
        self.read_first, _ = read_first(self.statements, set())
        if self.changed & self.assigned & self.read_first & _changed_early(self.statements):
            raise Unread  # another thing of the same name is changed
        self.changed -= self.assigned
        for each in (each for part in self.statements for each in ast.walk(part)):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                raise Unread
            if isinstance(each, ast.Expr) and not isinstance(each.value, ast.Constant):
                self._check_own(each)
        firm = [name for name, each in self.appended.items() if each.firm]
        choosing = Choosing(index, HELPERS, number, firm)
        block = choosing.generic_visit(ast.If(ast.Constant(True), self.statements, []))
        assert isinstance(block, ast.If)
        self.statements, self.by_first = block.body, choosing.compares
        self.chosen = choosing.names

    def _changed(self, statements: Sequence[ast.stmt]) -> set[str]:
        """The names of which a part is assigned that is no slice of this step."""
        changed: set[str] = set()
        for each in (each for part in statements for each in ast.walk(part)):
            match each:
                case ast.AugAssign(target=ast.Subscript() as target) if not self.slice_of(target):
                    raise Unread  # what it changes may have another name
        for each in (each for part in statements for each in ast.walk(part)):
            if not isinstance(each, ast.Subscript) or not isinstance(each.ctx, ast.Store):
                continue
            found = self.slice_of(each)
            if found is not None:
                row, _ = found
                if row not in self.rows.values():
                    self.rows[f"__row_{self.number}_{len(self.rows)}"] = row
            elif isinstance(each.value, ast.Name):
                changed.add(each.value.id)
            else:
                raise Unread
        of = [row.of for row in self.rows.values()]
        if len({*of}) < len(of) or changed & {*of}:
            raise Unread
        return changed

    def _fill(self, statement: ast.stmt) -> None:
        """Notes a list that a statement of every step adds to, or that of some."""
        match statement:
            case ast.If(test=test, body=body, orelse=orelse):
                sides = [added_to(side) for side in (body, orelse)]
                for name in dict.fromkeys([*sides[0], *sides[1]]):
                    counts = [side.get(name, []) for side in sides]
                    if sum(map(len, counts)) == 1:
                        every = self._every(test) if counts[0] else "None"
                        if every != "None" or self._is_of_number(test):
                            self._note(name, {*counts[0], *counts[1]}, every)
            case ast.Expr():
                for name, how in added_to([statement]).items():
                    self._note(name, {*how})

    def _note(self, name: str, how: Collection[str], every: str | None = None) -> None:
        known = [each.of for each in self.appended.values()]
        if name in self.assigned or name in known or len(how) != 1:
            return
        made = f"__appended_{self.number}_{len(self.appended)}"
        is_some = every is not None
        self.appended[made] = _Filled(name, "insert" in how, every or "None", every == "None")
        if is_some:
            self.some.append(made)

    def _every(self, test: ast.expr) -> str:
        """`t % 2 == 0` as its divisor and rest; "None" of other conditions."""
        rest = "0"
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=quotient):
                pass
            case ast.Compare(left=quotient, ops=[ast.Eq()], comparators=[other]):
                rest = ast.unparse(other)
            case _:
                return "None"
        match quotient:
            case ast.BinOp(
                left=ast.BinOp(left=ast.Name(id=index), op=ast.Add(), right=ahead),
                op=ast.Mod(),
                right=divisor,
            ):
                rest = f"({rest} - {ast.unparse(ahead)}) % {ast.unparse(divisor)}"
            case ast.BinOp(left=ast.Name(id=index), op=ast.Mod(), right=divisor):
                pass
            case _:
                return "None"
        names = loaded([test]) - {index}
        if index == self.index and not names & self.bound:
            return f"({ast.unparse(divisor)}, {rest})"
        return "None"

    def _is_of_number(self, test: ast.expr) -> bool:
        """Whether it compares the step's number with a constant."""
        match test:
            case ast.Compare(left=one, ops=[_], comparators=[other]):
                sides = (one, other)
            case ast.UnaryOp(op=ast.Not(), operand=one):
                sides = (one, ast.Constant(0))
            case _:
                sides = (test, ast.Constant(0))
        numbers = [isinstance(side, ast.Constant) for side in sides]
        return sum(numbers) == 1 and any(ast.unparse(side) == self.index for side in sides)

    def _check_own(self, statement: ast.Expr) -> None:
        """Raises Unread unless it adds to a list of this step's own."""
        match statement.value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=how)):
                if name in self.assigned and how in ("append", "extend", "insert"):
                    return
        raise Unread

    def _first_rows(self) -> list[ast.stmt]:
        """What the rows that are written hold before the step."""
        found: list[ast.stmt] = []
        for name, row in self.rows.items():
            at = self.statements[0]
            value = ast.unparse(self.sequence(row, at))
            found += parsed(f"{name} = {HELPERS}.own({value})", at)
        return found

    def _shifted(self, statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        """Statements in which what is appended moves the earlier elements that steps read."""
        for statement in statements:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)]) if name in self.appended:
                    names, count = [name], 2
                    while (further := f"{name}_{count}") in self.before:
                        names, count = [*names, further], count + 1
                    if count > 2:
                        targets, values = ", ".join(names), ", ".join(["None", *names[:-1]])
                        (made,) = parsed(f"{targets} = {values}", statement)
                        assert isinstance(made, ast.Assign)
                        assert isinstance(made.value, ast.Tuple)
                        made.value.elts[0] = statement.value
                        statement = made
            yield statement

    def sequence(self, taken: Taken, at: ast.AST) -> ast.expr:
        """The slice of this step."""
        known = {what: own for own, what in self.sequences.items()}
        own = known.get(taken) or f"__slice_{self.number}_{len(self.sequences)}"
        self.sequences[own] = taken
        return ast.copy_location(ast.Name(own, ast.Load()), at)

    def element(self, node: ast.Subscript) -> ast.expr | None:
        """An element, counted from the end, of a list that each step appends to."""
        if not isinstance(node.value, ast.Name):
            return None
        of = node.value.id
        made = next((own for own, each in self.appended.items() if each[:2] == (of, False)), None)
        if made is None:
            return None
        match node.slice:
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(count))):
                back = -count
            case _:
                offset = ahead(self.index, node.slice)
                if offset is None:
                    return None
                last = self._last[of]
                back = offset - last - 1
                self.places.append(Place(of, last, -back))
        if back >= 0 or back < -_BACK:
            return None
        for count in range(1, -back + 1):
            self.before[made if count == 1 else f"{made}_{count}"] = f"{of}[-{count}]"
        own = made if back == -1 else f"{made}_{-back}"
        return ast.copy_location(ast.Name(own, ast.Load()), node)

    def slice_of(self, target: ast.Subscript) -> tuple[Taken, ast.expr | None] | None:
        """What `x[:, t, …]` or `x[:, t : t + size, …]` takes, and the rest of the index that is
        taken of that; None for others.
        """
        items = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
        blocks = {at: block for at, item in enumerate(items) if (block := self.blocks.of(item))}
        single = [at for at, item in enumerate(items) if ast.unparse(item) == self.index]
        places = [*single, *blocks]
        of = target.value
        while isinstance(of, ast.Attribute):
            of = of.value
        taken = {HELPERS, *self.bound, *self.changed}
        is_known = isinstance(of, ast.Name) and of.id not in taken
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


def _is_list(item: ast.expr) -> bool:
    return isinstance(item, (ast.List, ast.Starred))


def _changed_early(statements: Iterable[ast.stmt]) -> set[str]:
    """The names of which a part is assigned before the step has given them to something else."""
    early, known = set[str](), set[str]()
    for part in statements:
        for each in ast.walk(part):
            match each:
                case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()) if name not in known:
                    early.add(name)
        known = read_first([part], known)[1]
    return early


class _Slices(ast.NodeTransformer):
    """Has a body read slices of this step, and compute with numbers that may be tensors."""

    def __init__(self, body: Body) -> None:
        self._body, self._depth = body, 0

    def visit_For(self, node: ast.For) -> Any:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        if not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        if (element := self._body.element(node)) is not None:
            return element
        found = self._body.slice_of(node)
        if found is None:
            self.generic_visit(node)
            names = loaded([node.slice])
            # A loop within this one may take slices of its own.
            is_open = names & self._body.counted if self._depth else names
            return self._of_numbers(node) if is_open else node
        taken, rest = found
        own = next((name for name, row in self._body.rows.items() if row == taken), None)
        value = ast.Name(own, ast.Load()) if own else self._body.sequence(taken, node)
        ast.copy_location(value, node)
        if rest is None:
            return value
        part = ast.copy_location(ast.Subscript(value, self.visit(rest), ast.Load()), node)
        return self._of_numbers(part) if loaded([rest]) else part

    def _of_numbers(self, node: ast.Subscript) -> ast.expr:
        """A part at numbers that may be tensors, as that of the step is."""
        if HELPERS in loaded([node.value]):
            return node
        at = ast.Subscript(self._helper("index", node), node.slice, ast.Load())
        call = ast.Call(self._helper("part", node), [node.value, at], [])
        return located(call, node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """What is written to a slice of this step is a new row."""
        match node.targets:
            case [ast.Subscript() as target] if found := self._body.slice_of(target):
                row, rest = found
                made = next(name for name, each in self._body.rows.items() if each == row)
                if self._depth and rest is not None:
                    own = located(ast.Name(made, ast.Load()), target)
                    part = located(ast.Subscript(own, self.visit(rest), ast.Store()), target)
                    return located(ast.Assign([part], self.visit(node.value)), node)
                at = ast.Subscript(ast.Name("index"), self.visit(rest or ast.Tuple([])), ast.Load())
                index = f"{HELPERS}.{ast.unparse(at)}" if rest else "()"
                (written,) = parsed(f"{made} = {HELPERS}.row({made}, {index}, None)", node)
                assert isinstance(written, ast.Assign)
                assert isinstance(written.value, ast.Call)
                written.value.args[2] = self.visit(node.value)
                return written
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        if not isinstance(node.target, ast.Subscript):
            return self.generic_visit(node)
        before = copy.deepcopy(node.target)
        before.ctx = ast.Load()
        value = located(ast.BinOp(before, node.op, node.value), node)
        return self.visit_Assign(located(ast.Assign([node.target], value), node))

    def visit_Expr(self, node: ast.Expr) -> Any:
        """What is added to a list that all steps fill is given a name."""
        match node.value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=how), args=args):
                filled = name, how == "insert"
                made = next(
                    (own for own, each in self._body.appended.items() if each[:2] == filled), None
                )
                is_front = len(args) == 2 and ast.unparse(args[0]) == "0"
                if made is not None and (is_front if how == "insert" else len(args) == 1):
                    value = self.visit(args[-1])
                    return assigned_to(made, value, node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        if name == "torch.arange":
            return self._places(node)
        match node.args:
            case [ast.Constant(value=str(value))] if name == "float":  # which stands for our own
                return located(ast.Constant(float(value)), node)
        if name in ("min", "max") and len(node.args) > 1 and not node.keywords:
            node.func = self._helper(name, node)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        for op, name in ((ast.Pow, "power"), (ast.Div, "quotient")):
            if isinstance(node.op, op):
                call = ast.Call(self._helper(name, node), [node.left, node.right], [])
                return ast.copy_location(call, node)
        return node

    def _places(self, node: ast.Call) -> ast.expr:
        """`torch.arange(start, end)`: those of a block are a block of all places."""
        found = self._body.blocks.places(node)
        if isinstance(found, ast.expr):
            return found
        own = self._body.sequence(Taken(f"{HELPERS}.PLACES", 0, found), node)
        made = ast.Call(ast.Attribute(own, "to", ast.Load()), [], node.keywords)
        return located(made, node) if node.keywords else own

    def _helper(self, name: str, at: ast.AST) -> ast.expr:
        return expression(f"{HELPERS}.{name}", at)
