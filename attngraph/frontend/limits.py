"""Which sizes of its dims a trace holds for: what was asked for, as far as the model takes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
from torch.utils._sympy import functions as torch_sympy

from attngraph.errors import CaptureError
from attngraph.frontend.blocks import equal_dims, holds
from attngraph.frontend.conditions import split
from attngraph.frontend.demands import demands
from attngraph.frontend.locations import quote
from attngraph.frontend.questions import Question
from attngraph.frontend.shapes import Request
from attngraph.frontend.symbols import Symbols
from attngraph.ir.conditions import Condition, always, at_sizes, multiples, shown
from attngraph.ir.dims import DIVIDING, DimInfo, functions_of, symbol, symbols_of
from attngraph.ir.ranges import Ranges

_ORDERS = (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)
_MOST_TRIED = 1 << 12
"""Sizes of a dim at which a condition is tried, each."""


@dataclass(frozen=True)
class Limits:
    """The dims with their ranges, the conditions beside these, and what is to be told of them.

    A range that begins at 2, as all do in torch.export, begins at 1 here: 1 is checked, not assumed
    away. `demanded` are the conditions and the lower ends that nobody asked for, with the place
    where the code asks each.
    """

    dims: Mapping[str, DimInfo]
    conditions: tuple[Condition, ...]
    suspects: tuple[Suspect, ...]
    notes: tuple[str, ...]
    demanded: Mapping[Condition, str]

    def required(self) -> list[Condition]:
        """The conditions that are no suspects, no ends, and more than that dims are unequal."""
        open_ = [suspect.condition for suspect in self.suspects]
        told = [each for each in self.conditions if each not in open_ and unequal(each) is None]
        return [each for each in told if not _is_end(each)]


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
    least size was asked for by number.
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


def settled_limits(
    symbols: Symbols,
    conditions: Sequence[Condition],
    asked: Iterable[Request],
    questions: Iterable[Question],
    *,
    resampled: bool = False,
    refusal: CaptureError | None = None,
) -> Limits:
    """The ranges of a trace's dims, with each condition told once: as a range or as a relation.

    torch.export draws from past + seq ≤ 12 that each is at most 10; these ends go, for the relation
    says it exactly. Raises CaptureError where a range that was asked for can't be had, or torch's
    own `refusal`.
    """
    wanted = {
        request.name: request
        for request in asked
        if request.name is not None and request.name == request.root
    }
    dims = dict(symbols.infos)
    own = [
        (condition, question)
        for question in questions
        if not symbols.unnamed([question.condition])
        for condition in split(symbols.renamed(question.condition))
    ]
    known = [*conditions, *(condition for condition, _ in own)]
    if resampled:  # of which torch has shown nothing at the sizes that were asked for
        known = [condition for condition in known if not _holds_everywhere(condition, wanted)]
    sample = {symbol(name): sympy.Integer(info.hint) for name, info in dims.items()}
    # The trace was made at other sizes than the sample's, at which it was found to be right.
    later = {
        name
        for name, info in dims.items()
        if info.low > (max(_asked(wanted.get(name))[0], 2) if resampled else info.hint)
    }
    beyond = [
        *(
            condition
            for condition in known
            if not isinstance(condition, sympy.Eq)
            and (
                condition.xreplace(sample) == sympy.false
                or (resampled and _leaves_out(condition, wanted, dims))
            )
        ),
        *(sympy.Ge(symbol(name), dims[name].low) for name in later),
    ]
    # Which torch takes for 2 or more, as any size: the numbers of chunks that lengths have.
    counts = [condition for condition in known if _is_count(condition)]
    known = [condition for condition in known if condition not in (*beyond, *counts)]
    recurring = [condition for condition in known if _recurs(condition)]
    dims = {name: replace(i, low=2) if name in later else i for name, i in dims.items()}
    relations = [condition for condition in known if len(symbols_of(condition)) > 1]
    for name, info in list(dims.items()):
        request = wanted.get(name)
        low, high = _asked(request)
        is_lower = info.high is not None and (high is None or high > info.high)
        if is_lower and _explained(name, (info.high or 0) + 1, relations, symbols.infos):
            dims[name] = replace(dims[name], high=high)
        if info.low > max(low, 2) and _explained(name, info.low - 1, relations, symbols.infos):
            dims[name] = replace(dims[name], low=max(low, 1))
        if info.low > max(low, 2) and _tells(counts, name, info.low):
            dims[name] = replace(dims[name], low=max(low, 1))
    from_two = {name: replace(info, low=max(info.low, 2)) for name, info in dims.items()}
    from_one = {n: replace(i, low=1) if i.low == 2 else i for n, i in dims.items()}
    kept: dict[str, Condition] = {}
    suspects = {shown(condition): condition for condition in beyond}
    for condition in counts:
        if always(condition, from_one) is not True:
            suspects.setdefault(shown(condition), condition)
    steps = multiples(known)
    equal = equal_dims(known, steps)
    known += [sympy.Eq(symbol(name), symbol(other)) for name, other in equal.items()]
    # What follows from the least sizes isn't needed below them, where the model is tried itself.
    ends = (*known, *beyond)
    starts = {each: start for each in ends if (start := _start(each, sample)) is not None}
    for condition in known:
        begun = {} if condition in starts else starts
        beyond_one = holds(condition, _begun(from_two, begun), steps, equal, least=2)
        if not beyond_one and condition in recurring:
            suspects.setdefault(shown(condition), condition)
        elif not beyond_one:
            kept.setdefault(shown(condition), condition)
        elif not holds(condition, _begun(from_one, begun), steps, equal, least=1):
            suspects.setdefault(shown(condition), condition)
    for condition, _ in own:
        if unequal(condition) is not None and shown(condition) in kept:
            suspects.setdefault(shown(condition), condition)
    for name, least in _unasked_ends(dims, known, wanted, later).items():
        dims[name], from_one[name] = (replace(each[name], low=1) for each in (dims, from_one))
        suspects.setdefault(shown(least), least)
    places = _Places(own)
    chances = [
        each
        for each in kept.values()
        if isinstance(each, sympy.Ne) and unequal(each) is None and not places.of(each)
    ]
    asked_one = frozenset(name for name, request in wanted.items() if request.low == 1)
    assumed = [
        Suspect(sympy.Ge(symbol(name), 2), "", asked_one & {name}, assumed=True)
        for name, info in from_one.items()
        if info.low == 1
    ]
    _require_asked(wanted, dims, tuple(kept.values()), places, refusal)
    demanded = {
        condition: places.of(condition)
        for condition in kept.values()
        if condition not in chances and unequal(condition) is None
    }
    for name, info in dims.items():
        if info.low > max(_asked(wanted.get(name))[0], 2):
            where = places.of_end(name, info.low - 1, info.low)
            demanded[sympy.Ge(symbol(name), info.low)] = where
    return Limits(
        from_one,
        tuple(kept.values()),
        (
            *(
                _suspect(condition, places, wanted, sample, beyond, recurring)
                for condition in suspects.values()
            ),
            *assumed,
            *(Suspect(each, "", frozenset(), chance=True) for each in chances),
        ),
        (*_at_most(wanted, dims, places), *demands_of(demanded, from_one)),
        demanded,
    )


def _unasked_ends(
    dims: Mapping[str, DimInfo],
    known: Iterable[Condition],
    wanted: Mapping[str, Request],
    later: Iterable[str],
) -> dict[str, Condition]:
    """The least sizes that torch took for granted, by dim: neither the model nor a guard says so.

    `scores[:, 1:] += bias` broadcasts the bias to what it takes for more than one column.
    """
    return {
        name: sympy.Ge(symbol(name), info.low)
        for name, info in dims.items()
        if info.low > max(_asked(wanted.get(name))[0], 2)
        and name not in later
        and not _tells(known, name, info.low)
    }


def _holds_everywhere(condition: Condition, wanted: Mapping[str, Request]) -> bool:
    """Whether a condition on one dim holds at each of the sizes that were asked for, tried all."""
    names = symbols_of(condition)
    if len(names) != 1 or not names <= wanted.keys():
        return False
    (name,) = names
    low, high = _asked(wanted[name])
    if high is None or high - low > _MOST_TRIED:
        return False
    only = Ranges({}, (condition,))
    return not any(only.broken({name: size}) for size in range(low, high + 1))


def _leaves_out(
    condition: Condition, wanted: Mapping[str, Request], dims: Mapping[str, DimInfo]
) -> bool:
    """Whether a condition on one dim may not hold for some of the sizes that were asked for."""
    names = symbols_of(condition)
    if len(names) != 1 or not names <= wanted.keys():
        return False
    asked = {}
    for name in names:
        low, high = _asked(wanted[name])
        asked[name] = replace(dims[name], low=max(low, 2), high=high)
    return always(condition, asked) is not True


def _is_count(condition: Condition) -> bool:
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


def _is_end(condition: Condition) -> bool:
    """Whether it is a dim's least or largest size."""
    sides = [*condition.args]
    return isinstance(condition, _ORDERS) and any(
        side.is_Symbol and other.is_Integer for side, other in (sides, sides[::-1])
    )


