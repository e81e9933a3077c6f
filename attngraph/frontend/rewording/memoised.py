"""Makes functions that remember results, the model's own and torch's, forget those of a trace."""

from __future__ import annotations

import functools
import gc
import linecache
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import graph_module
from torch.fx.experimental import symbolic_shapes
from torch.utils import _pytree as pytree

_MEMOISED: Any = functools._lru_cache_wrapper
_KNOWN = frozenset(["attngraph", "torch", "sympy", "numpy", "onnx", "onnx_ir", "onnxscript"])
"""Packages whose such functions hold no tensors, and thousands of other things."""
_SOURCES = 256
_ANSWERS = 4096
_sources: deque[str] = deque()
"""The names of graphs, oldest first, whose sources torch keeps since they were traced here."""


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


@contextmanager
def bounded() -> Iterator[None]:
    """What torch would keep of every trace for as long as the process lives, it keeps of the last
    ones: the sources of its graphs, and what it found out of sizes. Symbols of a trace, and all
    that they hold, it doesn't keep beyond it.
    """
    kept = graph_module._loader.eval_cache
    before = len(kept)
    with _seen(symbolic_shapes.ShapeEnv) as made:
        try:
            yield
        finally:
            for symbols in made:
                # a circle through C++, which no collector sees: an input's sizes hold the symbols
                symbols.tracked_fakes = []
            for method in vars(symbolic_shapes.ShapeEnv).values():
                if hasattr(method, "cache_clear"):
                    method.cache_clear()
            answers = symbolic_shapes._maybe_evaluate_static_worker
            if answers.cache_info().currsize > _ANSWERS:
                answers.cache_clear()
            _sources.extend(list(kept)[before:])
            while len(_sources) > _SOURCES:
                name = _sources.popleft()
                kept.pop(name, None)
                linecache.cache.pop(name, None)


@contextmanager
def _seen(class_: type[Any]) -> Iterator[weakref.WeakSet[Any]]:
    """The instances of a class that are made meanwhile."""
    found: weakref.WeakSet[Any] = weakref.WeakSet()
    begin = class_.__init__

    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        found.add(self)
        begin(self, *args, **kwargs)

    with mock.patch.object(class_, "__init__", begun):
        yield found


def _memoised() -> Iterator[Any]:
    """Those of modules and of their classes; to look through the whole heap would take long."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _KNOWN:
            continue
        for value in list(getattr(module, "__dict__", {}).values()):
            inner = value.__dict__.values() if isinstance(value, type) else ()
            yield from (found for found in (value, *inner) if type(found) is _MEMOISED)
