"""Libraries that compute with sizes as numbers, as einx does to make code of a pattern.

A trace takes each size that such a library reads for a constant, though what the library makes of
`"b n, b n d"` holds at any size. So a call is recorded, as the operators that it runs, at the
sample's sizes, at small ones, and at large primes twice. If they are the same operators each time,
and each number among their arguments is the same affine function of a product or sum of sizes (the
primes decide which, the others confirm it), the trace runs these operators on its sizes instead of
the call. Otherwise the call is made as it is, and its sizes become constants.

Only functions of another package than the model's own code are taken so.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from types import CodeType, FrameType
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from attngraph.frontend.rewording.rounded_for_speed import stood_in
from attngraph.frontend.watching.locations import is_plumbing

_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)
_SMALL = (3, 5, 7, 11)
_MULTIPLES = (1, 8, 240)
"""Sizes are primes, or where those aren't taken, primes times a number of many divisors."""
_MANY = 1000
"""Operators of one call; what runs more is no pattern."""
_DEGREE = 4
"""Of products of sizes: the elements of a tensor of as many axes of different sizes."""

_require: Callable[[Any], None] = getattr(torch, "_check")  # noqa: B009
Pair = tuple[torch.SymInt, torch.SymInt]


def library_call(frame: FrameType | None) -> CodeType | None:
    """The code of the function by which a module of the model entered the library of this frame.

    None if the frame is of the module's own package.
    """
    package = entered = None
    while frame is not None:
        if not is_plumbing(frame.f_code.co_filename):
            name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            package = package or name
            if isinstance(frame.f_locals.get("self"), torch.nn.Module):
                return None if name == package else entered
            if name == package:
                entered = frame.f_code
        frame = frame.f_back
    return None


@contextmanager
def calls_of_any_size(codes: Iterable[CodeType], replayed: dict[str, None]) -> Iterator[None]:
    """Functions with this code, wherever a module names them, keep sizes as sizes.

    Adds the names of those that did to `replayed`.
    """
    with stood_in(codes, lambda function: _of_any_size(function, replayed)):
        yield


