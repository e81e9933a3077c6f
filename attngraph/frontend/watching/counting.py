"""The functions that a model runs in which Python goes through a loop."""

from __future__ import annotations

import dis
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

from attngraph.frontend.watching.frames import watched_frames


@contextmanager
def recorded_loops(found: dict[CodeType, None], is_library: Callable[[FrameType], bool]) -> Any:
    """Within, adds each function with a loop that is called, if it is none of a library."""

    def entered(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and _has_loop(frame.f_code) and not is_library(frame):
            found.setdefault(frame.f_code)

    with watched_frames(entered):
        yield


@cache
def _has_loop(code: CodeType) -> bool:
    """Whether its bytecode goes through an iterator, or back to an earlier line."""
    names = (each.opname for each in dis.get_instructions(code))
    return any(name == "FOR_ITER" or "JUMP_BACKWARD" in name for name in names)
