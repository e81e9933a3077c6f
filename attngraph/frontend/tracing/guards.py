"""Guards that torch.export reports as violated: some always hold, others only exclude the largest
size or the smallest ones.

torch 2.11 can't simplify min(16·s, 32·s) = 16·s, and calls a dim that it holds for too narrow.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from attngraph.errors import IRError
from attngraph.frontend.files.expression_cost import cost
from attngraph.ir.conditions import always, left_out_alone, parse_condition
from attngraph.ir.dims import DimInfo
from attngraph.ir.pieces import holds_in_pieces

_GUARD = re.compile(
    r"Not all values of (\w+) = .*? in the specified range(?: (.*?))? satisfy the generated guard "
    r"(.*?)\.\s*$",
    re.MULTILINE,
)
_ENDS = re.compile(
    r"^.*Not all values of .* satisfy the generated guard \d+ <= (L\S+) and \1 <= \d+", re.MULTILINE
)
_SIZE = re.compile(r"L(?:\['\w+'\]|\[\d+\])+\.size\(\)\[\d+\]")
_SAFE = re.compile(r"(?:\bn\d+\b|\bmin\b|\bmax\b|\d+|[-+*/()<>=, ])*")
# min, max and multiples of one size, compared: true for one size of it if and only if for all.
_MULTIPLES = re.compile(r"(?:min|max|(?:\d+\*)?\bn0\b|[(), ]|[<>!=]=|[<>])*")
_LOW = re.compile(r"(\d+) <= ")
_HIGH = re.compile(r"<= (\d+)\s*$")
_TRIED = (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 64, 127, 128, 1000, 4095, 65536)


def always_hold(message: str, within: Mapping[str, str] = MappingProxyType({})) -> bool:
    """Whether every guard that the message calls violated holds for all sizes that are tried.

    `within` has ranges of dims, `65 <= seq <= 512`, which stand for the message's: what it says of
    ends holds in these. False where a guard can't be read. One between the sizes that are tried
    would be missed, so this is only for min, max and sums: it is False for remainders, quotients
    and `!=`, which may fail at one size alone, but for `!=` between multiples of one size.
    """
    if within:
        message = _ENDS.sub("", message)
    if "Constraints violated" not in message:
        return False
    guards = _guards(message)
    return bool(guards) and all(
        _holds(guard, within.get(name, range_)) for name, range_, guard in guards
    )


def _guards(message: str) -> list[tuple[str, str, str]]:
    """(dim, range, guard) of each violation that a message tells; none where one can't be read."""
    guards = _GUARD.findall(message)
    return guards if len(guards) == message.count("Not all values of") else []


def excluded_largest(message: str) -> list[str]:
    """torch's form of a suggestion per dim, if all that a trace asks is not to be the largest."""
    found = []
    for name, range_, guard in _guards(message):
        _, high = _ends(range_)
        if high is None or _sole_exception(guard) != high:
            return []
        found.append(f"{name} = Dim('{name}', max={high - 1})")
    return found


def excluded_small(message: str, samples: Mapping[str, int]) -> list[str]:
    """torch's form of a suggestion per dim, if all that a trace asks is to be no small size.

    A convolution with a stride leaves 1 of some sizes, which a trace takes for none of its own:
    `samples // 10 - 1 != 1` holds from 30 on. `samples` are the dims' sizes, which stay.
    """
    ends: dict[str, tuple[int, str]] = {}
    for name, range_, guard in _guards(message):
        low = _holds_from(guard, range_, samples.get(name, 0))
        if low is None:
            return []
        _, high = _ends(range_)
        most = "" if high is None else f", max={high}"
        ends[name] = max((low, most), ends.get(name, (0, "")))
    return [f"{name} = Dim('{name}', min={low}{most})" for name, (low, most) in ends.items()]


def _holds_from(guard: str, range_: str, sample: int) -> int | None:
    """The least size from which a guard on one size is proved, if the sample is no smaller.

    None where a guard leaves out one size amid others, as that of `if len(table) != 2 * n - 1`.
    """
    sizes = set(_SIZE.findall(guard))
    if len(sizes) != 1:
        return None
    least, most = _ends(range_)
    if (_sole_exception(guard) or 0) > max(least or 0, 2):
        return None
    try:
        condition = parse_condition(guard.replace(sizes.pop(), "n0"))
    except IRError:
        return None

    def holds(low: int) -> bool:
        is_known = always(condition, {"n0": DimInfo(low, most)}) is True
        return is_known or holds_in_pieces(condition, low, most)

    below, low = max(least or 0, 2) - 1, sample
    if below >= sample or not holds(sample):
        return None
    while low - below > 1:
        middle = (below + low) // 2
        below, low = (below, middle) if holds(middle) else (middle, low)
    return low


def _sole_exception(guard: str) -> int | None:
    """The one size that a guard such as `(20 + 4*L['x'].size()[1]) != 64` excludes."""
    sizes = set(_SIZE.findall(guard))
    if len(sizes) != 1:
        return None
    try:
        condition = parse_condition(guard.replace(sizes.pop(), "n0"))
    except IRError:
        return None
    return left_out_alone(condition)


def _holds(guard: str, range_: str) -> bool:
    sizes = list(dict.fromkeys(_SIZE.findall(guard)))
    for at, size in enumerate(sizes):
        guard = guard.replace(size, f"n{at}")
    if _is_proved(guard, [f"n{at}" for at in range(len(sizes))], range_):
        return True
    safe = _SAFE.fullmatch(guard) or _MULTIPLES.fullmatch(guard)
    if not sizes or len(sizes) > 3 or "//" in guard or not safe:
        return False
    try:
        tree = ast.parse(guard, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    if cost(tree) is None:
        return False
    code = compile(tree, "<guard>", "eval")
    names = {"__builtins__": {}, "min": min, "max": max}
    for values in itertools.product(_sizes(range_), repeat=len(sizes)):
        known = {f"n{at}": value for at, value in enumerate(values)}
        if not eval(code, names, known):
            return False
    return True


def _is_proved(guard: str, sizes: Sequence[str], range_: str) -> bool:
    """Whether it follows for all sizes, as min(n, 4·((n + 3) // 4)) = n does.

    The range is of the one size that there is; of several any may be 1.
    """
    low, high = _ends(range_) if len(sizes) == 1 else (None, None)
    info = DimInfo(1 if low is None else low, high)
    try:
        return always(parse_condition(guard), dict.fromkeys(sizes, info)) is True
    except IRError:
        return False


def _sizes(range_: str) -> Iterator[int]:
    """Sizes within `2 <= seq <= 512`; torch itself never takes 0 and 1 for a dynamic size."""
    low, high = _ends(range_)
    least, most = 2 if low is None else low, max(_TRIED) if high is None else high
    yield from sorted({size for size in (*_TRIED, least, most) if least <= size <= most})


def _ends(range_: str) -> tuple[int | None, int | None]:
    """The least and the largest size that the text of a range names."""
    low, high = _LOW.search(range_), _HIGH.search(range_)
    return int(low[1]) if low else None, int(high[1]) if high else None