def _of_any_size(function: Callable[..., Any], replayed: dict[str, None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        runs = _runs(function, given) if _sizes(given) else None
        if runs is None and (tied := _ties(function, given)):
            for first, second in tied:
                _require(first == second)
            runs = _runs(function, given)
        program = None if runs is None else _program(runs)
        if program is None:
            return function(*args, **kwargs)
        replayed[f"{function.__module__}.{function.__qualname__}"] = None
        return _replayed(program, given)

    return called


def _ties(function: Callable[..., Any], given: Any) -> list[Pair]:
    """Sizes that the library needs to be equal; none where it fails even so.

    Of two axes that are of one size in the sample the trace may not know yet that they belong
    together, which a library that checks its arguments takes for an error.
    """
    first: dict[int, torch.SymInt] = {}
    pairs = []
    for size in _sizes(given):
        known = first.setdefault(size.node.hint, size)
        if known is not size:
            pairs.append((known, size))
    needed = list(pairs)
    if not pairs or _runs(function, given, needed) is None:
        return []
    for pair in pairs:
        fewer = [other for other in needed if other is not pair]
        if _runs(function, given, fewer) is not None:
            needed = fewer
    return needed


class _Differs(Exception):
    """The runs are not of one program."""


@dataclass(frozen=True)
class _Ref:
    """The tensor of this number: the inputs', then the operators' in their order."""

    index: int


@dataclass(frozen=True)
class _Number:
    """⌊(factor · t + rest) / divisor⌋, where t is the product or sum of these sizes."""

    sizes: tuple[int, ...]
    is_sum: bool
    factor: int
    rest: int
    divisor: int

    def of(self, sizes: Sequence[Any]) -> Any:
        chosen = [sizes[index] for index in self.sizes]
        term = functools.reduce(operator.add if self.is_sum else operator.mul, chosen)
        scaled = self.factor * term + self.rest
        return scaled if self.divisor == 1 else scaled // self.divisor


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    arguments: Any
    outputs: int


@dataclass(frozen=True)
class _Run:
    """One call: the sizes of its inputs, the operators that ran, and what it returned."""

    sizes: tuple[int, ...]
    calls: tuple[_Call, ...]
    result: Any


def _runs(function: Callable[..., Any], given: Any, tied: Sequence[Pair] = ()) -> list[_Run] | None:
    """The call at the sample's sizes, at small ones and at large ones twice; None if any fails."""
    sizes = _sizes(given)
    same = {second.node.expr: first.node.expr for first, second in tied}
    symbols = sorted({symbol for size in sizes for symbol in _symbols(size)}, key=str)
    free = [symbol for symbol in symbols if symbol not in same]
    if 2 * len(free) > len(_PRIMES):
        return None
    known = sizes[0].node.shape_env.backed_var_to_val
    for multiple in _MULTIPLES:
        draws = [{symbol: int(known[symbol]) for symbol in symbols}]
        for primes in (_SMALL, _PRIMES, _PRIMES[len(free) :]):
            drawn = {symbol: multiple * prime for symbol, prime in zip(free, primes, strict=False)}
            draws.append({symbol: drawn[same.get(symbol, symbol)] for symbol in symbols})
        try:
            first = _run(function, given, draws[0], _MANY)
            return [first, *(_run(function, given, draw, len(first.calls)) for draw in draws[1:])]
        except _Differs:
            return None
        except Exception:  # whatever a library says of sizes that it doesn't take
            continue
    return None


def _run(
    function: Callable[..., Any], given: Any, draw: Mapping[sympy.Symbol, int], most: int
) -> _Run:
    """The call on tensors without data. Raises ValueError for what can't be replayed.

    Raises _Differs for more than `most` operators: a loop over a size is not run a thousand times.
    """

    def number(size: Any) -> int:
        value = size.node.expr.subs(draw) if isinstance(size, torch.SymInt) else size
        if int(value) != value or value < 1:
            raise ValueError(size)
        return int(value)

    def drawn(leaf: Any) -> Any:
        if isinstance(leaf, torch.SymInt):
            return number(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = [number(size) for size in leaf.shape]
        return torch.empty(shape, dtype=leaf.dtype, device=leaf.device)

    sizes = tuple(number(size) for size in _sizes(given))
    with _disable_current_modes(), FakeTensorMode(), torch.no_grad():
        args, kwargs = _map(drawn, given)
        with _Recorder(_tensors((args, kwargs)), most) as recorder:
            result = function(*args, **kwargs)
        return _Run(sizes, tuple(recorder.calls), recorder.numbered(result))


class _Recorder(TorchFunctionMode):
    """What is called on tensors, and with what; each tensor by its number."""

    def __init__(self, tensors: Iterable[torch.Tensor], most: int) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._most = most
        self._known = list(tensors)

    def numbered(self, value: Any) -> Any:
        """`value` with a number for each tensor. Raises ValueError for a tensor from elsewhere."""
        return _map(self._number, value)

    def _number(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        for index, known in enumerate(self._known):
            if known is leaf:
                return _Ref(index)
        raise ValueError("a tensor that no recorded operator made")

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = (tuple(args), kwargs or {})
        arguments = self.numbered(given)
        with torch._C.DisableTorchFunction():
            result = func(*given[0], **given[1])
        made = _tensors(result)
        if made:
            if len(self.calls) == self._most:
                raise _Differs
            self.calls.append(_Call(func, arguments, len(made)))
            self._known += made
        return result


def _program(runs: Sequence[_Run]) -> _Run | None:
    """The calls of all runs, with a `_Number` where these differ; None if more than numbers do.

    The result is in the form of a run too.
    """
    terms = list(_terms(runs))

    def merged(*values: Any) -> Any:
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            raise _Differs
        if isinstance(first, (tuple, list)):
            if len({len(value) for value in values}) > 1:
                raise _Differs
            each = [merged(*items) for items in zip(*values, strict=True)]
            return each if isinstance(first, list) else tuple(each)
        if isinstance(first, dict):
            if any(value.keys() != first.keys() for value in values):
                raise _Differs
            return {key: merged(*(value[key] for value in values)) for key in first}
        if isinstance(first, slice):
            return slice(*merged(*((value.start, value.stop, value.step) for value in values)))
        if all(value == first for value in values):
            return first
        if not isinstance(first, int) or isinstance(first, bool):
            raise _Differs
        return _read(values, terms)

    try:
        calls = merged(*([(c.function, c.arguments, c.outputs) for c in run.calls] for run in runs))
        result = merged(*(run.result for run in runs))
    except _Differs:
        return None
    return _Run((), tuple(_Call(*call) for call in calls), result)


def _terms(runs: Sequence[_Run]) -> Iterator[tuple[tuple[int, ...], bool, list[int]]]:
    """Products of sizes, and sums of two, by their indices, with their value in each run."""
    count = len(runs[0].sizes)
    for degree in range(1, _DEGREE + 1):
        for chosen in itertools.combinations_with_replacement(range(count), degree):
            values = [[run.sizes[index] for index in chosen] for run in runs]
            yield chosen, False, [math.prod(each) for each in values]
            if degree == 2:
                yield chosen, True, [sum(each) for each in values]


def _read(values: Sequence[int], terms: Iterable[tuple[tuple[int, ...], bool, list[int]]]) -> Any:
    """The numbers of the runs as one affine function of one term."""
    for chosen, is_sum, of_term in terms:
        if of_term[-1] == of_term[-2]:
            continue
        slope = Fraction(values[-1] - values[-2], of_term[-1] - of_term[-2])
        rest = values[-1] - slope * of_term[-1]
        if all(slope * term + rest == value for term, value in zip(of_term, values, strict=True)):
            divisor = math.lcm(slope.denominator, rest.denominator)
            return _Number(chosen, is_sum, int(slope * divisor), int(rest * divisor), divisor)
    raise _Differs


def _replayed(program: _Run, given: Any) -> Any:
    """The program run on the trace's own tensors and sizes."""
    tensors, sizes = _tensors(given), _sizes(given)

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, _Number):
            return leaf.of(sizes)
        return tensors[leaf.index] if isinstance(leaf, _Ref) else leaf

    for call in program.calls:
        args, kwargs = _map(filled, call.arguments)
        tensors += _tensors(call.function(*args, **kwargs))
    return _map(filled, program.result)


def _sizes(value: Any) -> list[torch.SymInt]:
    """The different open sizes in the shapes of tensors, and among numbers."""
    found: dict[sympy.Basic, torch.SymInt] = {}
    for leaf in _leaves(value):
        for size in leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,):
            if isinstance(size, torch.SymInt) and size.node.has_hint() and _symbols(size):
                found.setdefault(size.node.expr, size)
    return list(found.values())


def _symbols(size: torch.SymInt) -> set[sympy.Symbol]:
    return set(size.node.expr.free_symbols)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    _map(found.append, value)
    return found


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with each leaf of its lists, tuples, dicts and slices changed."""
    if isinstance(value, (tuple, list)):
        changed = [_map(change, each) for each in value]
        return changed if isinstance(value, list) else tuple(changed)
    if isinstance(value, dict):
        return {key: _map(change, each) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(*(_map(change, end) for end in (value.start, value.stop, value.step)))
    return change(value)
