"""Attentions whose masks may hide every key of a row, however mask, fill and softmax are written.

A `Case` is one spelling of the softmax and one fill; its module has an attention for each of some
mask sources. They are compiled with samples in which no key is hidden, and run on inputs that hide
whole rows, leave holes, pad on the left, or leave one key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import Dim

LOWEST = torch.finfo(torch.float32).min
PAD = 5
WIDTH = 8
Inputs = tuple[Tensor, Tensor, Tensor]


def _triangle(ids: Tensor) -> Tensor:
    places = torch.arange(ids.shape[1])
    return (places[None] <= places[:, None])[None]


def _lengths(ids: Tensor) -> Tensor:
    ends = (ids != PAD).sum(1)[:, None, None]
    return torch.arange(ids.shape[1])[None, None] < ends


SOURCES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "pad id": lambda x, ids, there: (ids != PAD)[:, None],
    "pads counted": lambda x, ids, there: ((ids != PAD).cumsum(1) > 0)[:, None],
    "segments": lambda x, ids, there: (ids[:, None] == ids[:, :, None]) & (ids != PAD)[:, None],
    "lengths": lambda x, ids, there: _lengths(ids),
    "zero features": lambda x, ids, there: (x.abs().sum(-1) != 0)[:, None],
    "threshold": lambda x, ids, there: (x[..., 0] != 0)[:, None],
    "bools": lambda x, ids, there: there[:, None],
    "causal and pad id": lambda x, ids, there: _triangle(ids) & (ids != PAD)[:, None],
    "causal": lambda x, ids, there: _triangle(ids),
    "window and lengths": lambda x, ids, there: (
        _triangle(ids) & ~_triangle(ids).tril(-3) & _lengths(ids)
    ),
}
"""Where a query may attend, broadcastable to (B, T, T)."""

FILLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lowest": lambda s, keep: s.masked_fill(~keep, LOWEST),
    "-inf": lambda s, keep: s.masked_fill(~keep, -math.inf),
    "-1e9": lambda s, keep: torch.where(keep, s, -1e9),
    "-1e4": lambda s, keep: s.masked_fill(~keep, -1e4),
    "lowest added": lambda s, keep: s + (1.0 - keep.float()) * LOWEST,
    "-1e9 added": lambda s, keep: s + torch.where(keep, 0.0, -1e9),
    "-inf added": lambda s, keep: s + torch.zeros(()).masked_fill(~keep, -math.inf),
    "half of lowest": lambda s, keep: s.masked_fill(~keep, LOWEST) / 2,
}


def _late(s: Tensor, v: Tensor) -> Tensor:
    e = s.exp()
    return (e @ v) / e.sum(-1, keepdim=True)


def _by_sum(e: Tensor, v: Tensor) -> Tensor:
    return (e / e.sum(-1, keepdim=True)) @ v


def _shifted(s: Tensor) -> Tensor:
    return (s - s.amax(-1, keepdim=True)).exp()


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda s, v: s.softmax(-1) @ v,
    "without NaN": lambda s, v: s.softmax(-1).nan_to_num(0.0) @ v,
    "safe": lambda s, v: torch._safe_softmax(s, -1) @ v,
    "shifted": lambda s, v: _by_sum(_shifted(s), v),
    "shifted, with epsilon": lambda s, v: (
        (_shifted(s) / (_shifted(s).sum(-1, keepdim=True) + 1e-9)) @ v
    ),
    "exp over its sum": lambda s, v: _by_sum(s.exp(), v),
    "with epsilon": lambda s, v: (s.exp() / (s.exp().sum(-1, keepdim=True) + 1e-9)) @ v,
    "exp2": lambda s, v: _by_sum(torch.exp2(s), v),
    "powers of 3": lambda s, v: _by_sum(torch.pow(3.0, s), v),
    "late": _late,
    "minus logsumexp": lambda s, v: (s - s.logsumexp(-1, keepdim=True)).exp() @ v,
    "minus log of sum": lambda s, v: (s - s.exp().sum(-1, keepdim=True).log()).exp() @ v,
    "over exp of logsumexp": lambda s, v: (s.exp() / s.logsumexp(-1, keepdim=True).exp()) @ v,
    "log_softmax": lambda s, v: s.log_softmax(-1).exp() @ v,
    "plus one": lambda s, v: (s.exp() / (1 + s.exp().sum(-1, keepdim=True))) @ v,
    "twice": lambda s, v: _by_sum(s.softmax(-1), v),
}


def _less_logsumexp(s: Tensor) -> Tensor:
    return (s - s.logsumexp(-1, keepdim=True)).exp()


def _quotient(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True)


def _plus_one(s: Tensor) -> Tensor:
    highest = s.amax(-1, keepdim=True)
    e = (s - highest).exp()
    return e / ((-highest).exp() + e.sum(-1, keepdim=True))


WEIGHTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "a caller's numbers": lambda s, pad, keep, m: _less_logsumexp(s + (1 - m) * LOWEST),
    "a caller's numbers, by sums": lambda s, pad, keep, m: _quotient((s + (1 - m) * LOWEST).exp()),
    "two fills, by sums": lambda s, pad, keep, m: _quotient(
        s.masked_fill(pad, LOWEST).masked_fill(~keep, -1e9).exp()
    ),
    "guarded by any": lambda s, pad, keep, m: torch.where(
        keep.any(-1, keepdim=True), s.masked_fill(~keep, -math.inf).softmax(-1), 0.0
    ),
    "refilled": lambda s, pad, keep, m: (
        s.masked_fill(~keep, LOWEST).softmax(-1).masked_fill(~keep, 0)
    ),
    "refilled beside a bias": lambda s, pad, keep, m: (
        (s + torch.where(pad, LOWEST, 0.0)).masked_fill(~keep, LOWEST).softmax(-1)
    ).masked_fill(~keep, 0),
    "normalised again": lambda s, pad, keep, m: _quotient(s.softmax(-1) * keep.float()),
    "zeroed after exp": lambda s, pad, keep, m: _quotient(_shifted(s) * ~pad),
    "filled, and zeroed elsewhere": lambda s, pad, keep, m: _quotient(
        _shifted(s.masked_fill(~keep, -1e9)) * ~pad
    ),
    "plus one, shifted": lambda s, pad, keep, m: _plus_one(s.masked_fill(pad, -math.inf)),
    "in float64": lambda s, pad, keep, m: (
        s.double().masked_fill(pad, torch.finfo(torch.float64).min).softmax(-1).float()
    ),
    "with a floor": lambda s, pad, keep, m: (
        s.masked_fill(pad, -math.inf).clamp_min(LOWEST).softmax(-1)
    ),
    "log of a mask": lambda s, pad, keep, m: (s + (~pad).float().log()).softmax(-1),
    "a weak fill": lambda s, pad, keep, m: s.masked_fill(pad, -50.0).softmax(-1),
    "transposed": lambda s, pad, keep, m: _quotient(s.mT.masked_fill(pad.mT, LOWEST).mT.exp()),
}
"""Weights by scores, a padding mask, a bool mask and a caller's mask of numbers, all (B, 1, T)."""


