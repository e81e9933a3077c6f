"""Functions that round a size up: scipy's next_fast_len, the next power of two or multiple.

A trace takes what such a function makes of the sample's size for a constant, or keeps the bounds
within which it makes the same. If it is a rounding, which its values at many sizes show, the next
multiple of a number is written as arithmetic. Any other rounding is left out where it is for speed
alone, as in a convolution by a transform: where the model computes the same without it at sizes
that it rounds. The check of the file compares with the model as it is.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import sympy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from attngraph.frontend.watching.locations import is_plumbing

_MEMOISED: Any = functools._lru_cache_wrapper
_TRIED = (*range(1, 300), 1000, 1023, 4097)
_PLAIN = (int, float, str, bool, type(None), torch.SymInt, torch.SymFloat)

Function = CodeType | Callable[..., Any]
"""What is looked for: a function by its code, and one that is remembered by itself."""
Rounded = dict[str, set[sympy.Symbol]]
"""Names of functions that were left out, with the symbols of the sizes that they were given."""


def number_functions(frame: FrameType | None) -> Iterator[CodeType]:
    """The functions of numbers that run there, innermost first."""
    while frame is not None and is_plumbing(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None:
        code, values = frame.f_code, frame.f_locals
        flags = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        arguments = [values.get(name) for name in given]
        is_sized = any(isinstance(value, torch.SymInt) for value in arguments)
        if flags or not is_sized or not all(isinstance(value, _PLAIN) for value in arguments):
            return
        yield code
        frame = frame.f_back


def remembering(frame: FrameType | None) -> Iterator[Function]:
    """The functions with a `functools.lru_cache` that the code of a frame names."""
    if frame is None:
        return
    names, space = frame.f_code.co_names, frame.f_globals
    found = [space[name] for name in names if name in space]
    seen = set(map(id, found))  # not by ==: a global may be a tensor
    for value in found:
        if isinstance(value, ModuleType):
            inner = [vars(value)[name] for name in names if name in vars(value)]
            found += [each for each in inner if id(each) not in seen]
            seen.update(map(id, inner))
    yield from (value for value in found if type(value) is _MEMOISED)


@contextmanager
def stood_in(
    wanted: Iterable[Function], by: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Each of these functions, wherever a module names it, is what `by` makes of it."""
    wanted = list(wanted)
    replaced = [
        (names, name, value)
        for module in (list(sys.modules.values()) if wanted else ())
        if isinstance(module, ModuleType)
        for names in (vars(module),)
        for name, value in list(names.items())
        if (type(value) is FunctionType and value.__code__ in wanted)
        or (type(value) is _MEMOISED and any(value is each for each in wanted))
    ]
    for names, name, value in replaced:
        names[name] = by(value)
    try:
        yield
    finally:
        for names, name, value in replaced:
            names[name] = value


def written_out(
    rounded: Rounded | None, exact: Rounded
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of a function, the one that gives a size for a size.

    Adds those that are arithmetic to `exact`, and those that are left out to `rounded`, unless that
    is None.
    """

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            size = _size(args, kwargs)
            step = None if size is None else _step(function, args, kwargs)
            if size is None or step is None:
                return function(*args, **kwargs)
            if not step and rounded is None:  # what is remembered isn't looked up by an open size
                return function(*map(_fixed, args), **{k: _fixed(v) for k, v in kwargs.items()})
            taken = exact if step or rounded is None else rounded
            name = f"{function.__module__}.{function.__qualname__}"
            taken.setdefault(name, set()).update(size.node.expr.free_symbols)
            return (size + step - 1) // step * step if step else size

        return called

    return of


def _fixed(value: Any) -> Any:
    return int(value) if isinstance(value, torch.SymInt) else value


def left_out(hits: list[int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of a function, the one that gives a number as it is; adds those that it would round."""

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            whole = [value for value in (*args, *kwargs.values()) if type(value) is int]
            if type(found) is not int or not whole:
                return found
            if found != whole[0]:
                hits.append(found)
            return whole[0]

        return called

    return of


def _size(args: Any, kwargs: Any) -> torch.SymInt | None:
    """The first number that is given, if it is an open size, and the only one."""
    given = [*args, *kwargs.values()]
    sizes = [v for v in given if isinstance(v, torch.SymInt) and v.node.expr.free_symbols]
    whole = [value for value in given if type(value) is int or isinstance(value, torch.SymInt)]
    if len(sizes) != 1 or whole[0] is not sizes[0] or not sizes[0].node.has_hint():
        return None
    return sizes[0] if all(isinstance(value, _PLAIN) for value in given) else None


def _step(function: Callable[..., Any], args: Any, kwargs: Any) -> int | None:
    """The number of which a rounding gives multiples, 0 for any other, None for no rounding."""

    def at(number: int) -> Any:
        def put(value: Any) -> Any:
            return number if isinstance(value, torch.SymInt) else value

        found = function(*map(put, args), **{key: put(value) for key, value in kwargs.items()})
        if type(found) is not int:
            raise TypeError(function)
        return found

    size = _size(args, kwargs)
    assert size is not None
    try:
        with _disable_current_modes(), torch.no_grad():
            numbers = (int(size.node.hint), *_TRIED)
            at(numbers[0])
            values = {number: at(number) for number in sorted(numbers)}
            again = all(at(value) == value for value in set(values.values()))
    except Exception:  # whatever a function says of numbers that it isn't for
        return None
    grows = all(a <= b for a, b in itertools.pairwise(values.values()))
    if not (again and grows and all(value >= number for number, value in values.items())):
        return None
    step = values[1]
    return step if all(value == -(-n // step) * step for n, value in values.items()) else 0


def left_out_note(function: str) -> str:
    return (
        f"{function} rounds a size up, and the outputs were the same without it at every size that "
        "was tried: the graph leaves it out."
    )
