"""Classes that stand for int and float in a model's code, of which a size remains a size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from attngraph.frontend.rewording.logarithms import Logarithm

SIZES = (torch.SymInt, torch.SymFloat)
SYM_INT, SYM_FLOAT, SYM_SQRT = (
    getattr(torch, name) for name in ("sym_int", "sym_float", "_sym_sqrt")
)

Namespace = dict[str, Any]
"""The global names of a module of code."""

_spaces: list[Namespace] = []


class _Number(type):
    """Of classes that stand for int and float, and say that a size is one."""

    plain: type
    size: type

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, (cls.plain, cls.size))

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.plain)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.plain

    def __hash__(cls) -> int:
        return hash(cls.plain)


class Int(int, metaclass=_Number):
    plain, size = int, torch.SymInt

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Logarithm):
            return args[0].whole()
        number = _read_at_run_time(args)
        return int(*args, **kwargs) if number is None else SYM_INT(number)


class Float(float, metaclass=_Number):
    plain, size = float, torch.SymFloat

    def __new__(cls, *args: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Logarithm):
            return args[0]
        number = _read_at_run_time(args)
        return float(*args) if number is None else SYM_FLOAT(number)


def _read_at_run_time(args: Sequence[Any]) -> Any:
    """The size that is the only argument, or the element of the tensor that is; None of others."""
    if len(args) != 1:
        return None
    number = args[0].item() if isinstance(args[0], torch.Tensor) else args[0]
    return number if isinstance(number, SIZES) else None


@contextmanager
def classes_in(spaces: Sequence[Namespace]) -> Iterator[None]:
    """Within it, these are the namespaces in which `pythons_own` finds the classes."""
    outer = list(_spaces)
    _spaces[:] = spaces
    try:
        yield
    finally:
        _spaces[:] = outer


@contextmanager
def pythons_own() -> Iterator[None]:
    """Within it, int and float are Python's own again, for dynamo, which traces a scan's step.

    It has a size remain one by itself, and refuses to trace a class that it doesn't know, in any
    function that a step calls.
    """
    with ExitStack() as stack:
        for names in _spaces:
            own = {name: each.plain for name, each in names.items() if type(each) is _Number}
            stack.enter_context(patch.dict(names, own))
        yield
