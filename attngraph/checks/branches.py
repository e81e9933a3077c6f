"""Whether the side of a branch that a trace followed is right where the model takes the other.

`if not mask.any(): mask = None` has a shortcut and a general side, and which is which only shows
when both are taken. A side is right if the model, on inputs on which it takes the other one,
computes what the trace does: for inputs on which it takes the same, the trace is its own code.
Where none is, the graph has both (both_sides.py).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from attngraph.analysis.walks import made_of
from attngraph.checks.bisect import difference
from attngraph.checks.both_sides import both_sides, refused
from attngraph.checks.check import Check
from attngraph.checks.probing import opened, singled_out, spoilt
from attngraph.checks.roles import Role, roles_of
from attngraph.checks.traced import agrees, is_told_apart, is_traced
from attngraph.errors import AttngraphError, CaptureError, IRError, UsageError
from attngraph.frontend.capture import Captured
from attngraph.frontend.model import Model, trace
from attngraph.frontend.rewording.branches import is_assertion, recorded_sides
from attngraph.frontend.rewording.hit_loops import AllTurns, Hits, all_turns, are_same
from attngraph.frontend.tracing.trace_errors import chooses
from attngraph.frontend.watching.asked import Place
from attngraph.frontend.watching.locations import quote
from attngraph.frontend.watching.statements import only_tells
from attngraph.ir import Graph, interpret

_MOST = 3
"""Branches of a model whose sides are tried in every combination."""
_HELD = (
    "no input that was tried leads elsewhere, and where it is forced past what it asks before, the "
    "code does nothing there."
)
_FORCED = " No input that was tried leads to one of them; forced onto it, both agree."
_NOT_COMPARED = " No input that was tried leads to one of them, which wasn't compared."
_ROUNDING = 2.0**-8
"""The difference, of the outputs' scale, from which on two sides are told apart."""


def settled(
    model: Model, check: Check, checked: Callable[[Captured], Check], *, elsewhere: bool
) -> tuple[Captured, Check]:
    """The model traced on sides that are right on both, or on both of them, and its check; `check`
    is of the first trace. `elsewhere` is as in `trace`.

    Raises CaptureError where neither can be had, naming the line.
    """
    captured = check.captured
    if captured.asked:
        return _of_both_sides(check), check
    places = [place for place in captured.branches if not is_assertion(place)]
    if not places:
        return replace(captured, notes=(*captured.notes, *_assertions(captured))), check
    first = tuple(captured.branches[place] for place in places)
    few = len(places) if len(places) <= _MOST else 0
    ways = sorted(itertools.product((True, False), repeat=few), key=lambda way: way != first)
    for way in ways if few else ():
        with contextlib.suppress(UsageError, CaptureError):  # a side that can't be had
            if way != first:
                captured = trace(model, dict(zip(places, way, strict=True)), elsewhere=elsewhere)
                check = checked(captured)
            held = _settled(captured, check)
            if held is not None and not _is_mistaken(model, captured, check, elsewhere):
                notes = [_note(place, captured.branches[place], place in held) for place in places]
                notes += _assertions(captured)
                return replace(captured, notes=(*captured.notes, *notes)), check
    check = checked(both_sides(model, elsewhere=elsewhere))
    return _of_both_sides(check), check


def followed(model: Model, *, verifies: bool = True, elsewhere: bool = False) -> Captured:
    """The first trace of a model, on whichever side of its branches; on all of them where torch
    can't say which one a run takes, and where the sides aren't compared afterwards.
    """
    try:
        return trace(model, {} if verifies else None, elsewhere=elsewhere)
    except CaptureError as error:
        told = error.__cause__
        if not isinstance(told, Exception) or not chooses(told):
            raise
        try:
            return both_sides(model, elsewhere=elsewhere, forces=verifies)
        except CaptureError:
            raise error from told


