"""Which sizes of its dims a trace holds for: what was asked for, as far as the model takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from attngraph.errors import CaptureError
from attngraph.frontend.interface.shapes import Request
from attngraph.frontend.sizes.asked_ranges import (
    Parting,
    Places,
    asked,
    at_most,
    demands_of,
    holds_everywhere,
    leaves_out,
    narrowed,
    partings,
    require_asked,
)
from attngraph.frontend.sizes.blocks import equal_dims, holds
from attngraph.frontend.sizes.conditions import split
from attngraph.frontend.sizes.suspects import (
    Suspect,
    cut_short,
    is_count,
    is_end,
    recurs,
    start_of,
    tells,
    unequal,
)
from attngraph.frontend.sizes.symbols import Symbols
from attngraph.frontend.watching.questions import Question
from attngraph.ir.conditions import (
    Condition,
    always,
    at_sizes,
    left_out_alone,
    multiples,
    shown,
)
from attngraph.ir.dims import DimInfo, symbol, symbols_of

_Sample = Mapping[sympy.Symbol, sympy.Integer]


@dataclass(frozen=True)
class Limits:
    """The dims with their ranges, the conditions beside these, and what is to be told of them.

    A range that begins at 2, as all do in torch.export, begins at 1 here: 1 is checked, not assumed
    away. `demanded` are the conditions and the lower ends that nobody asked for, with the place
    where the code asks each; at `partings` it does another thing at the sizes that were asked for
    beside these.
    """

    dims: Mapping[str, DimInfo]
    conditions: tuple[Condition, ...]
    suspects: tuple[Suspect, ...]
    notes: tuple[str, ...]
    demanded: Mapping[Condition, str]
    partings: tuple[Parting, ...] = ()

    def required(self) -> list[Condition]:
        """The conditions that are no suspects, no ends, and more than that dims are unequal."""
        open_ = [suspect.condition for suspect in self.suspects]
        told = [each for each in self.conditions if each not in open_ and unequal(each) is None]
        return [each for each in told if not is_end(each)]


@dataclass(frozen=True)
class _Said:
    """The conditions of a trace, sorted by what is known of them before any is proved.

    Those `beyond` the sample leave sizes out at which the model runs other code: the sample's own,
    or such as were asked for. `counts` ask for two blocks of a length, as torch takes any size for
    2 or more. `later` are the dims that begin above what the sample shows to be right. Of the
    others, which are `known`, those that recur over the sizes are `recurring`.
    """

    known: Sequence[Condition]
    beyond: Sequence[Condition]
    counts: Sequence[Condition]
    recurring: Sequence[Condition]
    later: frozenset[str]


def settled_limits(
    symbols: Symbols,
    conditions: Sequence[Condition],
    requests: Iterable[Request],
    questions: Iterable[Question],
    *,
    resampled: bool = False,
    refusal: CaptureError | None = None,
    parts: Iterable[tuple[sympy.Expr, int]] = (),
    unguarded: int = 0,
) -> Limits:
    """The ranges of a trace's dims, with each condition told once: as a range or as a relation.

    `resampled` says that the trace was made at other sizes than the sample's. Of sizes that may be
    less than the `parts` that are taken of them, the smaller ones are suspect, and so is a least
    size up to `unguarded`, for which the model's code asks. Raises CaptureError where a range that
    was asked for can't be had, or torch's own `refusal`.
    """
    wanted = {
        request.name: request
        for request in requests
        if request.name is not None and request.name == request.root
    }
    own = [
        (condition, question)
        for question in questions
        if not symbols.unnamed([question.condition])
        for condition in split(symbols.renamed(question.condition))
    ]
    places = Places(own)
    sample = {symbol(name): sympy.Integer(info.hint) for name, info in symbols.infos.items()}
    every = [*conditions, *(condition for condition, _ in own)]
    said = _sorted(every, wanted, symbols.infos, sample, resampled)
    dims = _ranges(said, wanted, symbols.infos)
    kept, suspected = _needed(said, dims, sample, unguarded)
    for condition, _ in own:
        if unequal(condition) is not None and shown(condition) in kept:
            suspected.setdefault(shown(condition), condition)
    left_out = []
    for name, high in _largest_left_out(dims, wanted):
        dims[name] = replace(dims[name], high=high)
        left_out.append(sympy.Ne(symbol(name), high))
        kept.setdefault(shown(left_out[-1]), left_out[-1])
    for name, least in _unasked_ends(dims, said.known, wanted, said.later).items():
        dims[name] = replace(dims[name], low=1)
        suspected.setdefault(shown(least), least)
    shorter = cut_short(parts, sample)
    for condition in shorter:
        suspected.setdefault(shown(condition), condition)
    said = replace(said, beyond=[*said.beyond, *(c for c in shorter if isinstance(c, sympy.Lt))])
    chances = [
        each
        for each in kept.values()
        if isinstance(each, sympy.Ne) and unequal(each) is None
        if each in left_out or not places.of(each) or left_out_alone(each) is not None
    ]
    known = tuple(each for each in kept.values() if each not in chances)
    require_asked(wanted, dims, known, places, refusal)
    from_one = _from_one(dims)
    asked_one = frozenset(name for name, request in wanted.items() if request.low == 1)
    suspects = (
        *(_suspect(each, places, wanted, sample, said) for each in suspected.values()),
        *(
            Suspect(sympy.Ge(symbol(name), 2), "", asked_one & {name}, assumed=True)
            for name, info in from_one.items()
            if info.low == 1
        ),
        *(
            Suspect(
                each,
                places.of(each),
                frozenset(),
                chance=True,
                refusal=_size_refused(each, wanted, places),
            )
            for each in chances
        ),
    )
    demanded = {
        condition: places.of(condition)
        for condition in kept.values()
        if condition not in chances and unequal(condition) is None
    }
    for name, info in dims.items():
        if info.low > max(asked(wanted.get(name))[0], 2):
            where = places.of_end(name, info.low - 1, info.low)
            demanded[sympy.Ge(symbol(name), info.low)] = where
    notes = (*at_most(wanted, dims, places), *demands_of(demanded, from_one))
    parted = tuple(each for each in partings(wanted, dims, places) if each.place)
    return Limits(from_one, tuple(kept.values()), suspects, notes, demanded, parted)


def _sorted(
    conditions: Sequence[Condition],
    wanted: Mapping[str, Request],
    dims: Mapping[str, DimInfo],
    sample: _Sample,
    resampled: bool,
) -> _Said:
    if resampled:  # of which torch has shown nothing at the sizes that were asked for
        conditions = [each for each in conditions if not holds_everywhere(each, wanted)]
    later = frozenset(
        name
        for name, info in dims.items()
        if info.low > (max(asked(wanted.get(name))[0], 2) if resampled else info.hint)
    )
    beyond = [
        each
        for each in conditions
        if not isinstance(each, sympy.Eq)
        and (
            at_sizes(each, sample) == sympy.false or (resampled and leaves_out(each, wanted, dims))
        )
    ]
    beyond += [sympy.Ge(symbol(name), info.low) for name, info in dims.items() if name in later]
    counts = [each for each in conditions if is_count(each)]
    known = [each for each in conditions if each not in (*beyond, *counts)]
    return _Said(known, beyond, counts, [each for each in known if recurs(each)], later)


def _ranges(
    said: _Said, wanted: Mapping[str, Request], traced: Mapping[str, DimInfo]
) -> dict[str, DimInfo]:
    """The ranges without the ends that a relation tells.

    torch.export draws from past + seq ≤ 12 that each is at most 10; the relation says it exactly.
    """
    dims = {n: replace(i, low=2) if n in said.later else i for n, i in traced.items()}
    relations = [condition for condition in said.known if len(symbols_of(condition)) > 1]
    for name, info in list(dims.items()):
        low, high = asked(wanted.get(name))
        is_lower = info.high is not None and (high is None or high > info.high)
        if is_lower and _explained(name, (info.high or 0) + 1, relations, traced):
            dims[name] = replace(dims[name], high=high)
        if info.low > max(low, 2) and (
            _explained(name, info.low - 1, relations, traced) or tells(said.counts, name, info.low)
        ):
            dims[name] = replace(dims[name], low=max(low, 1))
    return dims


def _needed(
    said: _Said, dims: Mapping[str, DimInfo], sample: _Sample, unguarded: int
) -> tuple[dict[str, Condition], dict[str, Condition]]:
    """The conditions that don't hold for all sizes, and the suspects: those that hold from 2 on,
    or for which a trace has no guard.
    """
    from_two = {name: replace(info, low=max(info.low, 2)) for name, info in dims.items()}
    from_one = _from_one(dims)
    kept: dict[str, Condition] = {}
    suspected = {shown(condition): condition for condition in said.beyond}
    for condition in said.counts:
        if always(condition, from_one) is not True:
            suspected.setdefault(shown(condition), condition)
    steps = multiples(said.known)
    equal = equal_dims(said.known, steps)
    ties = [sympy.Eq(symbol(name), symbol(other)) for name, other in equal.items()]
    known = [*said.known, *ties]
    # What follows from the least sizes isn't needed below them, where the model is tried itself.
    ends = (*known, *said.beyond)
    starts = {each: start for each in ends if (start := start_of(each, sample)) is not None}
    for condition in known:
        begun = {} if condition in starts else starts
        beyond_one = holds(condition, _begun(from_two, begun), steps, equal, least=2)
        is_tried = condition in said.recurring or starts.get(condition, unguarded + 1) <= unguarded
        if not beyond_one and is_tried:
            suspected.setdefault(shown(condition), condition)
        elif not beyond_one:
            kept.setdefault(shown(condition), condition)
        elif not holds(condition, _begun(from_one, begun), steps, equal, least=1):
            suspected.setdefault(shown(condition), condition)
    return kept, suspected


def _from_one(dims: Mapping[str, DimInfo]) -> dict[str, DimInfo]:
    return {name: replace(i, low=1) if i.low == 2 else i for name, i in dims.items()}


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
        if info.low > max(asked(wanted.get(name))[0], 2)
        and name not in later
        and not tells(known, name, info.low)
    }


def _largest_left_out(
    dims: Mapping[str, DimInfo], wanted: Mapping[str, Request]
) -> list[tuple[str, int]]:
    """The dims whose largest size a trace leaves out, with that size.

    Of a table that is taken whole torch asks whether it is: one more trace leaves that size out
    (`excluded_largest`), and may well be right there. So it may be where the model's code asks, as
    by `if n < len(table): table = table[:n]`.
    """
    return [
        (name, info.high + 1)
        for name, info in dims.items()
        if info.high is not None and info.high + 1 == asked(wanted.get(name))[1]
    ]


def _size_refused(
    condition: Condition, wanted: Mapping[str, Request], places: Places
) -> CaptureError | None:
    """The error where a condition is required and excludes a size of a range that was asked for by
    number.
    """
    for name in symbols_of(condition) & wanted.keys():
        request = wanted[name]
        for end in (request.low, request.high):
            if end and at_sizes(condition, {symbol(name): sympy.Integer(end)}) == sympy.false:
                where = places.of_end(name, end, end - 1)
                bound = f"{name} is at most {end - 1}" if where else shown(condition)
                return narrowed(request, bound, where)
        low, high = asked(request)
        size = left_out_alone(condition)
        by_number = request.low or request.high
        if by_number and size is not None and low < size < (high or size + 1):
            return narrowed(request, shown(condition), places.of(condition))
    return None


def _suspect(
    condition: Condition,
    places: Places,
    wanted: Mapping[str, Request],
    sample: _Sample,
    said: _Said,
) -> Suspect:
    place, names = places.of(condition), symbols_of(condition)
    start = start_of(condition, sample)
    refusal = None
    if start is not None:
        (name,) = names
        if name in wanted and wanted[name].low and start > asked(wanted[name])[0]:
            where = place or ", as torch.export traces it"
            refusal = narrowed(wanted[name], f"{name} is at least {start}", where)
    return Suspect(
        condition,
        place,
        frozenset(n for n, request in wanted.items() if request.low == 1) & names,
        beyond=condition in said.beyond,
        recur=condition in said.recurring,
        start=start,
        refusal=refusal,
    )


def _begun(dims: Mapping[str, DimInfo], starts: Mapping[Condition, int]) -> dict[str, DimInfo]:
    found = dict(dims)
    for condition, start in starts.items():
        (name,) = symbols_of(condition)
        found[name] = replace(found[name], low=max(found[name].low, start))
    return found


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
