"""Constant tables of powers: which entries λ^n were rounded to, and the λ that explains them all.

A model that keeps λ^(i − j) under a triangle, or the λ^i of a chunk, as float32 numbers has them
2⁻²⁴ off, and a region that reads them is no recurrence to 1e-8. What it was before the rounding is:
so the entries are put back, each within what its dtype rounds by, and the region is compared with
the exact ones. A table is taken only where every entry is explained, the least as well as the
largest:

- exponents are whole, and go up or down along each axis by as many from place to place;
- an entry is e^(g n) up to its own rounding, and to that of g n, which was rounded before;
- zeros are those ahead of a diagonal, or are below what the dtype has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from attngraph.ir import Value

_MOST = 1 << 24  # elements of a table that is looked at
_CLEAR = 0.25  # of an exponent: so far off it is still the whole number next to it


@dataclass(frozen=True)
class Table:
    """Numbers whose entries are e^(g n) of each head's g, but for those ahead of a diagonal.

    `entries` and `ahead` are (H or 1, …), `exponents` (…); `axis` is where the heads lie in the
    constant. `eps` and `tiny` are those of its dtype.
    """

    entries: torch.Tensor
    exponents: torch.Tensor
    ahead: torch.Tensor
    axis: int | None
    eps: float
    tiny: float

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest and the highest g (H or 1) that explain a head's entries, the first above the
        second where none does."""
        n = self.exponents.double()
        is_known = self.entries >= self.tiny
        logs = self.entries.clamp(min=self.tiny).log()
        off = self.eps * (1 + logs.abs())
        one = torch.where(n == 0, 1.0, n)
        first, second = (logs - off) / one, (logs + off) / one
        counts = is_known & (n != 0)
        low = torch.where(counts, torch.minimum(first, second), -torch.inf)
        high = torch.where(counts, torch.maximum(first, second), torch.inf)
        low = torch.where(is_known & (n == 0) & (logs.abs() > off), torch.inf, low)
        heads = len(self.entries)
        return low.reshape(heads, -1).amax(1), high.reshape(heads, -1).amin(1)

    def one(self) -> torch.Tensor | None:
        """The g (H or 1) of a power that is the same everywhere."""
        n = int(self.exponents.flatten()[0])
        is_one = n != 0 and bool((self.exponents == n).all())
        return self.entries.reshape(len(self.entries), -1)[:, 0].log() / n if is_one else None

    def exact(self, g: torch.Tensor) -> torch.Tensor | None:
        """The constant as it was before it was rounded; None where an entry isn't explained."""
        g = g[: len(self.entries)]
        logs = g.reshape(-1, *[1] * self.exponents.ndim) * self.exponents
        made = torch.where(self.ahead, 0.0, logs.exp())
        off = 1.01 * self.eps * (1 + logs.abs()) * made
        near = (self.entries - made).abs() <= torch.where(made < 2 * self.tiny, self.tiny, off)
        if not bool((near | self.ahead).all()):
            return None
        return made[0] if self.axis is None else made.movedim(0, self.axis)


def exact_tables(
    constants: Sequence[Value], others: Sequence[Value], g: torch.Tensor
) -> tuple[torch.Tensor, dict[Value, torch.Tensor]] | None:
    """The g (H) that explains the tables among the constants, and these as they were before they
    were rounded; None where nothing explains them all.

    `g` is known as nearly as a table's dtype says. It is one of the numbers of `others` where it
    can be, and else the middle of what the tables leave.
    """
    tables = _read(constants, g)
    if any(_is_of_weights(value) for value in constants if value not in tables):
        return None  # a table of something else, of which some entries may be too small to show
    if not tables:
        return g, {}
    eps = max(table.eps for table in tables.values())
    low, high = (g + by * 16 * eps * (1 + g.abs()) for by in (-1, 1))
    for table in tables.values():
        least, most = table.range()
        low, high = torch.maximum(low, least), torch.minimum(high, most)
    if not bool((low <= high).all()):
        return None
    others = [*(value for value in constants if value not in tables), *others]
    found = torch.where((low <= 0) & (high >= 0), 0.0, (low + high) / 2)
    for each in _candidates(others, tables.values(), len(g)):
        if bool(((low <= each) & (each <= high)).all()):
            found = each.expand_as(g)
            break
    exact = {value: table.exact(found) for value, table in tables.items()}
    made = {value: x for value, x in exact.items() if x is not None}
    return (found, made) if len(made) == len(tables) else None


