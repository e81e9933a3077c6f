"""Conditions that a trace states of its sizes without the model being known to need them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy
from torch.utils._sympy import functions as torch_sympy

from attngraph.errors import CaptureError
from attngraph.ir.conditions import Condition, at_sizes
from attngraph.ir.dims import DIVIDING, functions_of, symbol, symbols_of

_ORDERS = (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)


@dataclass(frozen=True)
class Suspect:
    """A condition that the model's own code asked, and that is not known to be required.

    It holds for sizes from 2 on, which is what torch.export takes any size to be, or from twice the
    number that they are multiples of, or says that two dims are unequal: what the trace says of
    other sizes is to be checked. `place` is where it was asked, ` at model.py:12 (…)`; `asked` are
    the dims for which a size of 1 was asked for. Of every dim it is `assumed` that it isn't 1:
    torch drops what then decides nothing, `max(n - 1, 1)`. A trace at other sizes than the sample's
    leaves some out that are `beyond` it, the sample's own among them, where the model runs other
    code. By `chance` two sizes that torch compares, such as those of two shapes made of one dim,
    are equal for a few numbers: a condition of the graph that says they aren't may not be needed.
    On one side of `if padding > 0` a trace asks for sizes that `recur`, as remainders do, and often
    its code does what the other side does. A `start` is the least size of a dim in the trace, not
    above the sample's: if it is required, the dim begins there, or there is a `refusal` where a
    least size was asked for by number. One that `is_end` says how large a dim is at most: the model
    itself fails at each larger size that was tried, or none was.
    """

    condition: Condition
    place: str
    asked: frozenset[str]
    assumed: bool = False
    beyond: bool = False
    chance: bool = False
    recur: bool = False
    start: int | None = None
    refusal: CaptureError | None = None
    is_end: bool = False


def unequal(condition: Condition) -> tuple[str, str] | None:
    """The dims that a condition says are unequal, if it says no more.

    torch.export relies on that wherever it asks whether two sizes broadcast, and the trace may well
    be right for equal ones.
    """
    if isinstance(condition, sympy.Ne) and all(side.is_Symbol for side in condition.args):
        first, second = sorted(map(str, condition.args))
        return first, second
    return None


def is_end(condition: Condition) -> bool:
    """Whether it is a dim's least or largest size."""
    sides = [*condition.args]
    return isinstance(condition, _ORDERS) and any(
        side.is_Symbol and other.is_Integer for side, other in (sides, sides[::-1])
    )


def is_largest(condition: Condition) -> bool:
    """Whether it is a dim's largest size."""
    return isinstance(condition, _ORDERS) and condition.lts.is_Symbol and condition.gts.is_Integer


def start_of(condition: Condition, sample: Mapping[sympy.Symbol, sympy.Integer]) -> int | None:
    """The least size of a dim, if a condition says that and the sample has it."""
    if not is_end(condition) or condition.xreplace(dict(sample)) != sympy.true:
        return None
    (name,), (end,) = symbols_of(condition), condition.atoms(sympy.Integer)
    for size in (int(end), int(end) + 1):
        held = [at_sizes(condition, {symbol(name): sympy.Integer(n)}) for n in (size - 1, size)]
        if held == [sympy.false, sympy.true]:
            return size
    return None


def tells(counts: Iterable[Condition], name: str, low: int) -> bool:
    """Whether one of them is what makes this the least size of a dim."""
    sizes = [{symbol(name): sympy.Integer(size)} for size in (low - 1, low)]
    return any(
        [at_sizes(condition, size) for size in sizes] == [sympy.false, sympy.true]
        for condition in counts
    )


def recurs(condition: Condition) -> bool:
    """Whether it is of one dim's remainder or quotient, and leaves out sizes again and again."""
    names = symbols_of(condition)
    divides = bool(functions_of(condition) & DIVIDING)
    return divides and len(names) == 1 and not isinstance(condition, sympy.Eq)


def is_count(condition: Condition) -> bool:
    """Whether it says that a quotient of one dim, rounded down, is 2 or more: 64 < 64·(n // 64)."""
    if len(symbols_of(condition)) != 1 or not isinstance(condition, _ORDERS):
        return False
    more, less = condition.args[:: 1 if isinstance(condition, (sympy.Ge, sympy.Gt)) else -1]
    difference = sympy.expand(more - less)
    quotients = [*difference.atoms(torch_sympy.FloorDiv)]
    if len(quotients) != 1:
        return False
    count = sympy.Dummy()
    slope, rest = sympy.Wild("a", exclude=[count]), sympy.Wild("b", exclude=[count])
    found = difference.xreplace({quotients[0]: count}).match(slope * count + rest)
    if not found or not all(number.is_Integer for number in found.values()) or found[slope] <= 0:
        return False
    is_strict = isinstance(condition, (sympy.Gt, sympy.Lt))
    return bool((-found[rest] + (1 if is_strict else 0) + found[slope] - 1) // found[slope] == 2)


_LONGEST_PART = 1 << 12


def cut_short(
    parts: Iterable[tuple[sympy.Expr, int]], sample: Mapping[sympy.Symbol, sympy.Integer]
) -> list[Condition]:
    """Conditions that tell apart where a part of an axis is whole, each true of the sample.

    `parts` are sizes of axes with the least that has all of the part. Those of several dims, or of
    one that only a run tells, are left to the trace.
    """
    found: dict[Condition, None] = {}
    for size, least in parts:
        names = [*size.free_symbols]
        if len(names) != 1 or names[0] not in sample:
            continue
        (name,) = names
        for start in range(1, _LONGEST_PART):
            if at_sizes(sympy.Ge(size, least), {name: sympy.Integer(start)}) == sympy.true:
                relation = sympy.Ge if sample[name] >= start else sympy.Lt
                if start > 1:
                    found.setdefault(relation(name, start))
                break
    return [*found]
