"""Makes functions that remember results, such as masks by size, forget those of a trace."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

_MEMOISED: Any = functools._lru_cache_wrapper
_KNOWN = frozenset(["attngraph", "torch", "sympy", "numpy", "onnx", "onnx_ir", "onnxscript"])
"""Packages whose such functions hold no tensors, and thousands of other things."""


def looks_up_a_size(message: str) -> bool:
    """Whether `functools.lru_cache` was asked for an open size, which only Dynamo looks through."""
    return "unhashable type: non-nested SymInt" in message


@contextmanager
def forgetting() -> Iterator[None]:
    """Afterwards no `functools.lru_cache` hands out a tensor that only stood for one."""
    try:
        yield
    finally:
        for function in _memoised():
            held = pytree.tree_leaves(gc.get_referents(function))
            if any(isinstance(leaf, FakeTensor) for leaf in held):
                function.cache_clear()


def _memoised() -> Iterator[Any]:
    """Those of modules and of their classes; to look through the whole heap would take long."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _KNOWN:
            continue
        for value in list(getattr(module, "__dict__", {}).values()):
            inner = value.__dict__.values() if isinstance(value, type) else ()
            yield from (found for found in (value, *inner) if type(found) is _MEMOISED)