def _is_mistaken(model: Model, captured: Captured, check: Check, elsewhere: bool) -> bool:
    """Whether the other side of a branch is the right one, where no case tells the two apart.

    Of `if keep.all(): keep = ones`, both are equal while nothing that counts is hidden: then masks
    are looked through until the two differ, and the model says which of them is right. Where they
    never do, the side that reads more of the inputs is.
    """
    for place in captured.branches:
        if is_assertion(place):
            continue
        sides = {**captured.branches, place: not captured.branches[place]}
        try:
            other = trace(model, sides, elsewhere=elsewhere)
        except AttngraphError:
            continue
        if other.input_names != captured.input_names or not agrees(check, other.graph):
            continue
        # What a side leaves out, such as the comparison that makes a mask, shows in the other's
        # graph alone.
        roles = (roles_of(graph, captured.args) for graph in (check.pristine, other.graph))
        for tensors in chain.from_iterable(singled_out(each, captured.args) for each in roles):
            if _is_equal(captured.graph, other.graph, tensors):
                continue
            with contextlib.suppress(UsageError):  # the model takes no such mask
                check.references(tensors)
                if not is_traced(check, captured.graph, tensors):
                    return True
                break
        else:
            if _read(captured.graph) < _read(other.graph):
                return True
    return False


