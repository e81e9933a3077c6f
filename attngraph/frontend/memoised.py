"""Functions that remember results, such as masks by size, forget those of a trace."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

_MEMOISED: Any = functools._lru_cache_wrapper
_KNOWN = ("torch.", "sympy.")
"""Whose such functions hold no tensors, and thousands of other things."""


def looks_up_a_size(message: str) -> bool:
    """Whether `functools.lru_cache` was asked for an open size, which only Dynamo looks through."""
    return "unhashable type: non-nested SymInt" in message


@contextmanager
def forgetting() -> Iterator[None]:
    """Afterwards no `functools.lru_cache` hands out a tensor that only stood for one."""
    try:
        yield
    finally:
        memoised: list[Any] = [found for found in gc.get_objects() if type(found) is _MEMOISED]
        for function in memoised:
            is_known = str(getattr(function, "__module__", "")).startswith(_KNOWN)
            held = () if is_known else pytree.tree_leaves(gc.get_referents(function))
            if any(isinstance(leaf, FakeTensor) for leaf in held):
                function.cache_clear()
