"""Branches on the values of tensors: `if not padding_mask.any(): padding_mask = None`.

A trace follows one side of them. Often that is enough: one side is a shortcut of the other, and
computes the same where it is taken. Nothing of that is known here; attngraph/checks/branches.py
compares the side that was followed with the model where the model takes the other.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from attngraph.frontend.watching.asked import Place, mark
from attngraph.frontend.watching.jumps import chooses_alone, recorded_jumps
from attngraph.frontend.watching.quiet import passed_over
from attngraph.frontend.watching.statements import answer_without_effect, goes_on_if

_TORCH = str(Path(torch.__file__).parent) + os.sep
_TORCH_MODULES = str(Path(torch.nn.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep

_MOST_ASKED = 256
"""Answers that one line is given in a trace."""
_MOST_TURNS = 16
"""Turns of a loop that ends by a number alone, which is a few in a trace."""


@contextmanager
def followed_branches(
    sides: Mapping[Place, bool],
    found: dict[Place, bool],
    jumps: dict[Place, bool],
    way: Sequence[bool] | None = None,
) -> Iterator[None]:
    """While a model is traced, a tensor of unknown value is what `sides` say, or else true.

    A condition of numbers that only a run knows, such as `index.numel() == 0`, is else what it is
    of a few, and one of a line that may raise an error what raises none. Each place that asked is
    added to `found`, with its answer, and to `jumps` whether all that asks there is the line's only
    jump, of a number: then which way the line goes is the answer.

    With a `way` each condition of the model's own is followed, whatever it asks, and marked in the
    trace. The way has the answers of the first ones; later ones are what the same condition was, or
    what their line was last.
    """

    times: Counter[Place | None] = Counter()
    ahead = iter(way or ())
    said = dict[Any, tuple[Any, bool]]()  # with what was asked, which stays what its id is of

    def answer(ask: Callable[[Any], bool], asked: Any) -> bool:
        try:
            return ask(asked)
        except GuardOnDataDependentSymNode:
            of_numbers, frame = isinstance(asked, torch.SymBool), sys._getframe(2)
            is_models = of_numbers and _is_models_file(frame.f_code.co_filename)
            jumps_by = is_models and chooses_alone(frame)
            # Of its sizes torch asks much that the model doesn't; there an answer has to be true.
            is_known = jumps_by if way is None else is_models
            place = None if _is_of_sizes(asked) and not is_known else _asking()
            times[place] += 1
            if place is None or times[place] > _MOST_ASKED:  # a loop that no answer ends
                raise
            usual = answer_without_effect(*place)
            ends = usual is None and times[place] > (_MOST_TURNS if of_numbers else 0)
            goes_on = goes_on_if(*place) if ends else None
            if usual is None:
                usual = _of_several(asked) if of_numbers else True
                if way is not None:
                    same = asked.node.expr if of_numbers else id(asked)
                    _, before = said.get(same, (None, found.get(place, usual)))
                    told = next(ahead, None)
                    if told is None and before is goes_on:
                        raise
                    found[place] = before if told is None else told
                    said[same] = asked, found[place]
                    mark(asked, place, found[place])
            answered = found.get(place, sides.get(place, usual))
            if way is None and answered is goes_on:  # and would for good
                raise
            jumps[place] = jumps.get(place, True) and jumps_by
            found[place] = answered
            return answered

    with passed_over(__file__), _replaced(answer):
        yield


@contextmanager
def recorded_sides(
    found: dict[Place, set[bool]],
    jumps: Collection[Place],
    *,
    numbers: bool = True,
    held: Mapping[Place, bool] | None = None,
    told: Callable[[Place, bool], None] | None = None,
) -> Iterator[None]:
    """While the model itself runs, the answers at the places that `found` has are added to it.

    Those of `jumps` are read off the code that runs. What is asked of a tensor at places that are
    `held` is answered by what they say. `told` is called with each answer, in their order.

    With `numbers` the model's `item()` gives a tensor, so that what is asked of it shows as well.
    """

    def answer(ask: Callable[[Any], bool], asked: Any) -> bool:
        said = ask(asked)
        place = _asking()
        if held and place is not None and place in held:
            return held[place]
        if place in found:
            found[place].add(said)
            if told is not None:
                told(place, said)
        return said

    of_jumps = {place: found[place] for place in jumps}
    with _replaced(answer, numbers=numbers), recorded_jumps(of_jumps):
        yield


@contextmanager
def forced_sides(answers: Mapping[Place, Sequence[bool]]) -> Iterator[dict[Place, list[bool]]]:
    """While the model itself runs, what it asks at these places is what they say, in turn.

    Gives what is left of the answers. Raises RuntimeError in a run that asks more often.
    """
    left = {place: list(said) for place, said in answers.items()}

    def answer(ask: Callable[[Any], bool], asked: Any) -> bool:
        place = _asking()
        if place not in left:
            return ask(asked)
        if not left[place]:
            raise RuntimeError(f"{place} asks more often than in the trace")
        return left[place].pop(0)

    with _replaced(answer, numbers=True):
        yield left


def is_assertion(place: Place) -> bool:
    """Whether the line at a place states what holds, and chooses no result."""
    return answer_without_effect(*place) is not None


def _is_of_sizes(asked: Any) -> bool:
    """Whether a condition is of a size that only a run knows, such as that of `x[mask]`."""
    if not isinstance(asked, torch.SymBool):
        return False
    sizes: Collection[Any] = asked.node.shape_env.size_like
    return any(symbol in sizes for symbol in asked.node.expr.free_symbols)


def _of_several(asked: torch.SymBool) -> bool:
    """The answer to a condition where each number that only a run knows is a few."""
    node = asked.node
    known = node.shape_env.backed_var_to_val
    few = {
        symbol: known.get(symbol, 3 + at)
        for at, symbol in enumerate(sorted(node.expr.free_symbols, key=str))
    }
    return bool(node.expr.xreplace(few) == sympy.true)


def _is_models_file(file: str) -> bool:
    return file.startswith(_TORCH_MODULES) or not file.startswith((_TORCH, _OURS, "<"))


def _asking() -> Place | None:
    """The line that asked: the model's own, or that of one of torch's modules."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        if _is_models_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, line
    return None