def _is_equal(graph: Graph, other: Graph, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether two graphs compute the same, but for rounding, where both compute anything."""
    try:
        pairs = zip(interpret(graph, tensors), interpret(other, tensors), strict=True)
        return all(difference(a, b) <= _ROUNDING for a, b in pairs)
    except (IRError, RuntimeError, IndexError):
        return True


def _read(graph: Graph) -> set[str]:
    """The inputs on which outputs depend."""
    made = {value for output in graph.outputs for value in made_of(output)}
    return {value.name for value in graph.inputs if value in made}


def _taken(captured: Captured, check: Check) -> dict[Place, set[bool]] | None:
    """The sides that the model takes at each place, on inputs on which two sides can be told apart.

    Of zeros x · 2 and −x are the same: inputs of one number say nothing, and outputs of one only if
    other inputs give it as well. A place that asks several times in a run, as in each layer, has
    the other side only if it was seen each time: to leave after the last layer is to go on after
    it. Turns of experts without rows are alike. None where the trace is seen to be wrong.
    """
    check.all_references()
    roles, turns = roles_of(check.pristine, captured.args), _Turns()
    found: dict[Place, set[bool]] = {place: set() for place in captured.branches}
    constant: Counter[tuple[Place, bool]] = Counter()
    further = _further(roles, captured, check)
    if further is None:
        return None
    for tensors in (*check.all_cases().values(), *further):
        seen: dict[Place, set[bool]] = {place: set() for place in captured.branches}
        known = len(turns.runs)
        eager = _watched(seen, captured, check, tensors, turns)
        if eager is None:
            return None
        if not all(role.masks or _varies(each) for role, each in zip(roles, tensors, strict=True)):
            del turns.runs[known:]
            continue
        for place, sides in seen.items():
            if any(map(_varies, eager)):
                found[place] |= sides
            elif all(map(_varies, tensors)):
                constant.update((place, side) for side in sides)
    if not captured.asked and _shows_where_spoilt(roles, captured, check):
        return None
    for (place, side), times in constant.items():
        if times > 1:
            found[place].add(side)
    for place in found.keys() - captured.jumps:
        if not turns.show(place, followed := captured.branches[place]):
            found[place].discard(not followed)
    return found


class _Turns:
    """What each run of a model answers at its places, in the order in which they ask."""

    def __init__(self) -> None:
        self.runs: list[dict[Place, list[bool]]] = []

    def forget(self) -> None:
        """The last run failed."""
        del self.runs[-1:]

    def begin(self, *_: object) -> None:
        """A run begins: a hook before the forward of a module."""
        self.runs.append({})

    def add(self, place: Place, said: bool) -> None:
        if self.runs:
            self.runs[-1].setdefault(place, []).append(said)

    def show(self, place: Place, followed: bool) -> bool:
        """Whether a run answers otherwise each time that all runs on the followed side ask, or
        none that was added does.
        """
        answers = [run[place] for run in self.runs if place in run]
        asked = (len(each) for each in answers if (not followed) not in each)
        others = {at for each in answers for at, said in enumerate(each) if said != followed}
        return not others or others.issuperset(range(min(asked, default=0)))


def _shows_where_spoilt(roles: Sequence[Role], captured: Captured, check: Check) -> bool:
    """Whether the model, where its inputs aren't finite, takes another side that computes something
    else: of `if x.isnan().any(): x = nan_to_num(x)` both sides are equal but for infinities.
    """
    for tensors in spoilt(roles, captured.args):
        seen: dict[Place, set[bool]] = {place: set() for place in captured.branches}
        try:
            eager = _watched(seen, captured, check, tensors)
        except UsageError:  # the model takes no such numbers
            continue
        others = (side != captured.branches[at] for at, sides in seen.items() for side in sides)
        if eager is None or not any(others):
            continue
        try:
            traced = interpret(captured.graph, tensors)
        except (IRError, RuntimeError, IndexError):  # as of a NaN that is made an index
            return True
        if not all(map(_is_alike, eager, traced)):
            return True
    return False


def _is_alike(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether two outputs have the same numbers, but for rounding, where both may be infinite."""
    rtol = _ROUNDING if expected.is_floating_point() else 0.0
    return expected.shape == found.shape and torch.allclose(
        expected, found.to(expected), rtol=rtol, atol=_scale(expected) * rtol, equal_nan=True
    )


def _scale(tensor: torch.Tensor) -> float:
    """The largest of its finite numbers."""
    sizes = tensor.abs().nan_to_num(0.0, 0.0, 0.0)
    return float(sizes.max()) if sizes.numel() else 0.0


def _watched(
    seen: dict[Place, set[bool]],
    captured: Captured,
    check: Check,
    tensors: tuple[torch.Tensor, ...],
    turns: _Turns | None = None,
) -> Sequence[torch.Tensor] | None:
    """Eager's outputs; the sides that it takes are added to `seen`, and its answers to `turns`.
    None where the trace is wrong.

    Of a loop over the experts that were hit, the trace has a turn for the others too, and it is in
    these that the model takes sides as of an expert without rows.
    """
    own = check.references(tensors).eager if captured.hits else None
    turns = turns or _Turns()

    def eager(*, numbers: bool) -> Sequence[torch.Tensor]:
        loops = None if captured.hits is None else AllTurns(Hits(captured.hits.ends))

        def told(place: Place, said: bool) -> None:
            if loops is None or not loops.is_spare:
                turns.add(place, said)

        sides = recorded_sides(seen, captured.jumps, numbers=numbers, told=told)
        hook = check.module.register_forward_pre_hook(turns.begin)
        with sides, loops or contextlib.nullcontext(), hook:
            return check.references(tensors).eager

    try:
        found = eager(numbers=True)
    except UsageError:  # a model that needs its numbers as Python's
        turns.forget()
        found = eager(numbers=False)
    return found if own is None or are_same(found, own) else None


def _further(
    roles: Sequence[Role], captured: Captured, check: Check
) -> list[tuple[torch.Tensor, ...]] | None:
    """Inputs beside those of the check; None where the trace is wrong on one.

    Where the rows of floats are told by what they hold, every case of it may hide some; of floats
    that are compared with a number, each may hold some that are larger, and some that aren't. Equal
    rows go the same way, and leave others without any: a mixture's experts.
    """
    bare = opened(roles, captured.args)
    found = [bare] if is_traced(check, captured.graph, bare) else []
    ways = [partial(_signed, by=sign * times) for sign in (1.0, -1.0) for times in (1.0, 3.0)]
    for way in (*ways, *(partial(_alike, at=at) for at in (0, -1))):
        pairs = zip(roles, captured.args, strict=True)
        made = tuple(each if role.masks or not each.dim() else way(each) for role, each in pairs)
        with contextlib.suppress(UsageError):  # the model takes no such numbers
            check.references(made)
            if not is_traced(check, captured.graph, made):
                return None
            found.append(made)
    # Where one side fails, the other may not; a graph of both that fails is no wrong result.
    failing = not captured.asked
    for made in check.samples.contrasts(captured.args):
        if is_told_apart(check, captured.graph, made, failing=failing):
            return None
        with contextlib.suppress(UsageError):
            if not _is_finite(check.references(made).eager):
                continue
            traced = _traced(captured.graph, made)
            if traced is None:
                continue
            if _is_finite(traced):
                found.append(made)  # of what overflows no side is seen to be right
            elif _scale_of(made) <= _scale_of(captured.args):
                return None  # where nothing overflows, what isn't a number is an error
    return found


def _traced(graph: Graph, tensors: tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor] | None:
    """What a graph computes; None where it fails."""
    try:
        return interpret(graph, tensors)
    except (IRError, RuntimeError, IndexError):
        return None


def _is_finite(tensors: Sequence[torch.Tensor]) -> bool:
    return all(bool(each.isfinite().all()) for each in tensors)


def _scale_of(tensors: Sequence[torch.Tensor]) -> float:
    return max((_scale(each) for each in tensors if each.is_floating_point()), default=0.0)


def _signed(tensor: torch.Tensor, by: float) -> torch.Tensor:
    """Floats of one sign, in another order than the sample's."""
    return (tensor.abs() * by).roll(int(by), -1) if tensor.is_floating_point() else tensor


def _alike(tensor: torch.Tensor, at: int) -> torch.Tensor:
    """Rows that are all the sample's first or last; of integers, one number everywhere."""
    rows = tensor.flatten(0, -2) if tensor.is_floating_point() and tensor.dim() > 1 else tensor
    row = rows.flatten()[at] if rows is tensor else rows[at]
    return row.expand(tensor.shape).clone()


def _varies(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return True
    flat = tensor.detach().nan_to_num().flatten()
    return bool((flat != flat[0]).any())


def _settled(captured: Captured, check: Check) -> set[Place] | None:
    """The places at which the model takes the other side in a run that is held to the followed side
    at others; None where the followed sides can't be relied on: they have to be right where the
    model takes others.
    """
    taken = _taken(captured, check)
    if taken is None or not agrees(check, captured.graph):
        return None
    places = [place for place in captured.branches if not is_assertion(place)]
    left = {place for place in places if (not captured.branches[place]) not in taken[place]}
    return left if not left or _is_taken_where_held(left, captured, check) else None


def _is_taken_where_held(left: set[Place], captured: Captured, check: Check) -> bool:
    """Whether the model takes the other side at these places, and does the same, where it goes on
    past all others: of `if not mask.any(): continue` and `if rows.numel() == 0: continue`, the
    first leaves the second nothing.
    """
    held = {at: side for at, side in captured.branches.items() if at not in captured.jumps}
    if not held or not left <= captured.jumps:  # a number of rows is 0, or isn't
        return False
    roles = roles_of(check.pristine, captured.args)
    found: set[tuple[Place, bool]] = set()
    for tensors in (*check.all_cases().values(), *(_further(roles, captured, check) or ())):
        own, seen = check.references(tensors).eager, {place: set[bool]() for place in left}
        with recorded_sides(seen, left, numbers=False, held=held), all_turns(captured.hits):
            try:
                made = check.references(tensors).eager
            except UsageError:  # on the side that it is held to it fails
                return False
        if not are_same(made, own):
            return False
        found |= {(place, side) for place, sides in seen.items() for side in sides}
    return all((place, not captured.branches[place]) in found for place in left)


def _of_both_sides(check: Check) -> Captured:
    """A graph that has both sides, as it is compiled: with what is told of it.

    Raises CaptureError where it is not the model.
    """
    captured = check.captured
    places = tuple(dict.fromkeys(each.place for each in captured.asked))
    taken = _taken(captured, check)
    if taken is None or not agrees(check, captured.graph):
        raise refused(places[0], "what torch.export traces of its sides is not what the model does")
    compared = all(each.compared for each in captured.asked)
    notes = []
    for place in places:
        unseen = "" if taken[place] == {True, False} else _FORCED if compared else _NOT_COMPARED
        notes.append(f"{_chosen(place)}{unseen}")
    return replace(captured, notes=(*captured.notes, *notes, *_assertions(captured)))


def uncompared(captured: Captured) -> Captured:
    """A graph that has both sides of its branches, with what is told without verification."""
    notes = [_chosen(place) for place in dict.fromkeys(each.place for each in captured.asked)]
    return replace(captured, notes=(*captured.notes, *notes, *_assertions(captured)))


def _chosen(place: Place) -> str:
    return (
        f"The model chooses by a tensor's values at {quote(*place)}. The file computes both sides "
        "and takes one, as torch.where does."
    )


def _note(place: Place, side: bool, is_held: bool) -> str:
    known = "on inputs where it isn't, the two were compared and are equal."
    return (
        f"The model chooses by a tensor's values at {quote(*place)}. The file always does what the "
        f"code does where that is {side}; {_HELD if is_held else known}"
    )


def _assertions(captured: Captured) -> list[str]:
    return [
        f"The model raises an error for some values of a tensor at {quote(*place)}: the file "
        "doesn't check them."
        for place in captured.branches
        if is_assertion(place) and not only_tells(*place)
    ]
