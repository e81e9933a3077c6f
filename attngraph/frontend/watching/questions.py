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
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back  # a comparison that we decide for the model
        if frame is not None and not frame.f_code.co_filename.startswith(_TORCH):
            asked = self.node.expr
            if kind is torch.SymInt:
                asked = sympy.Ne(asked, 0)
            held = asked if answer else sympy.Not(asked)
            if held.free_symbols:
                found.append(Question(held, frame.f_code.co_filename, frame.f_lineno))
        return answer

    return recording
