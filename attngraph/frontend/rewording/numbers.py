"""Sizes that Python makes plain numbers of: `int(h * w / c)`, `math.sqrt(n)`, `len(x)`.

A trace then takes the size for a constant, though the code means nothing by it: `int` of a size is
the size. Within the modules where that happened, these functions have a size remain one. What they
return is what the code would compute at any size, so conditions on it are kept as they always are.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import linecache
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.fx.experimental.sym_node import SymNode

from attngraph.frontend.rewording.comparisons import are_sizes
from attngraph.frontend.rewording.library_calls import calls_of_any_size, library_call
from attngraph.frontend.rewording.logarithms import Logarithm
from attngraph.frontend.rewording.number_classes import (
    SIZES,
    SYM_FLOAT,
    SYM_INT,
    SYM_SQRT,
    Float,
    Int,
    Namespace,
    classes_in,
)
from attngraph.frontend.rewording.python_loops import scanned_loops
from attngraph.frontend.rewording.rounded_for_speed import (
    Function,
    Rounded,
    number_functions,
    remembering,
    stood_in,
    written_out,
)
from attngraph.frontend.rewording.written_sizes import written_sizes
from attngraph.frontend.watching.asked import Place
from attngraph.frontend.watching.counting import recorded_loops
from attngraph.frontend.watching.quiet import passed_over

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[2])
_NUMPY = str(Path(np.__file__).parent)
_ASKING = (torch.__file__, f"{_TORCH}/fx/experimental/", _OURS)
_NUMPY_CALL = re.compile(r"\b(?:np|numpy)\.")
_LOOP = re.compile(r"\bfor\b.*\bin\b|\b(unbind|split|chunk|range)\(|\]\s*\*|\*\s*\[")
_ASKS = re.compile(r"^\s*while\b|\bfor\b.*\brange\(")


@dataclass
class Numbers:
    """Where sizes became numbers: modules of code, and functions by which libraries are entered.

    `replayed` names those of the functions whose operators a trace ran in their stead. `functions`
    take numbers alone; those that round may be `rounded` not at all, unless that is None.
    `loops` are functions in which Python counts to a size, and `cuts` the places at which an open
    axis is cut into a number of parts; at those in `whole` it isn't, and where they are `parted`
    loops go through the parts as through blocks. `blocks` are the sizes of those that loops take of
    an axis, the last of which may be shorter, and `steps` how many those have that are scans at a
    fixed size. Where slices may be cut `short`, these may be `opened`.
    Some were asked for `by_numpy`.
    """

    spaces: list[Namespace] = field(default_factory=list)
    entries: list[CodeType] = field(default_factory=list)
    replayed: dict[str, None] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)
    loops: list[CodeType] = field(default_factory=list)
    rounded: Rounded | None = None
    exact: Rounded = field(default_factory=dict)
    cuts: set[Place] = field(default_factory=set)
    whole: frozenset[Place] = frozenset()
    blocks: set[int] = field(default_factory=set)
    steps: frozenset[int] = frozenset()
    parted: bool = False
    short: bool = False
    by_numpy: bool = False
    opened: bool = False
    most: int = 0
    texts: bool = False

    def write(self) -> None:
        self.texts = True

    def __len__(self) -> int:
        return len(self.spaces) + len(self.entries) + len(self.functions) + len(self.loops)

    def copy(self) -> Numbers:
        """The same places; nothing that a trace has found of them."""
        rounded = None if self.rounded is None else Rounded()
        return replace(
            self,
            spaces=list(self.spaces),
            entries=list(self.entries),
            replayed={},
            functions=list(self.functions),
            loops=list(self.loops),
            rounded=rounded,
            exact={},
        )


@contextmanager
def recorded_numbers(found: Numbers) -> Iterator[None]:
    """Adds each place at which a size becomes a number, once."""

    def recording(take: Callable[..., Any]) -> Callable[..., Any]:
        def taken(node: Any, *args: Any) -> Any:
            if node.expr.free_symbols:
                _add(found, sys._getframe(1))
                found.by_numpy |= _is_of_numpy(sys._getframe(1))
            return take(node, *args)

        return taken

    ask = SymNode.guard_bool

    def asked(node: Any, *args: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_ASKING):
            frame = frame.f_back
        if frame is not None and not _is_library(frame):
            _add_functions(found, number_functions(frame))
            _add_loop(found, frame, _ASKS)
        if not all(symbol.is_integer for symbol in node.expr.free_symbols):
            _add(found, frame)  # a fraction, which `max` may take
        return ask(node, *args)

    with ExitStack() as stack:
        stack.enter_context(passed_over(__file__))
        for name in ("guard_int", "guard_float"):
            stack.enter_context(patch.object(SymNode, name, recording(getattr(SymNode, name))))
        stack.enter_context(patch.object(SymNode, "guard_bool", asked))
        yield


def add_raising(found: Numbers, trace: TracebackType | None) -> None:
    """The same of the code that raised an error of its own, as it may for a size that is no int."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    own = [frame for frame in frames if not _is_library(frame)]
    if own:
        _add_functions(found, remembering(own[-1]))
    if own and own[-1] is frames[-1]:
        _add(found, own[-1])


