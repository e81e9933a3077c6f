"""Sizes that are rounded up to a multiple, however the model's code says that.

Code that cuts an axis into blocks pads it by `(-n) % 4`, `(4 - n % 4) % 4` or `-(-n // 4) * 4 - n`.
torch.export doesn't see that n and these make a multiple of 4, and takes the remainder that the
sample has for a demand. All of them are `4 * ((n + 3) // 4) - n`, of which it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import sympy
import torch


@contextmanager
def rounded_up() -> Iterator[None]:
    """Remainders and quotients of negative sizes are those of sizes rounded up; the same numbers.

    floor(-n / k) = -floor((n + k - 1) / k) for all whole n and k > 0, and the remainder follows.
    """
    remainder: Callable[[Any, Any], Any] = torch.SymInt.__mod__
    quotient: Callable[[Any, Any], Any] = torch.SymInt.__floordiv__
    remainders: dict[tuple[sympy.Expr, int], tuple[torch.SymInt, torch.SymInt]] = {}

    def congruent(number: torch.SymInt, by: int) -> torch.SymInt:
        """`number` with n in the place of each `n % by` in it."""
        for term, factor in number.node.expr.as_coefficients_dict().items():
            if (term, by) in remainders and factor.is_integer:
                size, rest = remainders[term, by]
                number = number + int(factor) * (size - rest)
        return number

    def mod(number: torch.SymInt, by: Any) -> Any:
        if not _is_divisor(by):
            return remainder(number, by)
        equal = congruent(number, by)
        if _falls(equal):
            return equal - by * floordiv(equal, by)
        rest = remainder(number, by)
        if isinstance(rest, torch.SymInt):
            remainders[rest.node.expr, by] = number, rest
        return rest

    def floordiv(number: torch.SymInt, by: Any) -> Any:
        if not _is_divisor(by) or not _falls(number):
            return quotient(number, by)
        whole = -(-int(number.node.expr.as_coeff_Add()[0]) // by)
        return whole - quotient(by - 1 - (number - by * whole), by)

    with (
        patch.object(torch.SymInt, "__mod__", mod),
        patch.object(torch.SymInt, "__floordiv__", floordiv),
    ):
        yield


def _is_divisor(by: Any) -> bool:
    return type(by) is int and by > 0


def _falls(number: Any) -> bool:
    """Whether it is a number and sizes that are taken from it, one at least."""
    if not isinstance(number, torch.SymInt):
        return False
    terms = number.node.expr.as_coefficients_dict()
    factors = [(term, factor) for term, factor in terms.items() if not term.is_number]
    return bool(factors) and all(
        factor.is_negative and term.is_nonnegative for term, factor in factors
    )
