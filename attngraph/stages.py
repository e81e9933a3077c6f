"""The stages of a compile or a measurement, and who is told as each begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str], None]
"""Called with the name of each stage as it begins."""

_TOLD: ContextVar[Progress | None] = ContextVar("told", default=None)


def begins(name: str) -> None:
    """Tells whoever is told that a stage begins."""
    if (told := _TOLD.get()) is not None:
        told(name)


@contextmanager
def telling(progress: Progress | None) -> Iterator[None]:
    """Has `progress` told of the stages inside the block; without one whoever was told before."""
    token = _TOLD.set(progress or _TOLD.get())
    try:
        yield
    finally:
        _TOLD.reset(token)
