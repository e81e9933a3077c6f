"""Branches on the values of tensors: `if not padding_mask.any(): padding_mask = None`.

A trace follows one side of them. Often that is enough: one side is a shortcut of the other, and
computes the same where it is taken. Nothing of that is known here; attngraph/checks/branches.py
compares the side that was followed with the model where the model takes the other.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias
from unittest.mock import patch

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from attngraph.frontend.watching.quiet import passed_over

_TORCH = str(Path(torch.__file__).parent) + os.sep
_TORCH_MODULES = str(Path(torch.nn.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep

_MOST_ASKED = 256
"""Answers that one line is given in a trace."""
Place: TypeAlias = tuple[str, int]
"""A file and a line of the model's code, at which a tensor is asked to be true or false."""


@contextmanager
def followed_branches(sides: Mapping[Place, bool], found: dict[Place, bool]) -> Iterator[None]:
    """While a model is traced, a tensor of unknown value is what `sides` say, or else true.

    Each place that asked is added to `found`, with its answer.
    """

    asked: Counter[Place | None] = Counter()

    def answer(ask: Callable[[torch.Tensor], bool], tensor: torch.Tensor) -> bool:
        try:
            return ask(tensor)
        except GuardOnDataDependentSymNode:
            place = _asking()
            asked[place] += 1
            if place is None or asked[place] > _MOST_ASKED:  # a loop that no answer ends
                raise
            return found.setdefault(place, sides.get(place, True))

    with passed_over(__file__), _replaced(answer):
        yield


@contextmanager
def recorded_sides(found: dict[Place, set[bool]]) -> Iterator[None]:
    """While the model itself runs, the answers at the places that `found` has are added to it."""

    def answer(ask: Callable[[torch.Tensor], bool], tensor: torch.Tensor) -> bool:
        said = ask(tensor)
        place = _asking()
        if place in found:
            found[place].add(said)
        return said

    with _replaced(answer):
        yield


def is_assertion(place: Place) -> bool:
    """Whether the line at a place states what holds, and chooses nothing."""
    return linecache.getline(*place).lstrip().startswith("assert ")


def _asking() -> Place | None:
    """The line that asked: the model's own, or that of one of torch's modules."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        file = frame.f_code.co_filename
        if file.startswith(_TORCH_MODULES) or not file.startswith((_TORCH, _OURS, "<")):
            return file, line
    return None


@contextmanager
def _replaced(
    answer: Callable[[Callable[[torch.Tensor], bool], torch.Tensor], bool],
) -> Iterator[None]:
    ask: Callable[[torch.Tensor], bool] = torch.Tensor.__bool__

    def asked(self: torch.Tensor) -> bool:
        return answer(ask, self)

    with patch.object(torch.Tensor, "__bool__", asked):
        yield
