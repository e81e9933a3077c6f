"""Numbers that are made of the logarithm of a size: `int(factor * math.log(n))`.

torch keeps no logarithm of a size. As an operand of tensors it is one, a tensor of one number. As a
number of rows to choose, or of turns, it has to be a size: rounded it grows by steps, which begin
at so few sizes that each is told by its own. `int(math.log(n))` up to n = 64 is the number of those
among 3, 8, 21 and 55 that n has reached. The steps are found by the model's own functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import bound_sympy

Rising = Callable[[int], Any]
"""A function of a size that never falls."""

_LARGEST = 2**31 - 1
_MOST_STEPS = 64
_SMALLER, _LARGER, _INTEGER = (getattr(torch, name) for name in ("sym_min", "sym_max", "sym_int"))
_NUMBERS = (int, float, np.integer, np.floating)


@dataclass(frozen=True, eq=False)
class Logarithm:
    """A number that never falls as a size grows: a `tensor` of it, and what it is `at` any size.

    As a size it is rounded, and where that has too many steps it is what a run tells.
    """

    tensor: torch.Tensor
    size: Any
    at: Rising

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = as_tensors((tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor, name)

    def rounded(self, function: Callable[[Any], Any]) -> Logarithm:
        """What a function that rounds makes of it, as a number."""
        own = self.at
        return replace(self, tensor=_ROUNDED[function](self.tensor), at=lambda n: function(own(n)))

    def whole(self, function: Callable[[Any], int] = int) -> Any:
        """As a size, rounded by a function of numbers."""
        found = stepped(self.size, lambda n: function(self.at(n)))
        return _INTEGER(_ROUNDED[function](self.tensor).item()) if found is None else found

    def astype(self, dtype: Any) -> Logarithm:
        """As a number of numpy is."""
        return self.rounded(int) if np.issubdtype(np.dtype(dtype), np.integer) else self

    def item(self) -> Any:
        return self.whole() if isinstance(self.at(2), (int, np.integer)) else self

    def __ceil__(self) -> Any:
        return self.whole(math.ceil)

    def __floor__(self) -> Any:
        return self.whole(math.floor)

    def __trunc__(self) -> Any:
        return self.whole()

    def __round__(self, digits: int | None = None) -> Any:
        return self.whole(round) if digits is None else self.tensor.round(decimals=digits)

    def __add__(self, other: Any) -> Any:
        own = self.at
        rises = isinstance(other, _NUMBERS)
        return self._made(self.tensor + as_tensors(other), lambda n: own(n) + other, rises)

    def __sub__(self, other: Any) -> Any:
        own = self.at
        rises = isinstance(other, _NUMBERS)
        return self._made(self.tensor - as_tensors(other), lambda n: own(n) - other, rises)

    def __mul__(self, other: Any) -> Any:
        own = self.at
        rises = isinstance(other, _NUMBERS) and bool(other >= 0)
        return self._made(self.tensor * as_tensors(other), lambda n: own(n) * other, rises)

    def __truediv__(self, other: Any) -> Any:
        own = self.at
        rises = isinstance(other, _NUMBERS) and bool(other > 0)
        return self._made(self.tensor / as_tensors(other), lambda n: own(n) / other, rises)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: Any) -> Any:
        return as_tensors(other) - self.tensor

    def __rtruediv__(self, other: Any) -> Any:
        return as_tensors(other) / self.tensor

    def __neg__(self) -> Any:
        return -self.tensor

    def __pow__(self, other: Any) -> Any:
        return self.tensor ** as_tensors(other)

    def __rpow__(self, other: Any) -> Any:
        return as_tensors(other) ** self.tensor

    def __ge__(self, other: Any) -> Any:
        return self.tensor >= as_tensors(other)

    def __gt__(self, other: Any) -> Any:
        return self.tensor > as_tensors(other)

    def __le__(self, other: Any) -> Any:
        return self.tensor <= as_tensors(other)

    def __lt__(self, other: Any) -> Any:
        return self.tensor < as_tensors(other)

    def _made(self, tensor: torch.Tensor, at: Rising, rises: bool) -> Any:
        return replace(self, tensor=tensor, at=at) if rises else tensor


_ROUNDED: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    int: torch.trunc,
    round: torch.round,
    **dict.fromkeys((math.ceil, np.ceil), torch.ceil),
    **dict.fromkeys((math.floor, np.floor), torch.floor),
}


def as_tensors(values: Any) -> Any:
    """Nested values with a tensor for each such number."""
    return pytree.tree_map(
        lambda each: each.tensor if isinstance(each, Logarithm) else each, values
    )


def stepped(size: Any, at: Rising) -> Any:
    """What a function of a size gives that never falls, as a size; None if it has many steps."""
    node = size.node
    most = bound_sympy(node.expr, node.shape_env.var_to_range).upper
    last = _LARGEST if most is int_oo or most > _LARGEST else int(most)
    steps = [*itertools.islice(_steps(at, 1, last), _MOST_STEPS + 1)]
    if len(steps) > _MOST_STEPS:
        return None
    total: Any = at(1)
    for start, by in steps:
        total += by * _SMALLER(_LARGER(size - (start - 1), 0), 1)
    return total


def _steps(at: Rising, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Each size at which a function rises, in their order, and by how much it does."""
    before, after = at(first), at(last)
    if before == after:
        return
    if last == first + 1:
        yield last, int(after) - int(before)
        return
    middle = (first + last) // 2
    yield from _steps(at, first, middle)
    yield from _steps(at, middle, last)
