"""One trace by torch.export of a module in inference, tried again with what helps if it fails."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

import sympy
import torch
from torch._dynamo import config as dynamo_config
from torch.export import ExportedProgram
from torch.fx.experimental import _config as symbolic_config
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv, IntTrueDiv, Mod

from attngraph.errors import CaptureError
from attngraph.frontend.interface.own_classes import make_known
from attngraph.frontend.interface.shapes import Request, without_names
from attngraph.frontend.rewording.branches import followed_branches
from attngraph.frontend.rewording.checked_types import unchecked_types
from attngraph.frontend.rewording.comparisons import open_extremes
from attngraph.frontend.rewording.constants import depends_on_data, known_in_text
from attngraph.frontend.rewording.contiguity import Copies, unasked_formats
from attngraph.frontend.rewording.distributions import unvalidated
from attngraph.frontend.rewording.hit_loops import Hits, does_nothing_else
from attngraph.frontend.rewording.memoised import forgetting, looks_up_a_size
from attngraph.frontend.rewording.module_casts import casts_to_own_dtype
from attngraph.frontend.rewording.numbers import (
    Numbers,
    add_raising,
    recorded_numbers,
    sizes_as_numbers,
)
from attngraph.frontend.rewording.recurrent import recurrent_layers
from attngraph.frontend.rewording.rewordings import Rewordings
from attngraph.frontend.rewording.rounded_sizes import rounded_up
from attngraph.frontend.rewording.short_slices import short_slices
from attngraph.frontend.rewording.tied_sizes import Ties, seen_ties
from attngraph.frontend.sizes.identities import known_identities
from attngraph.frontend.sizes.program_dims import leaves
from attngraph.frontend.sizes.whole import whole_quotients, whole_roots
from attngraph.frontend.tracing.guards import always_hold
from attngraph.frontend.tracing.remaining_dims import (
    fixed_note,
    made_constant,
    narrowed,
    ranges_of,
    taken_for_constants,
)
from attngraph.frontend.tracing.remedies import Remedies
from attngraph.frontend.tracing.trace_errors import (
    CUT,
    LOOKED_UP,
    AtMultiples,
    chooses,
    deepest,
    explained,
    loop_over,
    raises_itself,
    relates_sizes,
    returns_unknown,
)
from attngraph.frontend.tracing.traced import Subject, Traced
from attngraph.frontend.watching.asked import Place
from attngraph.frontend.watching.locations import user_frame
from attngraph.frontend.watching.questions import Question, is_start, recorded_questions
from attngraph.frontend.watching.quiet import quiet, watched_specialisations
from attngraph.inference import inference

_ALWAYS = (
    casts_to_own_dtype,
    known_identities,
    known_in_text,
    open_extremes,
    recurrent_layers,
    rounded_up,
    unasked_formats,
    unchecked_types,
    unvalidated,
    whole_quotients,
)
_ATTEMPTS = 7
_PARTS = (FloorDiv, Mod, IntTrueDiv)  # n / 4 in `(n / 4).is_integer()`
_LENIENT = "soft_pending_unbacked_not_found_error"


class OtherNumbersError(CaptureError):
    """A trace failed in which sizes became numbers at places that weren't known."""


def export(
    subject: Subject,
    numbers: Numbers,
    constant: Sequence[Request],
    remedies: Remedies,
    *,
    deferred: bool = False,
    settled: bool = True,
) -> Traced:
    """One trace, in which sizes stay sizes at the places of `numbers`.

    Adds other places that made numbers of them. `constant` are dims of an earlier trace that fixed
    them, for which tables of earlier calls may be to blame. With `deferred` a condition on a dim is
    an assertion in the graph, also where it excludes sizes that were asked for. Raises
    OtherNumbersError where the first attempt fails and `numbers` grew, unless they are `settled`.
    """
    attempts = _Attempts(subject, numbers, constant, remedies, deferred, settled)
    for _ in range(_ATTEMPTS):
        traced = attempts.next()
        if traced is not None:
            return traced
    raise attempts.refusal or CaptureError(
        "torch.export keeps asking for other dim ranges; give them with Dim(name, min=…, max=…)."
    )


