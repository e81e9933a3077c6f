"""What a model's own code asks of its sizes while it is traced: `if k.shape[1] > 12`, `min(n, 5)`.

torch.export answers for the range that it believes a dim to have, which begins at 2, and keeps a
guard only where that doesn't settle it: a branch on a length of 1 leaves no trace. What torch's own
code asks (does this broadcast?) is answered so that it holds for any size, and isn't recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import sympy
import torch

from attngraph.frontend.watching.quiet import passed_over

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_ORDERS = (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)


@dataclass(frozen=True)
class Question:
    """A condition in torch's symbols that held where the code asked, and the place: file, line."""

    condition: sympy.Basic
    file: str
    line: int


@contextmanager
def recorded_questions(found: list[Question]) -> Iterator[None]:
    """Adds each question with its answer while the model is traced."""
    with ExitStack() as stack:
        stack.enter_context(passed_over(__file__))
        for kind in (torch.SymBool, torch.SymInt):
            stack.enter_context(patch.object(kind, "__bool__", _recording(kind, found)))
        yield


def _recording(kind: Any, found: list[Question]) -> Callable[[Any], bool]:
    ask: Callable[[Any], bool] = kind.__bool__

    def recording(self: Any) -> bool:
        answer = ask(self)
        frame = _own_frame(sys._getframe(1))
        if frame is not None:
            asked = self.node.expr
            if kind is torch.SymInt:
                asked = sympy.Ne(asked, 0)
            held = asked if answer else sympy.Not(asked)
            if held.free_symbols:
                found.append(Question(held, frame.f_code.co_filename, frame.f_lineno))
        return answer

    return recording


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """The model's frame that asks; None where torch does."""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back  # a comparison that we decide for the model
    is_own = frame is not None and not frame.f_code.co_filename.startswith(_TORCH)
    return frame if is_own else None


@contextmanager
def unguarded_starts(up_to: int) -> Iterator[None]:
    """Within it, torch keeps no guard where the model's code asks whether a size is large enough,
    the sample is, and so are all sizes from one on that is at most `up_to`: what is recorded of it
    is left to be tried.
    """
    ask: Callable[[Any], bool] = torch.SymBool.__bool__

    def answered(self: Any) -> bool:
        if (
            _own_frame(sys._getframe(1)) is not None
            and (answer := _begins(self, up_to)) is not None
        ):
            return answer
        return ask(self)

    with passed_over(__file__), patch.object(torch.SymBool, "__bool__", answered):
        yield


def _begins(condition: Any, up_to: int) -> bool | None:
    """The answer that the sample has, if it is that of all sizes from one on, and no others."""
    if not condition.node.has_hint():
        return None
    asked, answer = condition.node.expr, bool(condition.node.hint)
    return answer if is_start(asked if answer else sympy.Not(asked), up_to) else None


def is_start(held: sympy.Basic, up_to: int) -> bool:
    """Whether a condition says that a size is at least some number from 2 `up_to` that."""
    if not isinstance(held, _ORDERS) or len(held.free_symbols) != 1:
        return False
    (size,) = held.free_symbols
    told = [held.xreplace({size: sympy.Integer(n)}) == sympy.true for n in range(1, up_to + 1)]
    return told == sorted(told) and told[-1] and not told[0]
