"""Comparisons of sizes as Python bools, for operators that take no other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_TORCH = str(Path(torch.__file__).parent)


def wants_bool(message: str) -> bool:
    """Whether an operator was given a comparison of sizes, such as `is_causal=length > 1`."""
    return "must be bool, not SymBool" in message


@contextmanager
def decided_comparisons() -> Iterator[None]:
    """The model's own comparisons of sizes are decided where they are made, as `if` decides them.

    torch.export then checks that they come out the same in a dim's whole range. torch's own
    comparisons stay open: many are of dims that may or may not be equal.
    """
    with ExitStack() as stack:
        for name in _COMPARISONS:
            decided = _decided(getattr(torch.SymInt, name))
            stack.enter_context(patch.object(torch.SymInt, name, decided))
        yield


def _decided(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def decided(left: Any, right: Any) -> Any:
        result = compare(left, right)
        if not isinstance(result, torch.SymBool):
            return result
        caller = sys._getframe(1).f_code.co_filename
        return result if caller.startswith(_TORCH) else bool(result)

    return decided