@dataclass
class _Attempt:
    """One run of torch.export, and what it says of the model beside its program."""

    requests: tuple[Request, ...]
    fixed: dict[str, tuple[str, int] | None] = field(default_factory=dict)
    questions: list[Question] = field(default_factory=list)
    branches: dict[Place, bool] = field(default_factory=dict)
    jumps: dict[Place, bool] = field(default_factory=dict)
    copies: Copies | None = None
    ties: Ties = field(default_factory=Ties)

    @property
    def multiples(self) -> tuple[Request, ...]:
        """The dims of which the code asked whether they are multiples of a number, as they are."""
        asked = [each.condition for each in self.questions if each.condition.has(*_PARTS)]
        sizes = {request: size.node.expr for request, size in self.ties.sizes.items()}
        return tuple(
            request
            for request, size in sizes.items()
            if any(
                each.free_symbols == {size} and leaves(each, size, request.size) for each in asked
            )
        )


@dataclass(frozen=True)
class _Run:
    """A run of the model's code after which that is read instead: its error, which names a line
    that reading doesn't; where sizes were `fixed`; what it gave, which stands if reading fails.
    """

    error: Exception
    fixed: dict[str, tuple[str, int] | None]
    traced: Traced | None = None


@dataclass
class _Attempts:
    """Runs of torch.export on one subject, each with what the error of the one before asks for.

    With `before`, the next one is read from the code's bytecode instead of being run. A `refusal`
    is what stands if nothing helps.
    """

    subject: Subject
    numbers: Numbers
    constant: Sequence[Request]
    remedies: Remedies
    deferred: bool
    settled: bool
    before: _Run | None = None
    refusal: CaptureError | None = None

    def __post_init__(self) -> None:
        self._known = self.numbers.copy()
        self._shapes = self.subject.dynamic_shapes
        self._follows = bool(self.subject.sides) or self.subject.way is not None
        self._hits = None if self.subject.sides is None else Hits()
        self._parts: dict[tuple[sympy.Expr, int], None] = {}
        self._copies = True

    def next(self) -> Traced | None:
        """A trace, or None where another attempt may give one. Raises what the last error says."""
        attempt = _Attempt(self.subject.requests(self._shapes))
        before = self.before
        if before is not None and looks_up_a_size(str(before.error)):
            attempt.fixed[LOOKED_UP] = user_frame(traceback.walk_tb(before.error.__traceback__))
        try:
            program = self._run(attempt)
        except Exception as error:
            if before is not None and before.traced is not None:
                return before.traced
            self._look(attempt)
            self._answer(error, attempt)
            return None
        self._look(attempt)
        if attempt.copies is not None and attempt.copies.are_written:
            self._copies = False
            return None
        hits = self._hits
        if hits is not None and hits.places:
            subject = self.subject
            if not does_nothing_else(subject.module, subject.inputs, attempt.requests, hits):
                self._hits = None
                return None
        known = self._known
        made = made_constant(program, attempt.requests, attempt.fixed)
        traced = Traced(
            program,
            attempt.requests,
            self.subject.asked,
            tuple(attempt.questions),
            tuple(fixed_note(request, attempt.fixed) for request in made),
            attempt.branches,
            made,
            tuple(known.replayed),
            unrounded=known.rounded or {},
            written=bool(known.rounded or known.exact),
            scanned=bool(known.loops),
            texts=known.texts,
            refusal=self.refusal,
            whole=tuple(sorted(known.whole)),
            hits=hits if hits is not None and hits.places else None,
            parts=tuple(self._parts),
            opened=known.opened,
            most=known.most if known.opened else 0,
            jumps=frozenset(place for place, jumps in attempt.jumps.items() if jumps),
        )
        if made and self.numbers.by_numpy and before is None:
            self.before = _Run(CaptureError(traced.notes[0]), attempt.fixed, traced)
            return None
        return traced

    def _run(self, attempt: _Attempt) -> ExportedProgram:
        subject, sides = self.subject, self.subject.sides
        shapes = self._shapes if self.refusal is None else without_names(self._shapes)
        with ExitStack() as stack:
            for context in (*self.remedies.taken, *_ALWAYS):
                stack.enter_context(context())
            ties = attempt.ties
            opens, most = self._known.opened, self._known.most
            stack.enter_context(short_slices(self._met, self._chosen, ties, opens=opens, most=most))
            if self.before is None:
                stack.enter_context(seen_ties(subject.module, attempt.requests, ties))
            stack.enter_context(whole_roots(ties.settle))
            cuts, whole = self.numbers.cuts, self._known.whole
            attempt.copies = Copies() if self._copies else None
            stack.enter_context(Rewordings(cuts, whole, self._hits, ties, attempt.copies))
            for context in (forgetting, quiet):
                stack.enter_context(context())
            # torch would keep each result under its symbolic sizes, for good, and read none
            stack.enter_context(dynamo_config.patch(fake_tensor_cache_enabled=False))
            # torch 2.15 asks of a loop's body that it returns each number that a step reads
            stack.enter_context(symbolic_config.patch(_LENIENT, True))  # type: ignore[attr-defined]
            stack.enter_context(inference(subject.module))
            _forget(subject, self.constant)
            stack.enter_context(watched_specialisations(attempt.fixed, sys._getframe()))
            stack.enter_context(recorded_questions(attempt.questions))
            stack.enter_context(recorded_numbers(self.numbers))
            stack.enter_context(sizes_as_numbers(self._known))
            if self._follows:
                stack.enter_context(
                    followed_branches(sides or {}, attempt.branches, attempt.jumps, subject.way)
                )
            return torch.export.export(
                subject.module,
                *subject.inputs,
                dynamic_shapes=shapes,
                strict=self.before is not None,
                prefer_deferred_runtime_asserts_over_guards=self.deferred,
            )

    def _met(self, size: torch.SymInt, least: int) -> None:
        self._parts.setdefault((size.node.expr, least))
        self.numbers.short = True

    def _chosen(self, size: torch.SymInt, least: int) -> None:
        self._parts.setdefault((size.node.expr, least))
        self.numbers.most = max(self.numbers.most, least)

    def _look(self, attempt: _Attempt) -> None:
        """Finds out whether the code looks how many there are, of which it chooses some."""
        most = self.numbers.most
        if most and any(is_start(each.condition, most + 1) for each in attempt.questions):
            self.numbers.short = True

    def _answer(self, error: Exception, attempt: _Attempt) -> None:
        """Settles what the next attempt does otherwise; raises where nothing is left to try."""
        message, numbers = str(error), self.numbers
        if returns_unknown(message) and (
            _known_output(self.subject) or self.remedies.box_outputs(self.subject.module)
        ):
            return
        if self._hits is not None and self._hits.shorten(message):
            return
        helped = self.remedies.take(error)
        if not self.settled and len(numbers) > len(self._known):
            raise OtherNumbersError(message) from error
        if helped:
            return
        # After the remedies, with which a trace asks less: torch leaves out of its message what
        # follows from the sample's own remainder, and a deferred trace demands that as well.
        if not self.deferred and always_hold(message):
            self.deferred = True
            return
        in_numpy = numbers.by_numpy and _of_numpy(error, attempt.requests)
        is_better_read = _reads_better(message) or raises_itself(error) or in_numpy
        if self.before is None and (is_better_read or looks_up_a_size(message)):
            self.before = _Run(error, attempt.fixed)
            if looks_up_a_size(message):
                add_raising(numbers, deepest(error).__traceback__)
            return
        constant = taken_for_constants(error, attempt.requests)
        unrolled = [loop_over(request, attempt.fixed) for request in constant]
        if constant and not self.constant and not all(unrolled):  # no table has a loop's turns
            self.constant = constant
            return
        shapes = narrowed(message, attempt.requests, self._shapes, starts=not numbers.opened)
        if shapes is not None:
            # What else it demands may hold in the narrower range: the next trace needn't find that.
            self.deferred = self.deferred or always_hold(message, ranges_of(shapes))
            self._shapes = shapes
        elif self.subject.sides is not None and not self._follows and chooses(error):
            self._follows, self.before = True, None
        else:
            self._refuse(error, attempt)

    def _refuse(self, error: Exception, attempt: _Attempt) -> None:
        """Raises what explains an error of torch, unless an attempt without dim names may help.

        torch refuses a named dim of which the code demands anything, and narrows one of Dim.AUTO.
        """
        add_raising(self.numbers, deepest(error).__traceback__)
        if self.refusal is not None:
            raise self.refusal from error
        told, before, fixed = error, self.before, attempt.fixed
        if before is not None and (
            depends_on_data(str(error)) or raises_itself(before.error) or self.numbers.by_numpy
        ):
            told, fixed = before.error, before.fixed
        own = partial(_own, self.subject)
        if not fixed and self.numbers.cuts:  # of which a trace has as many parts as the sample
            fixed = {CUT: min(self.numbers.cuts)}
        self.refusal = explained(told, self.subject.module, attempt.requests, fixed, own)
        if type(self.refusal) is CaptureError and attempt.multiples:
            self.refusal = AtMultiples(str(self.refusal), attempt.multiples)
        if not relates_sizes(error) or without_names(self._shapes) is None:
            raise self.refusal from told


