"""Which trace of a module is kept: the one that leaves most sizes open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import sympy

from attngraph.errors import CaptureError
from attngraph.frontend.interface.shapes import Request
from attngraph.frontend.rewording.contiguity import undecided_contiguity
from attngraph.frontend.rewording.numbers import Numbers, loops_of
from attngraph.frontend.rewording.resampled import (
    BY_A_FEW,
    TWICE,
    Extent,
    Inputs,
    Longer,
    amid_blocks,
    beyond,
    comes_to,
    is_amid,
    is_cut_for_memory,
    is_model,
    is_model_beyond,
    is_rounded_for_speed,
    other_samples,
    output_of,
)
from attngraph.frontend.sizes.program_dims import (
    bounded,
    demanded,
    ended,
    gives_parts,
    of_size,
    shape_env,
    turning,
)
from attngraph.frontend.tracing.exporting import OtherNumbersError, export
from attngraph.frontend.tracing.remedies import Remedies
from attngraph.frontend.tracing.trace_errors import AtMultiples, Specialised
from attngraph.frontend.tracing.traced import Subject, Traced

_AGAIN = 3
"""Traces of code that makes numbers of sizes: what is called first may hide what comes after."""


def trace(subject: Subject, *, elsewhere: bool = False) -> Traced:
    """Exports the module; narrows a dim's range where the model demands it.

    Where the code makes numbers of sizes, it is traced again with those that may stay sizes.
    Raises CaptureError with torch's reason and the user's line.
    """
    remedies = Remedies()
    loops = loops_of(partial(output_of, subject.module, subject.inputs)) if subject.steps else []
    known = Numbers(loops=loops, steps=subject.steps, rounded={} if elsewhere else None)
    numbers = known.copy()
    best, left = _most_open(subject, numbers, remedies, settled=False)
    of_blocks = () if best is None else _of_blocks(best, numbers)
    if (
        left
        and not of_blocks
        and (not isinstance(best, Traced) or best.refusal or _is_closed(best))
    ):
        numbers, hurried = known.copy(), best
        best, _ = _most_open(subject, numbers, remedies, settled=True)
        if hurried is not None:
            best = hurried if best is None else _better(best, hurried)
    if best is None:
        raise CaptureError(
            "A trace with its loops as scans computes something else than the model."
        )
    best = _whatever_the_strides(best, subject, numbers, remedies)
    if elsewhere:
        numbers = replace(numbers, rounded=None)
        best = _opened(best, subject, replace(numbers, opened=True), remedies)
        opened = isinstance(best, Traced) and best.opened
        best = _elsewhere(best, subject, replace(numbers, opened=opened), remedies)
    if isinstance(best, Traced):
        return best
    raise best


def _whatever_the_strides(
    best: Traced | CaptureError, subject: Subject, numbers: Numbers, remedies: Remedies
) -> Traced | CaptureError:
    """Of a trace that ends at the sample's size, one that asks nothing of strides, if that is why.

    torch asks how a result lies in memory, as of `x.unfold(1, 4, 1).flip(-1)`, and the order of the
    sample's strides stays as a condition on its sizes. One ends there: x has no more than 3 rows.
    """
    if not isinstance(best, Traced) or not bounded(best.program, best.asked):
        return best
    with remedies.also(undecided_contiguity) as kept, suppress(CaptureError):
        found = export(subject, numbers, (), remedies)
        if _better(best, found) is found:
            kept()
            return found
    return best


def _opened(
    best: Traced | CaptureError, subject: Subject, numbers: Numbers, remedies: Remedies
) -> Traced | CaptureError:
    """The trace with slices that may be cut short as long as they are, if it fixes no more."""
    if not numbers.short:
        return best
    with suppress(CaptureError):
        found = export(subject, numbers, (), remedies)
        # What torch refuses of it may be shown to hold later; if not, the closed one stands, or
        # what was told of it.
        if isinstance(best, CaptureError) or _fixes(found)[2:] <= _fixes(best)[2:]:
            return replace(found, closed=best)
    return best


def _is_closed(traced: Traced) -> bool:
    """Whether a dim is a constant, or no longer than the sample."""
    return bool(traced.notes or bounded(traced.program, traced.asked))


def _of_blocks(traced: Traced | CaptureError, numbers: Numbers) -> tuple[Request, ...]:
    """The dims for which torch refuses an open trace of blocks, if it is for their remainder alone.

    Where an axis is divided by a number, torch looks for the sizes that leave the sample's rest, as
    in n = 4·m + 2, whether or not anything depends on it. What the trace demands is in its
    conditions, which are compared with the model.
    """
    if not isinstance(traced, Traced) or not traced.scanned or not numbers.blocks:
        return ()
    refused = traced.refusal
    if not isinstance(refused, Specialised) or not refused.multiple or _is_closed(traced):
        return ()
    return refused.requests


def _most_open(
    subject: Subject, numbers: Numbers, remedies: Remedies, *, settled: bool
) -> tuple[Traced | CaptureError | None, bool]:
    """The trace that fixes the fewest sizes, of some with ever more places of `numbers`.

    Unless these are `settled`, a trace that fails and finds new ones is left at once for the next
    one, which knows them: then the second is true. None where no trace came to an end.
    """
    constant: tuple[Request, ...] = ()
    best: Traced | CaptureError | None = None
    left = False
    for _ in range(_AGAIN):
        known = len(numbers), constant
        try:
            found: Traced | CaptureError = export(
                subject, numbers, constant, remedies, settled=settled
            )
        except OtherNumbersError:
            left = True
            continue
        except CaptureError as error:
            found = error
        if isinstance(found, Traced) and found.unrounded:
            sized = of_size(found.program, found.asked, set().union(*found.unrounded.values()))
            if not is_rounded_for_speed(subject.module, subject.inputs, sized, numbers.functions):
                numbers.rounded = None
                continue
        is_tried = isinstance(found, Traced) and (found.scanned or found.texts)
        if isinstance(found, Traced) and is_tried and not _is_scanned(found, subject):
            break
        if isinstance(best, CaptureError) and isinstance(found, Traced) and found.refusal:
            found = replace(found, refusal=best)  # which says it of what the model's code does
        best = found if best is None or _gets_past(best, found) else _better(best, found)
        if isinstance(found, Traced):
            constant = constant or found.constant
        if (len(numbers), constant) == known:
            break
    return best, left


def _is_scanned(found: Traced, subject: Subject) -> bool:
    """Whether a trace with loops as scans is the model: steps that take parts of what a function
    cuts give the sample's own size in each.
    """
    program, module, inputs = found.program, subject.module, subject.inputs
    if is_model(program, module, inputs, ()) is not Extent.ALL:
        return False
    return not gives_parts(program) or is_model_beyond(program, module, inputs, subject.asked)


def _elsewhere(
    best: Traced | CaptureError, subject: Subject, numbers: Numbers, remedies: Remedies
) -> Traced | CaptureError:
    """The trace with axes that are cut into parts whole, or at other sizes, if it fixes less."""
    module, inputs, asked = subject.module, subject.inputs, subject.asked
    sized = [request for requests, _ in _to_open(best, asked, numbers) for request in requests]
    if sized and numbers.cuts and is_cut_for_memory(module, inputs, sized, numbers.cuts):
        numbers = replace(numbers, whole=frozenset(numbers.cuts))
        with suppress(CaptureError):
            best = _better(best, export(subject, numbers, (), remedies))
    elif numbers.cuts and (sized or isinstance(best, CaptureError)):
        parted = replace(numbers, parted=True)
        found, _ = _most_open(subject, parted, remedies, settled=True)
        if found is not None:
            best = _better(best, found)
        if best is found or numbers.blocks:  # which a sample of one block shows beyond it
            numbers = parted

    tried: set[tuple[int, ...]] = set()
    for _ in range(_AGAIN):
        ways = [
            (constant, longer)
            for constant, longer in _to_open(best, asked, numbers)
            if _sizes(constant, longer) not in tried
        ]
        if not ways:
            break
        constant, longer = ways[0]
        tried.add(_sizes(constant, longer))
        samples = other_samples(module, inputs, asked, constant, longer)
        loop = best.loop if isinstance(best, Specialised) else None
        if loop is not None and not numbers.blocks:  # it has a turn for each step at any size
            samples = (each for each in samples if not comes_to(module, each, loop))
        best = _resampled(best, subject, constant, samples, numbers, remedies)
    return best


def _sizes(constant: Sequence[Request], longer: Longer) -> tuple[int, ...]:
    return tuple(to(request.size) for request in constant for to in longer)


def _resampled(
    best: Traced | CaptureError,
    subject: Subject,
    constant: tuple[Request, ...],
    samples: Iterable[Inputs],
    numbers: Numbers,
    remedies: Remedies,
) -> Traced | CaptureError:
    """The trace at one of these samples that is the model and fixes the least, or the `best`."""
    asked = subject.asked
    fewer: Traced | None = None
    for args, kwargs in samples:
        elsewhere = replace(subject, args=args, kwargs=kwargs)
        known = -1
        for deferred in (True, True, False):
            if len(numbers) == known and deferred:
                continue
            known = len(numbers)
            with suppress(CaptureError):
                found = export(elsewhere, numbers, (), remedies, deferred=deferred)
                if _better(best, found) is not found:
                    continue
                extent = is_model(found.program, subject.module, subject.inputs, constant)
                sizes = tuple(request.size for request in found.requests)
                found = replace(found, requests=asked, asked=asked, resampled=sizes)
                if extent is Extent.ALL:
                    best, fewer = found, None
                    break
                if extent is Extent.SAMPLE:
                    fewer = fewer or found
                if (
                    numbers.most and numbers.short and not numbers.opened
                ):  # it may choose more than there are
                    numbers, known = replace(numbers, opened=True), -1
        if not _to_open(best, asked, numbers):
            return best
    # One that is wrong for small sizes may have a least size, which the check finds.
    return best if fewer is None else _better(best, fewer)


def _to_open(
    traced: Traced | CaptureError, asked: tuple[Request, ...], numbers: Numbers
) -> list[tuple[tuple[Request, ...], Longer]]:
    """The dims that a trace doesn't keep open, and the sizes at which it may, likelier ones first.

    Where it leaves a dim at no size but the sample's, its conditions are of that size.
    """
    amid = amid_blocks(numbers.blocks)
    if of_blocks := _of_blocks(traced, numbers):
        is_typical = all(is_amid(request.size, numbers.blocks) for request in of_blocks)
        return [] if is_typical else [(of_blocks, amid)]
    ways = _closed(traced, asked, in_blocks=bool(numbers.blocks))
    return [(requests, (*amid, *longer)) for requests, longer in ways]


def _closed(
    traced: Traced | CaptureError, asked: tuple[Request, ...], *, in_blocks: bool
) -> list[tuple[tuple[Request, ...], Longer]]:
    """`in_blocks`: a trace demands of the last one that it has some rows, and what else it demands
    of a remainder is tried by the check.
    """
    refused = traced if isinstance(traced, CaptureError) else traced.refusal
    is_resampled = isinstance(traced, Traced) and bool(traced.resampled)
    if isinstance(refused, Specialised) and not is_resampled:
        return [(refused.requests, BY_A_FEW if refused.multiple else TWICE)]
    if isinstance(traced, AtMultiples):
        return [(traced.requests, BY_A_FEW)]
    if isinstance(traced, CaptureError):
        return []
    if constant := traced.constant or bounded(traced.program, traced.asked):
        return [(constant, TWICE)]
    ends = ended(traced.program, asked)
    in_blocks = in_blocks and traced.scanned
    multiples = () if in_blocks else demanded(traced.program, asked)
    is_limited = (refused is not None or is_resampled) and not in_blocks
    turns = turning(traced.program, asked) if is_limited else {}
    ways = [
        (multiples, BY_A_FEW),
        (tuple(ends), beyond(max(ends.values(), default=0))),
        (tuple(turns), beyond(max(turns.values(), default=1) - 1)),
    ]
    return [(requests, longer) for requests, longer in ways if requests]


def _gets_past(before: Traced | CaptureError, after: Traced | CaptureError) -> bool:
    """Whether a trace that knows more numbers than the one before it is refused for other dims: a
    user's change to what the first was refused for would end there.
    """
    if not isinstance(before, Specialised) or not isinstance(after, Specialised):
        return False
    first, then = (
        {each.name or (each.leaf, each.axis) for each in error.requests}
        for error in (before, after)
    )
    return not first & then


def _better(before: Traced | CaptureError, after: Traced | CaptureError) -> Traced | CaptureError:
    """The trace that fixes fewer sizes; the first where neither does."""
    if isinstance(after, CaptureError):
        return before
    if isinstance(before, CaptureError) or _fixes(after) < _fixes(before):
        return after
    return before


def _fixes(traced: Traced) -> tuple[bool, bool, int, bool, int, int, int, int]:
    """How many dims a trace has made constants of, bounded, ended early, and how many expressions
    of them, and is of multiples only; whether it ends before an end that was asked for, torch
    refused it, and it took functions that round for what they make of the sample."""
    env = shape_env(traced.program)
    guards = [guard.expr for guard in env.guards] if env is not None else []
    equations = sum(isinstance(guard, sympy.Eq) for guard in guards)
    ends = [*bounded(traced.program, traced.asked), *ended(traced.program, traced.asked)]
    return (
        any(request.high is not None for request in ends),
        traced.refusal is not None,
        len(traced.notes),
        not traced.written,
        len(bounded(traced.program, traced.asked)),
        len(ended(traced.program, traced.asked)),
        equations,
        len(demanded(traced.program, traced.asked)),
    )