def _suspect(
    condition: Condition,
    places: _Places,
    wanted: Mapping[str, Request],
    sample: Mapping[sympy.Symbol, sympy.Integer],
    beyond: Sequence[Condition],
    recurring: Sequence[Condition],
) -> Suspect:
    place, names = places.of(condition), symbols_of(condition)
    start = _start(condition, sample)
    refusal = None
    if start is not None:
        (name,) = names
        if name in wanted and wanted[name].low:
            where = place or ", as torch.export traces it"
            refusal = _narrowed(wanted[name], f"{name} is at least {start}", where)
    return Suspect(
        condition,
        place,
        frozenset(n for n, request in wanted.items() if request.low == 1) & names,
        beyond=condition in beyond,
        recur=condition in recurring,
        start=start,
        refusal=refusal,
    )


def _start(condition: Condition, sample: Mapping[sympy.Symbol, sympy.Integer]) -> int | None:
    """The least size of a dim, if a condition says that and the sample has it."""
    if not _is_end(condition) or condition.xreplace(dict(sample)) != sympy.true:
        return None
    (name,), (end,) = symbols_of(condition), condition.atoms(sympy.Integer)
    for size in (int(end), int(end) + 1):
        held = [at_sizes(condition, {symbol(name): sympy.Integer(n)}) for n in (size - 1, size)]
        if held == [sympy.false, sympy.true]:
            return size
    return None