def _reads_better(message: str) -> bool:
    """Whether Dynamo, which reads the code instead of running it, may take what a run doesn't.

    It leaves out a move of a module to the device where it is, `int(tensor)` is `tensor.item()` to
    it, and `type(x)` what it is in a run.
    """
    return (
        "_apply(): Couldn't swap" in message
        or "Could not extract specialized integer from data-dependent expression" in message
    )


def untranslated(error: Exception, subject: Subject) -> CaptureError:
    """The error where torch refuses a program that its own trace has made."""
    return explained(error, subject.module, (), {}, partial(_own, subject))


def _of_numpy(error: Exception, requests: tuple[Request, ...]) -> bool:
    """Whether numpy may have failed over a size, or made a number of it.

    Dynamo reads its calls as those of torch that do the same.
    """
    said = str(error)
    in_arrays = "ufunc" in said or "numpy.object_" in said
    return in_arrays or bool(taken_for_constants(error, requests))


def _own(subject: Subject) -> Exception | None:
    """What the model itself raises on the inputs that it is traced with; warnings are no failure,
    even where they are set to be errors."""
    try:
        with inference(subject.module), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            subject.module(*subject.args, **subject.kwargs)
    except Exception as error:
        return error
    return None


def _known_output(subject: Subject) -> bool:
    """Whether the classes that the model returns could be made known to torch's pytree."""
    try:
        with inference(subject.module):
            output = subject.module(*subject.args, **subject.kwargs)
    except Exception:
        return False
    return make_known(output)


def _forget(subject: Subject, constant: Sequence[Request]) -> None:
    """Runs the model with sizes below the dims' ranges.

    A table that an earlier call left for the sample's size is then one of a size that no dim has,
    and to ask whether it still fits is no condition.
    """
    if not constant:
        return
    leaves, structure = pytree.tree_flatten(subject.inputs)
    for request in constant:
        below = max(request.low or 2, 2) - 1
        leaves[request.leaf] = leaves[request.leaf].narrow(request.axis, 0, below)
    small, named = pytree.tree_unflatten(leaves, structure)
    with suppress(Exception):
        subject.module(*small, **named)