@contextmanager
def sizes_as_numbers(known: Numbers) -> Iterator[None]:
    """In code with these global names, int, float and len of a size, and math.sqrt, are sizes.

    So is the end of a range over the blocks of an axis, which has as many turns as the sample has.
    int and float of a tensor are numbers that it holds until a run, as its item() is.
    """
    if not known:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(
            scanned_loops(known.loops, known.blocks, known.steps, parted=known.parted)
        )
        stack.enter_context(stood_in(known.functions, written_out(known.rounded, known.exact)))
        stack.enter_context(calls_of_any_size(known.entries, known.replayed))
        stack.enter_context(classes_in(known.spaces))
        stack.enter_context(written_sizes(known.write))
        for names in known.spaces:
            own: Namespace = {"int": Int, "float": Float, "len": _length}
            own |= {"max": _extreme(max, torch.sym_max), "min": _extreme(min, torch.sym_min)}
            own["range"] = _Blocks
            own = {name: made for name, made in own.items() if name not in names}
            own |= {
                name: made
                for name, value in names.items()
                for plain, made in _STAND_INS
                if value is plain
            }
            stack.enter_context(patch.dict(names, own))
        for plain, made in _STAND_INS:
            holder = math if getattr(math, plain.__name__, None) is plain else np
            stack.enter_context(patch.object(holder, plain.__name__, made))
        yield


class _Blocks:
    """`range(0, n, 256)`: each turn asks whether n goes on, so a trace holds for as many blocks.

    Stands for Python's range, which it is for all other arguments.
    """

    def __new__(cls, *args: Any) -> Any:
        is_open = len(args) == 3 and isinstance(args[1], torch.SymInt)
        if not is_open or any(type(each) is not int for each in args[::2]) or args[2] < 2:
            return range(*args)
        return itertools.takewhile(lambda at: at < args[1], itertools.count(args[0], args[2]))


def _extreme(plain: Callable[..., Any], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    """`max` or `min`, which a size, or a number that a run alone knows, may be one of."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        is_open = not kwargs and are_sizes(args)
        return functools.reduce(of_numbers, args) if is_open else plain(*args, **kwargs)

    return computed


def _length(value: Any) -> Any:
    is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
    return value.shape[0] if is_tensor else builtins.len(value)


def _of_size(plain: Callable[..., float]) -> Callable[..., Any]:
    """A function of `math` or numpy: of a size it gives a number, or what stands for one.

    torch keeps no other function of a size than the square root.
    """

    def computed(value: Any, *args: Any) -> Any:
        is_of_base = plain.__name__ == "log" and len(args) == 1
        if is_of_base and any(map(_is_size, (value, *args))):
            return computed(value) / computed(*args)
        if args or not isinstance(value, SIZES):
            return plain(value, *args)
        if plain.__name__ in ("sqrt", "isqrt"):
            root = SYM_SQRT(SYM_FLOAT(value))
            return SYM_INT(root) if plain.__name__ == "isqrt" else root
        applied: Callable[[torch.Tensor], torch.Tensor] = getattr(torch, plain.__name__)
        size: Any = value
        number = applied(torch.full((), size, dtype=torch.float64))
        return Logarithm(number, size, plain) if isinstance(value, torch.SymInt) else number

    return computed


def _rounding(plain: Callable[..., Any]) -> Callable[..., Any]:
    def computed(value: Any, *args: Any, **kwargs: Any) -> Any:
        is_of_size = isinstance(value, Logarithm)
        return value.rounded(plain) if is_of_size else plain(value, *args, **kwargs)

    return computed


_POW = math.pow  # which `_power` stands in for


def _is_size(value: object) -> bool:
    return isinstance(value, SIZES)


def _power(base: Any, exponent: Any) -> Any:
    is_open = _is_size(base) or _is_size(exponent)
    return SYM_FLOAT(base) ** exponent if is_open else _POW(base, exponent)


def _product(value: Any, *args: Any, _plain: Callable[..., Any] = np.prod, **kwargs: Any) -> Any:
    is_shape = isinstance(value, (tuple, list)) and any(isinstance(item, SIZES) for item in value)
    return (
        math.prod(value) if is_shape and not args and not kwargs else _plain(value, *args, **kwargs)
    )


_STAND_INS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (np.prod, _product),
    (math.pow, _power),
    *((plain, _of_size(plain)) for plain in (math.sqrt, math.isqrt, np.sqrt)),
    *((plain, _of_size(plain)) for plain in (math.log, math.log2, math.log10)),
    *((plain, _of_size(plain)) for plain in (np.log, np.log2, np.log10)),
    *((plain, _rounding(plain)) for plain in (np.ceil, np.floor)),
]


def _add_functions(found: Numbers, functions: Iterable[Function]) -> None:
    found.functions += [each for each in functions if each not in found.functions]


def _add(found: Numbers, frame: FrameType | None) -> None:
    _add_functions(found, number_functions(frame))
    _add_loop(found, frame, _LOOP)
    if entry := library_call(frame):
        if entry not in found.entries:
            found.entries.append(entry)
        return
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    if frame is not None and not any(names is frame.f_globals for names in found.spaces):
        found.spaces.append(frame.f_globals)


def _add_loop(found: Numbers, frame: FrameType | None, written: re.Pattern[str]) -> None:
    """Adds the function whose line is such a loop, or begins one."""
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    if frame is None or not written.search(
        linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    ):
        return
    whole = frame.f_back if frame.f_code.co_name == "<listcomp>" and frame.f_back else frame
    found.loops += [whole.f_code] if whole.f_code not in found.loops else []


def _is_of_numpy(frame: FrameType | None) -> bool:
    """Whether the first line that isn't torch's or ours, or the one it calls, is numpy's."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS, "<")):
        frame = frame.f_back
    if frame is None:
        return False
    file = frame.f_code.co_filename
    line = linecache.getline(file, frame.f_lineno)
    return file.startswith(_NUMPY) or _NUMPY_CALL.search(line) is not None


def loops_of(run: Callable[[], object]) -> list[CodeType]:
    """The functions that a run calls in which Python goes through a loop, but no library's."""
    found: dict[CodeType, None] = {}
    with recorded_loops(found, _is_library):
        run()
    return list(found)


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((_TORCH, _OURS, _NUMPY, "<"))
