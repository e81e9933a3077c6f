"""Sizes that are rounded up to a multiple, however the model's code says that.

Code that cuts an axis into blocks pads it by `(-n) % 4`, `(4 - n % 4) % 4`, `-(-n // 4) * 4 - n` or
`math.ceil(n / 4) * 4 - n`. torch.export doesn't see that n and these make a multiple of 4, and
takes the remainder that the sample has for a demand. All of them are `4 * ((n + 3) // 4) - n`, of
which it does. So is `4 - n % 4` behind `if n % 4:`, and it is right without a remainder as well.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv, ToFloat

_TORCH = str(Path(torch.__file__).parent) + os.sep
_CONVERSIONS, _OURS = torch.__file__, str(Path(__file__).parent / "numbers.py")
_FINEST = 1 << 20
"""Parts of one in a factor such as 0.25; of others, as 0.1, the float is no such number."""


@contextmanager
def rounded_up() -> Iterator[None]:
    """Remainders and quotients of negative sizes are those of sizes rounded up; the same numbers.

    floor(-n / k) = -floor((n + k - 1) / k) for all whole n and k > 0, and the remainder follows. A
    quotient of floats that is rounded is that of integers: below 2⁵² it is on the right side of any
    integer.
    """
    remainder: Callable[[Any, Any], Any] = torch.SymInt.__mod__
    quotient: Callable[[Any, Any], Any] = torch.SymInt.__floordiv__
    difference: Callable[[Any, Any], Any] = torch.SymInt.__rsub__
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

    def rounding(name: str) -> Callable[[torch.SymFloat], Any]:
        own: Callable[[torch.SymFloat], Any] = getattr(torch.SymFloat, name)

        def rounded(number: torch.SymFloat) -> Any:
            parts = None if _asks_torch(sys._getframe(1)) else _quotient(number)
            if parts is None or (name == "__trunc__" and not parts[0].node.expr.is_nonnegative):
                return own(number)
            size, by = parts
            return floordiv(size + by - 1 if name == "__ceil__" else size, by)

        return rounded

    def missing(rest: torch.SymInt, of: Any) -> Any:
        """`of - rest`, which is what is missing to a multiple where a branch knows of a rest.

        Of no rest it is `of`, and nothing is missing: code that pads there too means another thing.
        """
        known = type(of) is int and (rest.node.expr, of) in remainders
        if known and statically_known_true(rest != 0):
            size, _ = remainders[rest.node.expr, of]
            return of * floordiv(size + of - 1, of) - size
        return difference(rest, of)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.SymInt, "__rsub__", missing))
        for name, function in (("mod", mod), ("floordiv", floordiv)):
            stack.enter_context(patch.object(torch.SymInt, f"__{name}__", function))
        for name in ("__ceil__", "__floor__", "__trunc__"):
            stack.enter_context(patch.object(torch.SymFloat, name, rounding(name)))
        both = patch.object(
            torch.SymInt, "__divmod__", lambda size, by: (size // by, size % by), create=True
        )
        stack.enter_context(both)
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


def _asks_torch(frame: FrameType | None) -> bool:
    """Whether an operator of torch computes its shape there, which the graph does once more."""
    while frame is not None and frame.f_code.co_filename in (_CONVERSIONS, _OURS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def _quotient(number: torch.SymFloat) -> tuple[torch.SymInt, int] | None:
    """A size and an integer whose quotient a float is: n / 4, n / 4.0, n * 0.25, n / 4 + 1."""
    constant, expr = number.node.expr.as_coeff_Add()
    shift = Fraction(float(constant))
    if isinstance(expr, (IntTrueDiv, FloatTrueDiv)):
        size, by = expr.args
        factor = None if not by.is_number or by <= 0 else 1 / Fraction(float(by))
    elif expr.is_Mul and len(expr.args) == 2:
        by, size = expr.args
        factor = Fraction(float(by)) if by.is_number else None
    else:
        size, factor = expr, Fraction(1)
    if isinstance(size, ToFloat):
        size = size.args[0]
    if factor is None or not size.is_integer or factor <= 0:
        return None
    # Of n / 3 + 0.5 the first float is off, and the sum no whole number then.
    below = math.lcm(factor.denominator, shift.denominator)
    env = number.node.shape_env
    known = env.backed_var_to_val
    if below > _FINEST or not size.free_symbols <= known.keys():
        return None
    made = env.create_symintnode(size, hint=int(size.xreplace(known)))
    if not isinstance(made, torch.SymInt):
        return None
    return made * int(factor * below) + int(shift * below), below
