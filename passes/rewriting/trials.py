"""Regions of a graph, and the sizes and inputs on which they are tried.

A region is what lies between some roots and some leaves. Its leaves are drawn at random from a seed
made of their name, so that a run says the same thing twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from attngraph.analysis.values.intervals import Intervals
from attngraph.ir import Dim, DimInfo, ScalarType, Value
from attngraph.ir.dims import substitute

ATTENTION = ("plain", "large", "holes", "masked", "open")
"""Padding with holes, rows that may attend to nothing, -inf and finfo.min among the biases."""
ARITHMETIC = ("plain", "large", "huge", "tiny", "equal", "zero")
"""Magnitudes from 1e-3 to 1e4 of either sign, rows of one number (variance 0), and zeros."""
LOGITS = ("plain", "large", "tiny", "equal", "zero")
"""As `ARITHMETIC`, within the range of the exponential."""
LINEAR = ("plain", "zero")
"""Points in general position and zero, which determine a map that is affine in its inputs."""
LAYOUT = ("plain",)
"""No two elements alike: where each one goes is all there is to see."""

AIMED = ("aimed", "all", "rows", "but one")
"""Numbers that decide conditions: anywhere, everywhere, in whole rows, or all but once a row."""


_RAISED = 8.0


def turns(options: int, count: int) -> list[str]:
    """Kinds of trial in which the last axis of floats has `count` large elements at most, beside
    each other, so that a choice of as many takes them. In all of these together each of `options`
    is taken in each row.
    """
    number = -(-options // count)
    return [f"turn {place}/{number}" for place in range(number)]


@dataclass(frozen=True, slots=True)
class Aims:
    """Numbers that decide conditions, and the leaves that those depend on."""

    numbers: tuple[float, ...] = ()
    leaves: frozenset[Value] = frozenset()


_CHANCE = {"holes": 0.3, "masked": 0.0, "hidden": 0.0, "open": 1.0, "zero": 0.0, "huge": 1.0}
_SCALE = {"large": 8.0, "huge": 1e4, "tiny": 1e-3, "zero": 0.0}
_KEPT = 8  # positions of an axis of a sparse sample


def trial_sizes(
    dims: Mapping[str, DimInfo], steps: Mapping[str, int] | None = None
) -> list[dict[str, int]]:
    """Growing, falling and least sizes: no two dims equal but in the last.

    `steps` are what sizes are multiples of.
    """
    count = len(dims)

    def fitted(name: str, size: int) -> int:
        step = (steps or {}).get(name, 1)
        size = -(-max(size, dims[name].low) // step) * step
        high = dims[name].high
        return size if high is None else min(size, high // step * step)

    trials = [
        {name: fitted(name, 2 + 3 * place) for place, name in enumerate(dims)},
        {name: fitted(name, 3 * (count - place)) for place, name in enumerate(dims)},
        {name: fitted(name, 0) for name in dims},
    ]
    return trials if dims else [{}]


def sample_sizes(dims: Mapping[str, DimInfo]) -> list[dict[str, int]]:
    """The sizes of the sample, and twice those, as far as the ranges allow."""
    trials = []
    for factor in (1, 2):
        sizes = {}
        for name, info in dims.items():
            size = factor * (info.hint or info.low)
            sizes[name] = size if info.high is None else min(size, info.high)
        trials.append(sizes)
    return trials


def parts_of_the_sample(dims: Mapping[str, DimInfo]) -> Iterator[dict[str, int]]:
    """Halves of the sample's sizes, quarters and so on, as far as the ranges allow."""
    largest = max((info.hint or info.low for info in dims.values()), default=1)
    for shift in range(1, largest.bit_length()):
        yield {name: max((info.hint or 0) >> shift, info.low) for name, info in dims.items()}