@contextmanager
def _replaced(
    answer: Callable[[Callable[[Any], bool], Any], bool], *, numbers: bool = False
) -> Iterator[None]:
    """Within, `answer` is asked for each tensor that has to be true or false.

    So are comparisons of an `item()`: in a trace torch has conditions of these, and with `numbers`
    what would be a number of Python's is the tensor. What torch itself makes a bool of, as
    `torch.equal` does, asks a tensor here.
    """

    def asking(ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return lambda asked: answer(ask, asked)

    item: Callable[[torch.Tensor], Any] = torch.Tensor.item
    tolist: Callable[[torch.Tensor], Any] = torch.Tensor.tolist

    def item_of(self: torch.Tensor) -> Any:
        return self.reshape(()) if self.numel() == 1 and not _is_torch() else item(self)

    @wraps(tolist)  # torch looks a method up by its name, and modes see what it finds
    def list_of(self: torch.Tensor) -> Any:
        return tolist(self) if self.shape or _is_torch() else self

    with ExitStack() as stack:
        for kind in (torch.Tensor, torch.SymBool):
            own: Callable[[Any], bool] = kind.__bool__
            stack.enter_context(patch.object(kind, "__bool__", asking(own)))
        stack.enter_context(patch.object(torch.Tensor, "__contains__", _contains))
        for name, made in (("item", item_of), ("tolist", list_of)) if numbers else ():
            stack.enter_context(patch.object(torch.Tensor, name, made))
        for owner in (torch, torch.Tensor):
            for name, compared in (("equal", _equal), ("allclose", _allclose)):
                stack.enter_context(patch.object(owner, name, compared))
            stack.enter_context(patch.object(owner, "is_nonzero", _is_true))
        yield


def _is_torch() -> bool:
    """Whether torch itself asks, as it does to print a tensor."""
    return sys._getframe(2).f_code.co_filename.startswith(_TORCH)


def _is_true(input: torch.Tensor) -> bool:
    return bool(input)


def _equal(input: torch.Tensor, other: torch.Tensor) -> bool:
    return input.shape == other.shape and bool((input == other).all())


def _allclose(
    input: torch.Tensor,
    other: torch.Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
) -> bool:
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


def _contains(self: torch.Tensor, element: Any) -> bool:
    return bool((self == element).any())
