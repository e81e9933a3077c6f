"""Whether the side of a branch that a trace followed is right where the model takes the other.

`if not mask.any(): mask = None` has a shortcut and a general side, and which is which only shows
when both are taken. A side is right if the model, on inputs on which it takes the other one,
computes what the trace does: for inputs on which it takes the same, the trace is its own code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from attngraph.checks.check import Check
from attngraph.checks.probing import roles_of
from attngraph.checks.traced import agrees
from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.branches import Place, is_assertion, recorded_sides
from attngraph.frontend.capture import Captured
from attngraph.frontend.locations import quote
from attngraph.frontend.model import Model, trace

_MOST = 3
"""Branches of a model whose sides are tried in every combination."""


def settled(
    model: Model, check: Check, checked: Callable[[Captured], Check], *, elsewhere: bool
) -> tuple[Captured, Check]:
    """The model traced on sides that are right on both, and its check; `check` is of the first.
    `elsewhere` is as in `trace`.

    Raises CaptureError where no side is seen to be, naming the line.
    """
    captured = check.captured
    places = [place for place in captured.branches if not is_assertion(place)]
    if not places:
        return replace(captured, notes=(*captured.notes, *_assertions(captured))), check
    if len(places) > _MOST:
        raise _refused(places[_MOST], f"and {len(places)} places of the model do")
    tried: dict[tuple[bool, ...], str] = {}
    first = tuple(captured.branches[place] for place in places)
    ways = sorted(itertools.product((True, False), repeat=len(places)), key=lambda w: w != first)
    for way in ways:
        try:
            if way != first:
                captured = trace(model, dict(zip(places, way, strict=True)), elsewhere=elsewhere)
                check = checked(captured)
            wrong = _unsettled(captured, check, _taken(captured, check))
        except UsageError as error:
            wrong = f"then {error}"
        if not wrong:
            notes = [_note(place, captured.branches[place]) for place in places]
            notes += _assertions(captured)
            return replace(captured, notes=(*captured.notes, *notes)), check
        tried[way] = wrong
    raise _refused(places[0], tried[first])


def _taken(captured: Captured, check: Check) -> dict[Place, set[bool]]:
    """The sides that the model takes at each place, on inputs on which two sides can be told apart.

    Of zeros x · 2 and −x are the same: inputs and outputs of one number say nothing.
    """
    check.all_references()
    roles = roles_of(check.pristine, captured.args)
    found: dict[Place, set[bool]] = {place: set() for place in captured.branches}
    for tensors in check.all_cases().values():
        seen: dict[Place, set[bool]] = {place: set() for place in captured.branches}
        with recorded_sides(seen):
            eager = check.references(tensors).eager
        varied = all(role.masks or _varies(each) for role, each in zip(roles, tensors, strict=True))
        if varied and any(map(_varies, eager)):
            for place, sides in seen.items():
                found[place] |= sides
    return found


def _varies(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return True
    flat = tensor.detach().nan_to_num().flatten()
    return bool((flat != flat[0]).any())


def _unsettled(captured: Captured, check: Check, taken: Mapping[Place, set[bool]]) -> str:
    """Why the followed sides can't be relied on; empty where they can."""
    for place, side in captured.branches.items():
        if not is_assertion(place) and not taken[place]:
            return "the model doesn't come there when it runs"
        if not is_assertion(place) and (not side) not in taken[place]:
            return "no input that was tried takes the other side, so the two can't be compared"
    if not agrees(check, captured.graph):
        return "its sides compute different things"
    return ""


def _note(place: Place, side: bool) -> str:
    return (
        f"The model chooses by a tensor's values at {quote(*place)}. The file always does what the "
        f"code does where that is {side}; on inputs where it isn't, the two were compared and are "
        "equal."
    )


def _assertions(captured: Captured) -> list[str]:
    return [
        f"The assertion at {quote(*place)} depends on a tensor's values: the file doesn't check it."
        for place in captured.branches
        if is_assertion(place)
    ]


def _refused(place: Place, why: str) -> CaptureError:
    return CaptureError(
        f"Python decides by the values of a tensor at {quote(*place)}, which are known only at run "
        f"time, and {why}. Use torch.where, or leave the branch out for the export."
    )