def general_sizes(
    dims: Mapping[str, DimInfo],
    unknowns: Mapping[str, DimInfo],
    steps: Mapping[str, int] | None = None,
) -> list[dict[str, int]]:
    """The trial sizes of the graph's dims, beside small and distinct ones of what may have any."""
    count = len(unknowns)

    def spread(order: Iterable[int]) -> dict[str, int]:
        sizes = {}
        for (name, info), place in zip(unknowns.items(), order, strict=True):
            size = info.low + place
            sizes[name] = size if info.high is None else min(size, info.high)
        return sizes

    own = trial_sizes(dims, steps)
    spreads = [spread(range(count)), spread(range(count - 1, -1, -1))]
    number = max(len(own), len(spreads))
    return [{**own[i % len(own)], **spreads[i % len(spreads)]} for i in range(number)]


def shown(sizes: Mapping[str, int]) -> str:
    """The sizes of a trial, for a message."""
    return ", ".join(f"{name} = {size}" for name, size in sizes.items()) or "its size"


def seed_of(value: Value, kind: str) -> torch.Generator:
    """A generator that depends on the value's name and the kind of trial only."""
    return torch.Generator().manual_seed(zlib.crc32(f"{value.name}{kind}".encode()))


def discrete(value: Value, shape: list[int], seed: torch.Generator, chance: float) -> torch.Tensor:
    """Bools that are true with a chance, or integers that are 1 or 2 with it and else 0."""
    there = drawn_rows(shape, seed, chance)
    if value.dtype == torch.bool:
        return there
    return (there * torch.randint(1, 3, shape, generator=seed)).to(value.dtype)


def drawn_rows(shape: Sequence[int], seed: torch.Generator, chance: float) -> torch.Tensor:
    """Bools that are true with a chance, but in some rows all, none or all but one of them.

    Which rows those are is drawn as well. A chance of 0 or 1 is kept everywhere.
    """
    there = torch.rand(list(shape), generator=seed) < chance
    if not shape or not 0 < chance < 1 or not there.numel():
        return there
    rows = there.reshape(-1, shape[-1])
    order = torch.randperm(max(len(rows), 4), generator=seed)
    for row, form in zip(order.tolist(), ("none", "all", "one"), strict=False):
        if row < len(rows):
            rows[row] = form == "all"
            if form == "one":
                rows[row, int(torch.randint(shape[-1], (), generator=seed))] = True
    return there


