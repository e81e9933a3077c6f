"""Comparisons of sizes: as Python bools, for operators that take no other, and in max and min."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._export import non_strict_utils

_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_SIZES = (torch.SymInt, torch.SymFloat)
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


def are_sizes(numbers: Sequence[Any]) -> bool:
    """Whether some numbers are all there is, one of them a size or a fraction of one."""
    is_size = any(isinstance(number, _SIZES) for number in numbers)
    return is_size and all(isinstance(number, (int, float, *_SIZES)) for number in numbers)


@contextmanager
def open_extremes() -> Iterator[None]:
    """`max(n / 8, 1)` is the larger at any size, as torch.export has it for two whole numbers.

    Of others it would ask which is larger, and take the answer for a condition on n.
    """
    extreme: Callable[..., Any] = non_strict_utils._tensor_min_max

    def computed(*args: Any, **kwargs: Any) -> Any:
        if are_sizes(args) and kwargs.keys() == {"real_callable", "tensor_callable"}:
            is_maximum = kwargs["tensor_callable"] is torch.maximum
            return functools.reduce(torch.sym_max if is_maximum else torch.sym_min, args)
        return extreme(*args, **kwargs)

    with patch.object(non_strict_utils, "_tensor_min_max", computed):
        yield


def _decided(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def decided(left: Any, right: Any) -> Any:
        result = compare(left, right)
        if not isinstance(result, torch.SymBool):
            return result
        caller = sys._getframe(1).f_code.co_filename
        return result if caller.startswith(_TORCH) else bool(result)

    return decided