def _begun(dims: Mapping[str, DimInfo], starts: Mapping[Condition, int]) -> dict[str, DimInfo]:
    found = dict(dims)
    for condition, start in starts.items():
        (name,) = symbols_of(condition)
        found[name] = replace(found[name], low=max(found[name].low, start))
    return found


def _recurs(condition: Condition) -> bool:
    """Whether it is of one dim's remainder or quotient, and leaves out sizes again and again."""
    names = symbols_of(condition)
    divides = bool(functions_of(condition) & DIVIDING)
    return divides and len(names) == 1 and not isinstance(condition, sympy.Eq)


def _tells(counts: Iterable[Condition], name: str, low: int) -> bool:
    """Whether one of them is what makes this the least size of a dim."""
    sizes = [{symbol(name): sympy.Integer(size)} for size in (low - 1, low)]
    return any(
        [at_sizes(condition, size) for size in sizes] == [sympy.false, sympy.true]
        for condition in counts
    )


def unequal(condition: Condition) -> tuple[str, str] | None:
    """The dims that a condition says are unequal, if it says no more.

    torch.export relies on that wherever it asks whether two sizes broadcast, and the trace may well
    be right for equal ones.
    """
    if isinstance(condition, sympy.Ne) and all(side.is_Symbol for side in condition.args):
        first, second = sorted(map(str, condition.args))
        return first, second
    return None


def _asked(request: Request | None) -> tuple[int, int | None]:
    return (1, None) if request is None else (request.low or 1, request.high)


