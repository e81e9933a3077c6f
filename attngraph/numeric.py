"""Numbers that a caller gives, of any type, checked where they are taken. Imports no torch."""

from __future__ import annotations

import math
import operator
from typing import Any

from attngraph.errors import UsageError

_TEXT = (str, bytes, bytearray)


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number in a range, from whatever Python counts as one.

    Raises UsageError for a bool, a float, text, None, and a number outside of the range.
    """
    allowed = f"{least} or more" if most is None else f"{least} to {most}"
    try:
        number = None if _is_bool(value) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        number = None
    if number is None or number < least or (most is not None and number > most):
        raise UsageError(f"{name} is {_shown(value)}; it must be a whole number, {allowed}.")
    return number


def real(name: str, value: Any) -> float:
    """A finite number as a float. Raises UsageError for a bool, text, None, NaN and infinities."""
    try:
        number = math.nan if _is_bool(value) or isinstance(value, _TEXT) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{name} is {_shown(value)}; it must be a finite number.")
    return number


def _is_bool(value: Any) -> bool:
    """Whether a value is a bool, NumPy's and torch's among them, which count as 0 or 1."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def _shown(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no integers of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