def _read(constants: Iterable[Value], g: torch.Tensor) -> dict[Value, Table]:
    """Those constants that look like tables of powers of e^g."""
    found: dict[Value, Table] = {}
    for value in constants:
        data = value.data
        if data is None or data.is_meta or not data.dtype.is_floating_point:
            continue
        if data.dtype != torch.float64 and 1 < data.numel() <= _MOST:
            table = next(_tables_of(data.detach(), g), None)
            if table is not None:
                found[value] = table
    return found


def _is_of_weights(value: Value) -> bool:
    """Whether a constant has an axis beside another one and numbers between 0 and 1."""
    data = value.data
    if data is None or data.is_meta or not data.dtype.is_floating_point:
        return False
    if sum(size > 1 for size in data.shape) < 2 or data.numel() > _MOST:
        return False
    is_between = bool(((data >= 0) & (data <= 1)).all())
    return is_between and not bool(((data == 0) | (data == data.max())).all())


def _candidates(
    constants: Iterable[Value], tables: Iterable[Table], heads: int
) -> Iterator[torch.Tensor]:
    """What the model itself may have for g: slopes, decays, and decays of a whole block."""
    for value in constants:
        data = value.data
        if data is not None and not data.is_meta and data.numel() in (1, heads):
            x = data.detach().double().flatten()
            yield from (-x, x, x.log())
    yield from (one for table in tables if (one := table.one()) is not None)


def _tables_of(data: torch.Tensor, g: torch.Tensor) -> Iterator[Table]:
    """The ways to read numbers as a table, by where its heads lie."""
    wide = data.double()
    if not bool(wide.isfinite().all()) or bool((wide < 0).any()) or not bool((wide > 0).any()):
        return
    info = torch.finfo(data.dtype)
    heads = [at for at, size in enumerate(data.shape) if size == len(g) > 1]
    is_common = bool((g - g[0]).abs().max() <= 8 * info.eps)
    for axis in (*heads, *([None] if is_common else [])):
        entries = wide[None] if axis is None else wide.movedim(axis, 0)
        exponents = _exponents(entries, g, info)
        if exponents is None or not bool(exponents.any()):  # ones, or a mask of them
            continue
        behind = torch.where(entries > 0, exponents, exponents.max() + 1)
        ahead = (exponents < behind.min()).expand_as(entries)
        table = Table(entries, exponents, ahead, axis, info.eps, info.tiny)
        low, high = table.range()
        if bool((low <= high).all()):
            yield table


def _exponents(entries: torch.Tensor, g: torch.Tensor, info: torch.finfo) -> torch.Tensor | None:
    """n at each place (…) of entries (H or 1, …): read off the head of the fastest decay, near its
    largest entries, and along each axis from there."""
    lead = int(g[: len(entries)].abs().argmax())
    fast = float(g[lead])
    if fast == 0:
        return None
    x = entries[lead]
    logs = torch.where(x >= info.tiny, x.clamp(min=info.tiny).log(), torch.nan)
    first = _whole(logs.nan_to_num(torch.inf).abs().flatten(), logs.flatten() / fast)
    if first is None:
        return None
    place, n = first
    exponents = torch.full(x.shape, n, dtype=torch.int64)
    rest = place
    for axis in reversed(range(x.ndim)):
        size = x.shape[axis]
        at, rest = rest % size, rest // size
        if size == 1:
            continue
        before, after = logs.narrow(axis, 0, size - 1), logs.narrow(axis, 1, size - 1)
        nearest = torch.maximum(before.abs(), after.abs()).nan_to_num(torch.inf).flatten()
        step = _whole(nearest, ((after - before) / fast).flatten())
        if step is None:
            return None
        away = (torch.arange(size) - at) * step[1]
        exponents = exponents + away.reshape(-1, *[1] * (x.ndim - 1 - axis))
    return exponents


def _whole(weights: torch.Tensor, numbers: torch.Tensor) -> tuple[int, int] | None:
    """Where the weight is least, and the whole number there; None where it isn't one."""
    if not weights.numel():
        return None
    at = int(weights.argmin())
    number = float(numbers[at])
    if not abs(number - round(number) if number == number else torch.inf) <= _CLEAR:
        return None
    return at, round(number)
