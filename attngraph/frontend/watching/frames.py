"""The frames that Python enters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def watched_frames(entered: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Within, a function is called at the begin of each frame, as sys.settrace has it."""
    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(before)
