"""Which names statements read and assign: those of a comprehension are its own."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

_ARITHMETIC = (
    *(ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop),
    *(ast.Name, ast.Attribute, ast.Constant, ast.expr_context),
)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def loaded(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that are read."""
    return _of(nodes, ast.Load)


def stored(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that are assigned."""
    return _of(nodes, ast.Store)


def _of(nodes: Iterable[ast.AST], context: type[ast.expr_context]) -> set[str]:
    return {
        each.id
        for node in nodes
        for each in _names(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, context)
    }


def read_first(statements: Iterable[ast.stmt], known: set[str]) -> tuple[set[str], set[str]]:
    """The names that statements may read before they assign them, and those that are known then."""
    read: set[str] = set()
    for part in statements:
        match part:
            case ast.If():
                read |= loaded([part.test]) - known
                sides = [read_first(side, known) for side in (part.body, part.orelse)]
                read = read.union(*(names for names, _ in sides))
                known = known | (sides[0][1] & sides[1][1])
            case ast.For():
                read |= loaded([part.iter]) - known
                read |= read_first(part.body, known | stored([part.target]))[0]
            case _:
                is_sum = isinstance(part, ast.AugAssign)
                read |= (loaded([part]) | (stored([part]) if is_sum else set())) - known
                if isinstance(part, (ast.Assign, ast.AnnAssign)):
                    known = known | stored([part])
    return read, known


def counted(index: str, statements: Iterable[ast.stmt]) -> set[str]:
    """The index of a loop, and the names of sums and products in which it is, as `t * n + j`."""
    assigned = [
        (each.targets[0].id, each.value)
        for part in statements
        for each in ast.walk(part)
        if isinstance(each, ast.Assign)
        and isinstance(each.targets[0], ast.Name)
        and all(isinstance(inner, _ARITHMETIC) for inner in ast.walk(each.value))
    ]
    found, known = {index}, set[str]()
    while found != known:
        known = set(found)
        found |= {name for name, value in assigned if loaded([value]) & known}
    return found


def read_after(function: ast.FunctionDef, loop: ast.For) -> set[str]:
    """The names that the function reads beyond a loop; all that it reads, if within another.

    What a later loop reads of what it goes through itself is none of them.
    """
    end = loop.end_lineno or 0
    loops = [each for each in ast.walk(function) if isinstance(each, (ast.For, ast.While))]
    is_inner = any(
        each is not loop and each.lineno <= loop.lineno and (each.end_lineno or 0) >= end
        for each in loops
    )

    def names(node: ast.AST, own: frozenset[str]) -> Iterator[str]:
        for each in _names(node, stop=ast.For):
            if isinstance(each, ast.For):
                yield from names(each.iter, own)
                inner = own | stored([each.target])
                for part in (*each.body, *each.orelse):
                    yield from names(part, frozenset(inner))
            elif isinstance(each.ctx, ast.Load) and each.id not in own:
                is_within = loop.lineno <= each.lineno <= end
                if each.lineno > end or (is_inner and not is_within):
                    yield each.id

    return {name for part in function.body for name in names(part, frozenset())}


def _names(node: ast.AST, stop: type[ast.For] | tuple[()] = ()) -> Iterator[ast.Name | ast.For]:
    """The names in a node; loops as a whole, where they are to `stop` the walk."""
    if isinstance(node, ast.Name) or (stop and isinstance(node, stop)):
        yield node
        return
    own: set[str] = set()
    outer: ast.expr | None = None
    if isinstance(node, _COMPREHENSIONS):
        own = stored_in(each.target for each in node.generators)
        outer = node.generators[0].iter  # which is evaluated outside of it
        yield from _names(outer, stop)
    for child in ast.iter_child_nodes(node):
        for each in _names(child, stop):
            if not isinstance(each, ast.Name) or each.id not in own:
                yield each


def stored_in(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that are assigned anywhere in nodes, a comprehension's own included."""
    return {
        each.id
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