def aimed(
    value: Value,
    shape: list[int],
    seed: torch.Generator,
    kind: str,
    aim: float,
    aims: Sequence[float],
) -> torch.Tensor:
    """A leaf in an aimed trial: integers on and beside the numbers that decide, floats too."""
    if value.dtype == torch.bool:
        return drawn_rows(shape, seed, 0.5)
    integral = not value.dtype.is_floating_point
    beside = [number + step for number in aims for step in (0, -1, 1)]
    choice = torch.tensor([*beside, 0.0, 1.0, 2.0], dtype=torch.float64)
    drawn = choice[torch.randint(len(choice), shape, generator=seed)]
    if not integral:
        plain = torch.randn(shape, generator=seed, dtype=torch.float64)
        near = plain + torch.where(torch.rand(shape, generator=seed) < 0.5, drawn, 0)
        drawn = torch.where(drawn_rows(shape, seed, 0.6), near, 0)
    if kind == "all":
        drawn = torch.full(shape, aim, dtype=torch.float64)
    elif kind in ("rows", "but one") and shape and drawn.numel():
        rows = drawn.reshape(-1, shape[-1])
        if kind == "rows":
            rows[: (len(rows) + 1) // 2] = aim
        else:
            kept = torch.randint(shape[-1], (len(rows), 1), generator=seed)
            others = torch.ones_like(rows, dtype=torch.bool).scatter_(1, kept, False)
            rows.masked_fill_(others, aim)
    if value.dtype == torch.uint8:
        drawn = drawn.clamp(min=0)
    return drawn.round().to(value.dtype) if integral else drawn


_NEAR = 4
"""Nodes above a leaf by which it is known to be a length, such as a norm or what is clamped: the
answer is asked of every leaf in every trial, and decides nothing but what is drawn.
"""


def sample(
    value: Value,
    sizes: Mapping[str, int],
    kind: str,
    *,
    may_mask: bool,
    sparse: bool,
    shape: Sequence[Dim] | None = None,
    aims: Aims | None = None,
) -> torch.Tensor | int:
    """A leaf's elements in one kind of trial: floats in float64, complex numbers in complex128.

    `may_mask`: -inf and finfo.min occur. `sparse`: only a few positions of each static axis differ
    from zero, so that products with large weights are cheap. `shape` is the value's own if not
    given. A kind such as `rows 2` is aimed at the third of the `aims`; other leaves than those that
    decide are plain then.
    """
    if isinstance(value.type, ScalarType):
        return sizes[value.type.name or ""]
    seed = seed_of(value, kind)
    dims = value.shape if shape is None else shape
    shape = [int(substitute(dim, sizes)) for dim in dims]
    form, _, place = kind.rpartition(" ")
    if form in AIMED and (aims is None or value not in aims.leaves or value.dtype.is_complex):
        form, kind = "", "plain"
    if form in AIMED and aims is not None:
        drawn = aimed(value, shape, seed, form, aims.numbers[int(place)], aims.numbers)
        if not value.dtype.is_floating_point:
            return drawn
    elif not value.dtype.is_floating_point and not value.dtype.is_complex:
        return discrete(value, shape, seed, _CHANCE.get(kind, 0.7))
    else:
        is_turn = kind.startswith("turn ")  # each of all options has its own
        wide = {} if is_turn or not sparse else dict.fromkeys(_wide_axes(dims), _KEPT)
        drawn = _floats(value, [wide.get(axis, n) for axis, n in enumerate(shape)], seed, kind)
    if sparse:
        for axis in _wide_axes(dims):
            drawn = _spread(drawn, axis, shape[axis], seed)
    if may_mask and kind in ("holes", "masked", "hidden"):  # last: all of a long axis is hidden
        low = -torch.inf if kind == "masked" else torch.finfo(torch.float32).min
        drawn = torch.where(drawn_rows(shape, seed, _CHANCE[kind]), drawn, low)
    return drawn


def _wide_axes(dims: Sequence[Dim]) -> list[int]:
    return [axis for axis, dim in enumerate(dims) if isinstance(dim, int) and dim > 2 * _KEPT]


def _spread(drawn: torch.Tensor, axis: int, size: int, seed: torch.Generator) -> torch.Tensor:
    """What was drawn at a few places of an axis, and zeros; of all places, a few are kept."""
    order = torch.randperm(size, generator=seed)
    if drawn.shape[axis] == size:
        return drawn.index_fill_(axis, order[_KEPT:], 0)
    shape = [*drawn.shape[:axis], size, *drawn.shape[axis + 1 :]]
    return drawn.new_zeros(shape).index_copy_(axis, order[:_KEPT], drawn)


def _floats(value: Value, shape: list[int], seed: torch.Generator, kind: str) -> torch.Tensor:
    wide = torch.complex128 if value.dtype.is_complex else torch.float64
    scale = _SCALE.get(kind, 1.0)
    is_length = value.producer is not None and Intervals().of(value, _NEAR)[0] >= 0
    if is_length:  # what is divided by it isn't as small as it in every leaf
        scale = max(scale, 1.0)
    drawn = torch.randn(shape, generator=seed, dtype=wide) * scale
    if kind.startswith("turn ") and shape and drawn.numel():
        turn, number = map(int, kind.removeprefix("turn ").split("/"))
        rows = drawn.reshape(-1, shape[-1])
        block = torch.arange(shape[-1]) * number // shape[-1]
        row = torch.arange(len(rows)).unsqueeze(1)
        rows += _RAISED * ((block + row) % number == turn)
    if kind == "equal" and shape:
        drawn = drawn[..., :1].real.mul(4).round().to(wide).expand(shape).clone()
    return drawn.abs() if is_length else drawn
