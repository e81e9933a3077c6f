"""What the steps of a loop choose by its number, or by other numbers in tensors.

`if t == 0` is known of a first step that is traced apart, and of all others. Of any other number
that is in a tensor until a run, `if t % 2 == 0`, both sides are computed and one is taken.
"""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from attngraph.frontend.rewording.loop_lists import Steps, Unread
from attngraph.frontend.rewording.loop_names import stored
from attngraph.frontend.rewording.loop_statements import expression, located, parsed

_SIGNS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ASKED = "_attngraph_asked"
"""An attribute of conditions that were rewritten."""
PLAIN = "_attngraph_plain"
"""An attribute of loops: their bodies as they were before what is around them chose."""
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}


class Undefined:
    """Stands for a name that nothing has been assigned to."""


UNDEFINED = Undefined()


def as_tensor(leaf: Any) -> Any:
    """What is carried, in memory of its own; a number becomes a tensor, and so do rows."""
    if isinstance(leaf, torch.Tensor):
        return leaf.clone(memory_format=torch.contiguous_format)
    if type(leaf) in (int, float, bool, torch.SymInt):
        dtypes = {float: torch.float64, bool: torch.bool}
        return torch.full((), leaf, dtype=dtypes.get(type(leaf), torch.int64))
    return leaf.whole() if isinstance(leaf, Steps) else leaf


class Known(NamedTuple):
    """Of the number of a step the `least` that it is, None of no known one, and whether it `is_it`.
    Of the last block of an axis, which may be shorter, `last` is the number, a size. `steps` is the
    range that has the number, where all of it runs as one.
    """

    least: int | None
    is_it: bool
    last: Any = None
    steps: Any = None


def of_kind(leaf: Any, kind: Any) -> Any:
    """A number of Python as a tensor like another; anything else as it is."""
    is_number = type(leaf) in (int, float, bool)
    return torch.full_like(kind, leaf) if is_number and isinstance(kind, torch.Tensor) else leaf


class Choices:
    """What a rewritten function calls where it chooses."""

    nothing = ()
    undefined = UNDEFINED

    @staticmethod
    def compared(how: str, number: Any, other: int, known: Known) -> Any:
        """The number of a step beside a constant: a bool where it is known of the step."""
        least, is_it = known[:2]
        if is_it:
            return _COMPARED[how](least, other)
        if least is not None and least > other:
            return how in (">", ">=", "!=")
        if least == other and how in (">=", "<"):
            return how == ">="
        return _COMPARED[how](number, other)

    @staticmethod
    def unread() -> None:
        raise Unread("what is changed, or added to a list, where a number in a tensor says so")

    @staticmethod
    def is_plain(test: Any) -> bool:
        """Whether Python knows which side is taken."""
        return not (isinstance(test, torch.Tensor) and test.numel() == 1)

    @staticmethod
    def negated(test: Any) -> Any:
        return not test if Choices.is_plain(test) else ~_truth(test)

    @staticmethod
    def both(*tests: Callable[[], Any]) -> Any:
        return _chain(tests, torch.logical_and, ends=False)

    @staticmethod
    def any_of(*tests: Callable[[], Any]) -> Any:
        return _chain(tests, torch.logical_or, ends=True)

    @staticmethod
    def either(test: Any, one: Callable[[], Any], other: Callable[[], Any]) -> Any:
        if Choices.is_plain(test):
            return one() if test else other()
        return Choices.chosen(test, [one()], [other()])[0]

    @staticmethod
    def chosen(test: Any, taken: Sequence[Any], left: Sequence[Any]) -> list[Any]:
        """Each value of two sides. What only one side has is read only where that is taken."""
        return [_choice(_truth(test), one, other) for one, other in zip(taken, left, strict=True)]


def defined(value: Callable[[], Any]) -> Any:
    try:
        return value()
    except (NameError, IndexError):
        return UNDEFINED


def _truth(test: torch.Tensor) -> torch.Tensor:
    return test.reshape(()).to(torch.bool)


def _chain(tests: Sequence[Callable[[], Any]], join: Callable[..., Any], *, ends: bool) -> Any:
    """`and` or `or`: as Python has it up to the first number that is in a tensor."""
    found: Any = None
    for each in tests:
        value = each()
        if not Choices.is_plain(value):
            found = _truth(value) if found is None else join(found, _truth(value))
        elif bool(value) is ends:
            return value
    return not ends if found is None else found


def _choice(test: torch.Tensor, one: Any, other: Any) -> Any:
    if one is other or _is_nothing(other):
        return one
    if _is_nothing(one):
        return other
    leaves, spec = pytree.tree_flatten(one)
    others, how = pytree.tree_flatten(other)
    if how != spec:
        raise Unread("sides that give things of different kinds")
    return pytree.tree_unflatten(
        [_leaf(test, *each) for each in zip(leaves, others, strict=True)], spec
    )


def _is_nothing(value: Any) -> bool:
    return value is UNDEFINED or (isinstance(value, tuple) and not value)


