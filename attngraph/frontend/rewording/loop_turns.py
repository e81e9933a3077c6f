"""What a loop gives to its names in each turn, by the number of the turn.

`for i, (a, b) in enumerate(zip(x, range(0, n, 4)))` goes through several things in step. Of each
that is a tensor, a list or a range it is said what a turn reads of it, so that all such loops are
ones over `range(count)`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from itertools import count
from typing import TypeGuard

from attngraph.frontend.rewording.loop_statements import located


@dataclass
class Turns:
    """The turns of one loop; its own names have a number that no other loop has.

    `made` are statements in front of the loop, `index` is the name of the turn's number, `of` what
    has as many elements as there are turns, as arguments of a helper, and `given` the statements
    with which a turn begins.
    """

    number: int
    helpers: str
    made: list[str] = field(default_factory=list)
    of: list[str] = field(default_factory=list)
    index: str = ""
    _given: list[tuple[str, str]] = field(default_factory=list)
    _parts: list[str] = field(default_factory=list)
    _names: count[int] = field(default_factory=count)

    @staticmethod
    def read(target: ast.expr, iterated: ast.expr, number: int, helpers: str) -> Turns | None:
        """None for what is no loop over these. Ranges in it are given names for their ends."""
        turns = Turns(number, helpers)
        if is_range(iterated) or not turns._reads(target, iterated):
            return None
        turns.index = turns.index or f"__turn_{number}"
        return turns

    @property
    def given(self) -> list[str]:
        return [
            *(f"{name} = {text.format(self.index)}" for name, text in self._given),
            *self._parts,
        ]

    @property
    def names(self) -> list[str]:
        """The names from which a turn's values are read."""
        return [text.partition(".")[0].partition("[")[0] for text in self.of]

    def _reads(self, target: ast.expr, iterated: ast.expr) -> bool:
        if is_call(iterated, "enumerate", "start"):
            return self._reads_numbered(target, iterated)
        if is_call(iterated, "zip"):
            elements = target.elts if isinstance(target, ast.Tuple) else []
            return len(elements) == len(iterated.args) > 0 and all(
                self._reads(*pair) for pair in zip(elements, iterated.args, strict=True)
            )
        if isinstance(target, ast.Tuple):
            own = self._name("whole")
            self._parts.append(f"{ast.unparse(target)} = {own}")
            target = ast.Name(own, ast.Store())
        if not isinstance(target, ast.Name):
            return False
        if is_range(iterated):
            return self._reads_range(target.id, iterated)
        if not is_plain(iterated):
            return False
        self.of.append(ast.unparse(iterated))
        self._given.append((target.id, f"{self.of[-1]}[{{}}]"))
        return True

    def _reads_numbered(self, target: ast.expr, iterated: ast.Call) -> bool:
        """`enumerate(x)`, or one that counts from another number."""
        match target:
            case ast.Tuple(elts=[ast.Name(id=name), rest]) if iterated.args:
                pass
            case _:
                return False
        value, *others = [*iterated.args, *(each.value for each in iterated.keywords)]
        if not others and not self.index:
            self.index = name
        else:
            first = ast.unparse(others[0]) if others else "0"
            if others and not isinstance(others[0], ast.Constant):
                return False
            self._given.append((name, f"{{}} + {first}"))
        return self._reads(rest, value)

    def _reads_range(self, name: str, iterated: ast.expr) -> bool:
        found = range_of(iterated)
        if found is None:
            return False
        call, turned = found
        first, stop, step = (self._name(end) for end in ("first", "stop", "step"))
        ends = ", ".join(ast.unparse(each) for each in call.args)
        self.made.append(f"{first}, {stop}, {step} = {self.helpers}.ends({ends})")
        names: list[ast.expr] = [ast.Name(each, ast.Load()) for each in (first, stop, step)]
        call.args = [located(each, call) for each in names]
        if turned:
            ends = f"{self.helpers}.backwards(({first}, {stop}, {step}))"
            first, stop, step = (self._name(end) for end in ("first", "stop", "step"))
            self.made.append(f"{first}, {stop}, {step} = {ends} or (0, 0, 0)")
        self.of.append(f"{self.helpers}.span({first}, {stop}, {step})")
        self._given.append((name, f"{first} + {{}} * {step}"))
        return True

    def _name(self, kind: str) -> str:
        return f"__{kind}_{self.number}_{next(self._names)}"


def range_of(iterated: ast.expr) -> tuple[ast.Call, bool] | None:
    """The range that a loop counts through, and whether backwards; None of other loops."""
    match iterated:
        case ast.Call(func=ast.Name(id="range")):
            return iterated, False
        case ast.Call(func=ast.Name(id="reversed"), args=[inner]):
            found = range_of(inner)
            return found and (found[0], not found[1])
        case ast.Subscript(value=inner, slice=ast.Slice(lower=None, upper=None, step=step)):
            found = range_of(inner)
            is_turn = step is not None and ast.unparse(step) == "-1"
            return found and (found[0], not found[1]) if is_turn else None
    return None


def is_range(value: ast.expr) -> bool:
    """Whether it is a range, in its order or the other way round."""
    if isinstance(value, ast.Subscript):
        return is_range(value.value)
    return is_call(value, "range") or (is_call(value, "reversed") and is_range(value.args[0]))


def is_call(node: ast.expr, name: str, keyword: str = "strict") -> TypeGuard[ast.Call]:
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != name:
        return False
    if any(isinstance(each, ast.Starred) for each in node.args):
        return False
    return all(each.arg == keyword for each in node.keywords)


def is_plain(value: ast.expr) -> bool:
    """Whether it is a name or an attribute, which may be read more than once."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name)
