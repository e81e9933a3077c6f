"""Loops over tokens, each of which updates one state several times."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.passes.stepped_recurrences import Now, Pair, Stepped, faint, outer, read


def _twice(now: Now) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Keys, values and rates of two updates."""
    other = now.k.flip(-1), now.v.flip(-1), now.b.flip(1)
    return [(now.k, now.v, now.b), other]


def _corrected(state: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return state + outer(k, b * (v - read(k, state)))


class DeltaProduct(Stepped):
    """Siems et al. 2025, gated: a decay of each head, then three corrections."""

    def step(self, state: Tensor, now: Now) -> Pair:
        state = state * now.w[..., :1, None]
        for k, v, b in (*_twice(now), (now.q, now.v, 1 - now.b)):
            state = _corrected(state, k, v, b)
        return state, read(now.q, state)


class Reflections(Stepped):
    """The same as products of matrices I − β k kᵀ, without a decay."""

    def step(self, state: Tensor, now: Now) -> Pair:
        for k, v, b in _twice(now):
            moved = torch.eye(k.shape[-1]) - b[..., None] * outer(k, k)
            state = moved @ state + b[..., None] * outer(k, v)
        return state, read(now.q, state)


class DecayBetween(Stepped):
    """Of each key feature, in front of the second correction, and a number before the first."""

    def step(self, state: Tensor, now: Now) -> Pair:
        first, second = _twice(now)
        state = _corrected(0.9 * state, *first)
        state = _corrected(state * now.w[..., None], *second)
        return state, read(now.q, state)


class ReadBetween(Stepped):
    """By queries of two lengths, one before the second correction and one behind it."""

    def step(self, state: Tensor, now: Now) -> Pair:
        first, second = _twice(now)
        state = _corrected(state, *first)
        o = read(now.q, state)
        state = _corrected(state, *second)
        return state, o + torch.tanh(0.5 * read(now.q.flip(-1), state))


class ReadBefore(Stepped):
    """What was there before the token, and what is between its corrections."""

    def step(self, state: Tensor, now: Now) -> Pair:
        o = read(now.q, state)
        corrections = (*_twice(now), (now.q, now.v, now.b))
        for at, (k, v, b) in enumerate(corrections):
            state = _corrected(state * now.w[..., None] if at == 0 else state, k, v, b)
            o = o + read(now.q, state) if at == 1 else o
        return state, o


class ErrorThatIsRead(Stepped):
    """What the second correction takes off is a query as well."""

    def step(self, state: Tensor, now: Now) -> Pair:
        first, (k, v, b) = _twice(now)
        state = _corrected(state, *first)
        error = v - read(k, state)
        return state + outer(k, b * error), error


class FaintBetween(Stepped):
    def step(self, state: Tensor, now: Now) -> Pair:
        first, second = _twice(now)
        state = _corrected(state, *first)
        state = _corrected(state + faint(state.flip(-1)), *second)
        return state, read(now.q, state)


class FaintSecondRead(Stepped):
    def step(self, state: Tensor, now: Now) -> Pair:
        first, second = _twice(now)
        between = _corrected(state, *first)
        state = _corrected(between, *second)
        return state, read(now.q, state) + faint(read(now.q, between) * read(now.k, state))


class ErrorHandedOn(Stepped):
    """The second correction is of the first one's error too."""

    def step(self, state: Tensor, now: Now) -> Pair:
        (k, v, b), (k2, v2, b2) = _twice(now)
        error = v - read(k, state)
        state = state + outer(k, b * error)
        return _corrected(state, k2, v2 + 0.1 * error, b2), read(now.q, state)


class AtOnce(Stepped):
    """Both corrections are of the state before."""

    def step(self, state: Tensor, now: Now) -> Pair:
        after = state
        for k, v, b in _twice(now):
            after = after + outer(k, b * (v - read(k, state)))
        return after, read(now.q, after)


class OneIsPlain(Stepped):
    """A correction and a sum, which no one update rule has."""

    def step(self, state: Tensor, now: Now) -> Pair:
        first, (k, v, _) = _twice(now)
        state = _corrected(state, *first) + outer(k, v)
        return state, read(now.q, state)


class SquashedBetween(Stepped):
    def step(self, state: Tensor, now: Now) -> Pair:
        first, second = _twice(now)
        state = _corrected(torch.tanh(_corrected(state, *first)), *second)
        return state, read(now.q, state)


class MixedBetween(Stepped):
    """The heads change places."""

    def step(self, state: Tensor, now: Now) -> Pair:
        first, second = _twice(now)
        state = _corrected(_corrected(state, *first).flip(1), *second)
        return state, read(now.q, state)


class DecayBehind(Stepped):
    """Behind the second correction and in front of what is read."""

    def step(self, state: Tensor, now: Now) -> Pair:
        for k, v, b in _twice(now):
            state = _corrected(state, k, v, b)
        state = now.w[..., None] * state
        return state, read(now.q, state)


class BothEnds(Stepped):
    """What the last token left is read twice: by it, and by the next one."""

    def step(self, state: Tensor, now: Now) -> Pair:
        o = read(now.k, state)
        for k, v, b in _twice(now):
            state = _corrected(state, k, v, b)
        return state, o + read(now.q, state)


class SumOfTwo(Stepped):
    """No state stands between the products."""

    def step(self, state: Tensor, now: Now) -> Pair:
        both = outer(now.k, now.v) + outer(now.k.flip(-1), now.v.flip(-1))
        return state + both, read(now.q, state + both)


READ: dict[type[nn.Module], int] = {
    DeltaProduct: 3,
    Reflections: 2,
    DecayBetween: 2,
    ReadBetween: 2,
    ReadBefore: 3,
    ErrorThatIsRead: 2,
}
"""Those that are linear attention over so many tokens for each of theirs."""
FAINT: tuple[type[nn.Module], ...] = (FaintBetween, FaintSecondRead)
"""Near misses by terms that are too small to show on drawn numbers."""
KEPT: dict[type[nn.Module], tuple[str, str]] = {
    **dict.fromkeys(
        (ErrorHandedOn, AtOnce, OneIsPlain, DecayBehind, BothEnds, SumOfTwo),
        ("declined", "isn't the product of one key and one value"),
    ),
    MixedBetween: ("declined", "mixed by a matrix"),
    SquashedBetween: ("declined", "no linear function of the state, for tanh"),
}
"""What becomes of a loop that no operator computes, and what its remark says."""