def _leaf(test: torch.Tensor, one: Any, other: Any) -> Any:
    if one is other or (type(one) is type(other) and not _is_tensor(one) and one == other):
        return one
    if not (_is_tensor(one) or _is_tensor(other)):
        one, other = as_tensor(one), as_tensor(other)
    one, other = of_kind(one, other), of_kind(other, one)
    if not (_is_tensor(one) and _is_tensor(other)):
        raise Unread("sides that give things of different kinds")
    if one.dtype != other.dtype or tuple(one.shape) != tuple(other.shape):
        raise Unread("sides that give tensors of different types")
    return torch.where(test, one, other)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class Choosing(ast.NodeTransformer):
    """Has statements of a step ask our helpers which side is taken. `compares` tells whether some
    compare the step's number, the name `index`, with a constant. The names that are `firm` are not
    given on one side alone, unless that is known. `names` are those that choices give to something,
    which stand for UNDEFINED before that.
    """

    def __init__(self, index: str, helpers: str, number: str, firm: Collection[str]) -> None:
        self._index, self._helpers, self._number = index, helpers, number
        self._firm = {*firm}
        self._made, self.compares = 0, False
        self.names: set[str] = set()
        self._known = ast.Name(f"__known_{number}", ast.Load())

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        (sign, *more) = node.ops
        name = _SIGNS.get(type(sign), "")
        if more or not name:
            return node
        sides = (node.left, node.comparators[0])
        match sides:
            case (ast.Name(id=index), ast.Constant(value=int())) if index == self._index:
                pass
            case (ast.Constant(value=int()), ast.Name(id=index)) if index == self._index:
                name, sides = _TURNED[name], sides[::-1]
            case _:
                return node
        self.compares = True
        return self._call("compared", node, ast.Constant(name), *sides, self._known)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test = self.test(node.test)
        sides = [_lambda(self.visit(side)) for side in (node.body, node.orelse)]
        return self._call("either", node, test, *sides)

    def visit_For(self, node: ast.For) -> ast.For:
        """Of a loop within it, which may be a scan of its own, the body is kept as it is."""
        setattr(node, PLAIN, copy.deepcopy(node.body))
        self.generic_visit(node)
        return node

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        if hasattr(node, _ASKED):
            return self.generic_visit(node)  # type: ignore[return-value]
        name = f"__test_{self._number}_{self._made}"
        self._made += 1
        test = self.test(node.test)
        body, orelse = (
            [made for part in side for made in _listed(self.visit(part))]
            for side in (node.body, node.orelse)
        )
        names = sorted(stored([*body, *orelse]))
        self.names.update(names)
        targets = f"[{', '.join(names)}]"
        helpers = self._helpers
        first, asked = parsed(
            f"{name} = None\n"
            f"if {helpers}.is_plain({name}):\n"
            f"    if {name}: pass\n"
            "else:\n"
            f"    {name}_held = {targets}\n"
            f"    {name}_taken = {targets}\n"
            f"    {targets} = {name}_held\n"
            f"    {targets} = {helpers}.chosen({name}, {name}_taken, {targets})\n",
            node,
        )
        assert isinstance(first, ast.Assign)
        assert isinstance(asked, ast.If)
        (known,) = asked.body
        assert isinstance(known, ast.If)
        first.value = test
        known.body, known.orelse = body, orelse
        held, taken, back, chosen = asked.orelse
        asked.orelse = [held, *_copies(body), taken, back, *_copies(orelse), chosen]
        if _changes([*body, *orelse]) or self._firm & (stored(body) ^ stored(orelse)):
            asked.orelse = parsed(f"{helpers}.unread()", node)
        setattr(asked, _ASKED, True)
        setattr(known, _ASKED, True)
        return [first, asked]

    def test(self, node: ast.expr) -> ast.expr:
        """A condition, whose parts may be numbers in tensors."""
        match node:
            case ast.BoolOp(op=sign, values=values):
                name = "both" if isinstance(sign, ast.And) else "any_of"
                return self._call(name, node, *(_lambda(self.test(each)) for each in values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._call("negated", node, self.test(operand))
            case ast.Name(id=index) if index == self._index:
                self.compares = True
                return self._call(
                    "compared", node, ast.Constant("!="), node, ast.Constant(0), self._known
                )
        made: ast.expr = self.visit(node)
        return made

    def _call(self, name: str, at: ast.expr, *args: ast.expr) -> ast.Call:
        helper = expression(f"{self._helpers}.{name}", at)
        return located(ast.Call(helper, [*args], []), at)


def _lambda(value: ast.expr) -> ast.Lambda:
    none = ast.arguments([], [], None, [], [], None, [])
    return ast.copy_location(ast.Lambda(none, value), value)


def _changes(statements: Iterable[ast.stmt]) -> bool:
    """Whether statements do more than give things to names."""
    for each in (each for part in statements for each in ast.walk(part)):
        match each:
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Expr():
                return True
            case ast.Subscript() | ast.Attribute() if not isinstance(each.ctx, ast.Load):
                return True
            case ast.Call(func=ast.Attribute(attr=name)) if (
                name.endswith("_") and name[-2:] != "__"
            ):
                return True
    return False


def _copies(statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The same on a side that may count for nothing: its places are within their tensors, and it
    changes none that the other side reads.
    """
    copies = [_Apart().visit(copy.deepcopy(part)) for part in statements]
    for each in (each for part in copies for each in ast.walk(part)):
        if isinstance(each, ast.Attribute) and each.attr == "part":
            each.attr = "part_within"
    return copies


def _listed(made: Any) -> list[ast.stmt]:
    return made if isinstance(made, list) else [made]


class _Apart(ast.NodeTransformer):
    """Has `x += y` give x to something new."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        if not isinstance(node.target, ast.Name):
            return node
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return located(ast.Assign([node.target], value), node)
