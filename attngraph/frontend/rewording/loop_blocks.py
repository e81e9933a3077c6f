"""Which part of a tensor a step of a loop takes: `x[:, t]`, or a block `x[:, t : t + size]`.

A block begins at an affine function of the step and has one size, but for the last one, which may
be shorter. It is written in terms of the step: `start = i * size` and `end = min(start + size,
length)`, assigned in the body, are read.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from attngraph.frontend.rewording.loop_statements import called_name, expression, located

_PARTS = (ast.Name, ast.Constant, ast.Attribute, ast.BinOp, ast.Add, ast.Sub, ast.Mult)
_KINDS = {"device", "dtype"}
_DEPTH = 4  # names that stand for each other


class Taken(NamedTuple):
    """One place along an axis of a tensor, or a `block`: where it begins, its end and its limit, as
    functions of the step in Python's words. As a string it is the argument of a helper.
    """

    of: str
    axis: int
    block: str

    def __str__(self) -> str:
        return f"({self.of}, {self.axis}, {self.block})"


class Blocks:
    """The blocks that a body takes in the step `index`; `assigned` are the names that it gives."""

    def __init__(
        self, index: str, statements: Sequence[ast.stmt], assigned: Collection[str]
    ) -> None:
        self._index, self._assigned = index, assigned
        self._limited: set[tuple[str, str]] = set()
        times = Counter(name for part in statements for name in _names(part, ast.Store))
        self._known: dict[str, ast.expr] = {}
        read: set[str] = set()
        for statement in statements:
            read.update(_names(statement, ast.Load))
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    if times[name] == 1 and name not in read and _is_arithmetic(value):
                        self._known[name] = copy.deepcopy(value)

    def of(self, item: ast.expr) -> str:
        """A slice as `lambda step: (start, end, limit)`; "" where it is none of this step."""
        if not isinstance(item, ast.Slice) or item.step is not None:
            return ""
        if item.lower is None or item.upper is None:
            return ""
        start, end = (self._spelled(part) for part in (item.lower, item.upper))
        limit: ast.expr = ast.Constant(None)
        if (sides := self._sides(end)) is not None:
            end, limit = sides
        if not all(self._is_plain(part) and self._moves(part) for part in (start, end)):
            return ""
        self._limited.add((ast.unparse(end), ast.unparse(limit)))
        told = ", ".join(map(ast.unparse, (start, end, limit)))
        return f"lambda {self._index}: ({told})"

    def places(self, call: ast.Call) -> ast.expr | str:
        """`torch.arange(start, end)` with an end that no step moves: of as many places as they are
        apart, or as a block of all places, spelled as `of` does. Any other is as it was.
        """
        if len(call.args) != 2 or not {each.arg for each in call.keywords} <= _KINDS:
            return call
        start, end = call.args
        if not self._moves(self._spelled(start)):
            return call
        match end:
            case ast.BinOp(left=left, op=ast.Add(), right=size):
                if ast.unparse(left) == ast.unparse(start):
                    call.args = [size]
                    return located(ast.BinOp(call, ast.Add(), start), call)
        return self.of(ast.Slice(start, end)) or call

    def of_index(self, parts: Sequence[ast.expr]) -> str:
        """Numbers as `lambda step: (…)`; "" where no step moves them, or not in an affine way."""
        spelled = [self._spelled(part) for part in parts]
        if not any(map(self._moves, spelled)) or not all(map(self._is_plain, spelled)):
            return ""
        return f"lambda {self._index}: {ast.unparse(ast.Tuple(spelled, ast.Load()))}"

    def _sides(self, part: ast.expr) -> tuple[ast.expr, ast.expr] | None:
        """Of `min(start + size, length)`, what moves with the step and what limits it."""
        match part:
            case ast.Call(args=[one, other], keywords=[]) if called_name(part) == "min":
                end, limit = (one, other) if self._moves(one) else (other, one)
                if self._moves(end) and not self._moves(limit) and self._is_plain(limit):
                    return end, limit
        return None

    def sized(self, statement: ast.stmt, helpers: str, known: str) -> ast.stmt:
        """With numbers of the step asked of our helpers, one that has a name or is how far two are
        apart, as `end - start`: it may be the size of the blocks, which all have but the last one.
        """
        blocks = self

        class Sizing(ast.NodeTransformer):
            def visit_Assign(self, node: ast.Assign) -> ast.AST:
                if node is statement and _gives(node) in blocks._known:
                    node.value = blocks._asked(node.value, helpers, known) or node.value
                    return node
                return self.generic_visit(node)

            def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
                if isinstance(node.op, ast.Sub) and _is_arithmetic(node):
                    sides = (blocks._spelled(side) for side in (node.left, node.right))
                    if all(map(blocks._moves, sides)):
                        return blocks._asked(node, helpers, known) or node
                return self.generic_visit(node)

        made: ast.stmt = Sizing().visit(statement)
        return made

    def _asked(self, number: ast.expr, helpers: str, known: str) -> ast.expr | None:
        """A number of the step as a call of our helpers; None where that isn't known."""
        of_all, of_last = (self._resolved(number, limited=limited) for limited in (False, True))
        if of_all is None or of_last is None or not self._moves(of_all):
            return None
        told = (f"lambda {self._index}: {ast.unparse(each)}" for each in (of_all, of_last))
        call = f"{helpers}.of_block({known}, {self._index}, {', '.join(told)})"
        return expression(call, number)

    def _resolved(self, part: ast.expr, *, limited: bool) -> ast.expr | None:
        """With the side that a block's end has in the place of each min; None if one is of no
        block, or it isn't affine in the step.
        """
        blocks, others = self, list[ast.expr]()

        class Resolving(ast.NodeTransformer):
            def visit_Call(self, node: ast.Call) -> ast.expr:
                sides = blocks._sides(node)
                if sides is None or tuple(map(ast.unparse, sides)) not in blocks._limited:
                    others.append(node)
                    return node
                return sides[limited]

        made: ast.expr = Resolving().visit(self._spelled(part))
        is_read = not any(called_name(each) in ("min", "max") for each in others)
        return made if is_read and self._is_plain(made) else None

    def without_ends(self, body: list[ast.stmt], after: Collection[str]) -> list[ast.stmt]:
        """Without what gave names to the ends of blocks, if nothing else reads them."""
        while True:
            read = {*after, *(name for part in body for name in _names(part, ast.Load))}
            kept = [part for part in body if _gives(part) not in self._known.keys() - read]
            if len(kept) == len(body):
                return kept
            body = kept

    def _moves(self, part: ast.expr) -> bool:
        return any(isinstance(each, ast.Name) and each.id == self._index for each in ast.walk(part))

    def _is_plain(self, part: ast.expr) -> bool:
        """Whether it is affine in the step, with coefficients that no step changes."""
        for each in ast.walk(part):
            if isinstance(each, ast.Name) and each.id in self._assigned:
                return False
            if not isinstance(each, (*_PARTS, ast.expr_context, ast.Subscript, ast.Call)):
                return False
            if isinstance(each, (ast.Call, ast.Subscript, ast.Attribute)) and self._moves(each):
                return False
            match each:
                case ast.BinOp(left=left, op=ast.Mult(), right=right):
                    if self._moves(left) and self._moves(right):
                        return False
        return True

    def _spelled(self, part: ast.expr) -> ast.expr:
        """A part with what the body's names stand for in their place."""
        known = self._known

        class Spelling(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.expr:
                return copy.deepcopy(known.get(node.id, node))

        for _ in range(_DEPTH):
            part = Spelling().visit(copy.deepcopy(part))
        return part


def _is_arithmetic(value: ast.expr) -> bool:
    """Whether it is made of numbers and sizes, with no call that does something else."""
    for each in ast.walk(value):
        if not isinstance(each, (*_PARTS, ast.expr_context, ast.Subscript, ast.Call)):
            return False
        if isinstance(each, ast.Call) and called_name(each) not in ("min", "max", "len"):
            return False
    return True


def _gives(statement: ast.stmt) -> str:
    """The one name that a statement assigns, if that is all it does."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return ""


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> Iterator[str]:
    for each in ast.walk(statement):
        if isinstance(each, ast.Name) and isinstance(each.ctx, context):
            yield each.id