class Weighed(nn.Module):
    """An attention for each entry of `WEIGHTS`."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in WEIGHTS)

    def forward(self, x: Tensor, ids: Tensor, keep: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        results = []
        for weigh, projection in zip(WEIGHTS.values(), self.projections, strict=True):
            query, key, value = projection(x).chunk(3, -1)
            masks = (ids == PAD)[:, None], keep[:, None], given[:, None]
            results.append(weigh(query @ key.mT / WIDTH**0.5, *masks) @ value)
        return tuple(results)


@dataclass(frozen=True)
class Case:
    """One module: a spelling and a fill, with an attention for each mask source."""

    spelling: str
    fill: str
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.spelling} of {self.fill}"

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return _Attentions(self).eval().requires_grad_(False)


class _Attentions(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in case.sources)

    def forward(self, x: Tensor, ids: Tensor, there: Tensor) -> tuple[Tensor, ...]:
        results = []
        for source, projection in zip(self.case.sources, self.projections, strict=True):
            query, key, value = projection(x).chunk(3, -1)
            scores = query @ key.mT / WIDTH**0.5
            keep = SOURCES[source](x, ids, there)
            results.append(
                SPELLINGS[self.case.spelling](FILLS[self.case.fill](scores, keep), value)
            )
        return tuple(results)


def cases() -> list[Case]:
    """Every spelling with every fill, each with all mask sources."""
    return [Case(spelling, fill, tuple(SOURCES)) for spelling in SPELLINGS for fill in FILLS]


def few() -> list[Case]:
    """Some of them with two mask sources each: every spelling, fill and source occurs."""
    sources, fills = list(SOURCES), list(FILLS)
    found = []
    for place, spelling in enumerate(SPELLINGS):
        pair = sources[place % len(sources)], sources[(3 * place + 4) % len(sources)]
        found.append(Case(spelling, fills[(place * 3) % len(fills)], tuple(dict.fromkeys(pair))))
    return found


def sample() -> Inputs:
    """No key is hidden but by causality."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 7, WIDTH, generator=generator)
    ids = torch.randint(0, PAD, (2, 7), generator=generator)
    return x, ids, torch.ones(2, 7, dtype=torch.bool)


def dynamic_shapes() -> tuple[dict[int, Dim], ...]:
    batch, length = Dim("batch", max=64), Dim("length", max=64)
    return ({0: batch, 1: length},) * 3


def hidden() -> Iterator[tuple[str, Inputs]]:
    """Inputs that hide keys, by what they hide."""
    generator = torch.Generator().manual_seed(2)
    padding = {name: torch.zeros(3, 9, dtype=torch.bool) for name in _HIDDEN}
    padding["a row"][1] = True
    padding["on the left"][1, :4] = padding["on the left"][0, :1] = True
    padding["on the right"][1, 4:] = True
    padding["holes"][:, ::3] = True
    padding["all but one"][1, 1:] = padding["all but one"][2, :-1] = True
    for name, pads in padding.items():
        x = torch.randn(3, 9, WIDTH, generator=generator)
        ids = torch.randint(0, PAD, (3, 9), generator=generator)
        yield name, (x.masked_fill(pads[..., None], 0.0), ids.masked_fill(pads, PAD), ~pads)


_HIDDEN = ("a row", "on the left", "on the right", "holes", "all but one")
