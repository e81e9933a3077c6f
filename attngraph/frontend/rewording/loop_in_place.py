"""What a step changes in place: `aw += a`, `e.masked_fill_(m, v)`, `e.data.mul_(2)`.

What the step has made itself it may change. What is carried to it from the step before it may not,
as torch's scan has no such steps: it goes on with something new, and after the last step the tensor
that was there before the loop is given what it would hold.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch._C._functorch import is_batchedtensor

from attngraph.frontend.rewording.loop_choices import defined
from attngraph.frontend.rewording.loop_lists import Unread
from attngraph.frontend.rewording.loop_names import read_first
from attngraph.frontend.rewording.loop_statements import located, parsed


class Changes:
    """What a rewritten function calls where a step changes something in place."""

    @staticmethod
    def itself(value: Any) -> Any:
        """What a method gives that changes its tensor: that tensor. Other things may do anything
        under such a name.
        """
        if not isinstance(value, torch.Tensor):
            raise Unread("another thing than a tensor is changed")
        return value

    @staticmethod
    def added(before: Any, after: Any) -> Any:
        """What `before` is once a step has changed it in place to `after`, in its own dtype.

        What has no axes may have been a number before the loop, whose type is that of the sum.
        """
        both = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
        if both and before.dim() and after.dtype != before.dtype:
            return after.to(before.dtype)
        return after

    @staticmethod
    def left(before: Callable[[], Any], after: Any) -> Any:
        """What a name stands for after a loop that changes it in place: a tensor that was there
        before holds what it is now, under all its names.
        """
        value = defined(before)
        both = isinstance(value, torch.Tensor) and isinstance(after, torch.Tensor)
        return value.copy_(after) if both and not _is_for_all(value, after) else after


def _is_for_all(value: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether steps that are computed at once share a tensor, which can't hold what each has."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return is_batchedtensor(after) and not is_batchedtensor(value)


def apart(statements: Sequence[ast.stmt], helpers: str) -> tuple[list[ast.stmt], set[str]]:
    """Statements that change in place nothing that was there before the step, and the names of what
    they would only have changed. `helpers` is the global name of what they call.
    """
    statements = [_Named(helpers).visit(statement) for statement in statements]
    carried, _ = read_first(statements, set())
    writer = _Apart(helpers, carried)
    statements = [writer.visit(statement) for statement in statements]
    return statements, writer.changed - writer.given


class _Named(ast.NodeTransformer):
    """Has a name be given what a method leaves there that changes it in place."""

    def __init__(self, helpers: str) -> None:
        self._helpers = helpers

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        of = _changed_by(node.value)
        if of is None:
            return node
        (made,) = parsed(f"{of.id} = {self._helpers}.itself(None)", node)
        assert isinstance(made, ast.Assign)
        assert isinstance(made.value, ast.Call)
        _innermost(node.value).value = of  # without its .data, of which dynamo makes a new tensor
        made.value.args = [node.value]
        return made


class _Apart(ast.NodeTransformer):
    """Has what is `carried` be something new where a step changes it. `changed` are the names of
    that, `given` those that are given something else.
    """

    def __init__(self, helpers: str, carried: Collection[str]) -> None:
        self._helpers, self._carried = helpers, carried
        self.changed, self.given = set[str](), set[str]()

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if isinstance(node.ctx, ast.Store):
            self.given.add(node.id)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        if not isinstance(node.target, ast.Name) or node.target.id not in self._carried:
            return node
        name = node.target.id
        self.changed.add(name)
        (made,) = parsed(f"{name} = {self._helpers}.added({name}, None)", node)
        assert isinstance(made, ast.Assign)
        assert isinstance(made.value, ast.Call)
        made.value.args[1] = ast.BinOp(ast.Name(name, ast.Load()), node.op, node.value)
        return located(made, node)

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(attr="itself"), args=[made]),
            ) if (of := _changed_by(made)) is not None and of.id == name:
                if name in self._carried:
                    self.changed.add(name)
                    (own,) = parsed(f"{self._helpers}.own({name})", of)
                    assert isinstance(own, ast.Expr)
                    _innermost(made).value = own.value
                return node
        self.generic_visit(node)
        return node


def _changed_by(value: ast.expr) -> ast.Name | None:
    """The name of what `e.mul_(a).add_(b)` and `e.data.mul_(a)` change in place; None of others."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        name = value.func.attr
        if name[:1] == "_" or name[-1:] != "_":
            return None
        value = value.func.value
        if isinstance(value, ast.Attribute) and value.attr == "data":
            value = value.value
        if isinstance(value, ast.Name):
            return value
    return None


def _innermost(value: ast.expr) -> ast.Attribute:
    """The method that `_changed_by` comes to last."""
    assert isinstance(value, ast.Call)
    assert isinstance(value.func, ast.Attribute)
    inner = value.func.value
    return _innermost(inner) if isinstance(inner, ast.Call) else value.func