def _explained(
    name: str, size: int, relations: Iterable[Condition], dims: Mapping[str, DimInfo]
) -> bool:
    """Whether a relation excludes this size of the dim for all sizes of the others."""
    place = {symbol(name): sympy.Integer(size)}
    infos = {other: replace(info, low=max(info.low, 2)) for other, info in dims.items()}
    return any(
        always(at_sizes(relation, place), infos) is False
        for relation in relations
        if name in symbols_of(relation)
    )


class _Places:
    """The line of the model where a condition was asked."""

    def __init__(self, own: Sequence[tuple[Condition, Question]]) -> None:
        self._own = own

    def of(self, condition: Condition) -> str:
        return self._first(lambda own: shown(own) == shown(condition))

    def of_end(self, name: str, beyond: int, within: int) -> str:
        """Of the question that tells these two sizes of one dim apart."""
        at = [{symbol(name): sympy.Integer(size)} for size in (beyond, within)]
        return self._first(
            lambda own: (
                symbols_of(own) == {name}
                and [at_sizes(own, place) for place in at] == [sympy.false, sympy.true]
            )
        )

    def _first(self, fits: object) -> str:
        assert callable(fits)
        for condition, question in self._own:
            if fits(condition) and not question.file.startswith("<"):  # code that torch made
                return f" at {quote(question.file, question.line)}"
        return ""


def _ends(
    wanted: Mapping[str, Request], dims: Mapping[str, DimInfo], places: _Places
) -> Iterator[tuple[str, str, bool, str]]:
    """(dim, bound, whether another was asked for by number, place) of each end that is narrower."""
    for name, info in dims.items():
        request = wanted.get(name)
        low, high = _asked(request)
        if info.high is not None and (high is None or high > info.high):
            where = places.of_end(name, info.high + 1, info.high)
            yield name, f"at most {info.high}", high is not None, where
        if info.low > max(low, 2):
            where = places.of_end(name, info.low - 1, info.low)
            yield name, f"at least {info.low}", bool(request and request.low), where


def _require_asked(
    wanted: Mapping[str, Request],
    dims: Mapping[str, DimInfo],
    conditions: Sequence[Condition],
    places: _Places,
    refusal: CaptureError | None,
) -> None:
    """Raises CaptureError where an end that was asked for by number can't be reached."""
    for name, bound, by_number, where in _ends(wanted, dims, places):
        if by_number:
            raise _narrowed(wanted[name], f"{name} is {bound}", where)
    # Others may be 0: the past of a decoder is empty at first.
    infos = {name: replace(info, low=0) for name, info in dims.items()}
    empty = {symbol(n): sympy.Symbol(n, integer=True, nonnegative=True) for n in dims}
    for name, request in wanted.items():
        for end in (request.low, request.high):
            if not end or end < 2:
                continue
            place = {symbol(name): sympy.Integer(end)}
            for condition in conditions:
                if unequal(condition) is not None:
                    continue
                if always(at_sizes(condition, {**empty, **place}), infos) is False:
                    told = _narrowed(request, shown(condition), places.of(condition))
                    raise told if refusal is None or _is_end(condition) else refusal


def _narrowed(request: Request, demand: str, where: str) -> CaptureError:
    low, high = _asked(request)
    sizes = f"{low}..{'' if high is None else high}"
    return CaptureError(
        f"I{str(request)[1:]} can't be {sizes}: the model demands {demand}{where}. Ask for a range "
        f"that it takes, or for whatever it takes: --dim {request.name}=auto, or "
        f"Dim({request.name!r}) without ends."
    )


def _at_most(
    wanted: Mapping[str, Request], dims: Mapping[str, DimInfo], places: _Places
) -> Iterator[str]:
    for name, bound, _, where in _ends(wanted, dims, places):
        if name in wanted and bound.startswith("at most"):
            yield f"Dim {name!r} is {bound}: the model demands it{where}."


def demands_of(demanded: Mapping[Condition, str], dims: Mapping[str, DimInfo]) -> list[str]:
    """What is told of conditions and lower ends, with their places."""
    from_one = {name: replace(info, low=min(info.low, 1)) for name, info in dims.items()}
    return list(demands(list(demanded), from_one, demanded.__getitem__))
