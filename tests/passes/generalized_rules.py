"""Loops whose state is read by another key than it is written by, and such that are nearly that."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.passes.linear_attentions import HEADS, KEYS, VALUES, WIDTH
from tests.passes.linear_near_misses import DecayAfterDelta
from tests.passes.stepped_recurrences import Pair, outer, read
from tests.passes.stepped_recurrences import faint as faintly

_SLOWEST = 0.606531  # e^{−1/2}


class Now(NamedTuple):
    """A token: r, k, w, a, b (B, H, dk) and v (B, H, dv)."""

    r: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    a: Tensor
    b: Tensor


def faint(x: Tensor) -> Tensor:
    """By so little that no drawn number shows it, beside a sum over keys in float64."""
    return 1e-2 * faintly(x)


class Rule(nn.Module):
    """`step` takes S (B, H, dk, dv) and a token, and gives the next S and a result (B, H, dv)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * KEYS
        self.r, self.k, self.w, self.a, self.b = (nn.Linear(WIDTH, width) for _ in range(5))
        self.v, self.o = nn.Linear(WIDTH, HEADS * VALUES), nn.Linear(HEADS * VALUES, WIDTH)

    def decays(self, w: Tensor) -> Tensor:
        return torch.exp(-_SLOWEST * torch.sigmoid(w))

    def tokens(self, x: Tensor) -> Now:
        """All of them, (B, T, H, D)."""
        r, k, w, a, b, v = (
            each(x).unflatten(-1, (HEADS, -1))
            for each in (self.r, self.k, self.w, self.a, self.b, self.v)
        )
        unit = F.normalize(a, dim=-1)
        return Now(r, k, v, self.decays(w), -unit, unit * torch.sigmoid(b))

    def zeros(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], HEADS, KEYS, VALUES)

    def forward(self, x: Tensor) -> Tensor:
        r, k, v, w, a, b = self.tokens(x)
        state, given = self.zeros(x), []
        for t in range(x.shape[1]):
            now = Now(r[:, t], k[:, t], v[:, t], w[:, t], a[:, t], b[:, t])
            state, o = self.step(state, now)
            given.append(o)
        return self.o(torch.stack(given, 1).flatten(2))

    def step(self, state: Tensor, now: Now) -> Pair:
        state = state * now.w[..., None] + outer(now.b, read(now.a, state)) + outer(now.k, now.v)
        return state, read(now.r, state)


class Turned(Rule):
    """RWKV-7's own code, of a state (B, H, dv, dk)."""

    def zeros(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], HEADS, VALUES, KEYS)

    def step(self, state: Tensor, now: Now) -> Pair:
        ab = (state @ now.a.unsqueeze(-1)) @ now.b.unsqueeze(-2)
        state = state * now.w.unsqueeze(-2) + ab + now.v.unsqueeze(-1) @ now.k.unsqueeze(-2)
        return state, (state @ now.r.unsqueeze(-1)).squeeze(-1)


class ByMatrix(Turned):
    """A matrix of both keys, as RWKV's reference has it."""

    def step(self, state: Tensor, now: Now) -> Pair:
        ab, vk = now.a[..., None] @ now.b[..., None, :], now.v[..., None] @ now.k[..., None, :]
        state = state * now.w[..., None, :] + state @ ab + vk
        return state, (state @ now.r[..., None])[..., 0]


class BySums(Turned):
    def step(self, state: Tensor, now: Now) -> Pair:
        r, k, w, a, b = (each[..., None, :] for each in (now.r, now.k, now.w, now.a, now.b))
        known = (state * a).sum(-1, keepdim=True)
        state = state * w + known * b + now.v[..., None] * k
        return state, (state * r).sum(-1)


class Accumulated(Rule):
    """Products that are added to what is given."""

    def step(self, state: Tensor, now: Now) -> Pair:
        flat, (r, k, v, _, a, b) = state.flatten(0, 1), (each.flatten(0, 1) for each in now)
        known = torch.bmm(a[:, None], flat)
        flat = torch.baddbmm((state * now.w[..., None]).flatten(0, 1), b[..., None], known)
        flat = torch.baddbmm(flat, k[..., None], v[:, None])
        o = torch.bmm(r[:, None], flat).view(-1, HEADS, VALUES)
        return flat.view_as(state), o


class WithoutDecay(Rule):
    """IPLR."""

    def step(self, state: Tensor, now: Now) -> Pair:
        state = state + outer(now.b, read(now.a, state)) + outer(now.k, now.v)
        return state, read(now.r, state) * KEYS**-0.5


class SteepDecay(Rule):
    """DPLR, whose decays have no bound."""

    def decays(self, w: Tensor) -> Tensor:
        return torch.exp(F.logsigmoid(w))


class HeadsDecay(Rule):
    def step(self, state: Tensor, now: Now) -> Pair:
        return super().step(state, now._replace(w=now.w[..., :1]))


class FixedDecay(Rule):
    def step(self, state: Tensor, now: Now) -> Pair:
        return super().step(state, now._replace(w=torch.full((1, 1, 1), 0.9)))


class Comba(Rule):
    """A decay of each head, and a correction, by a fraction of its rate, of what was before."""

    def step(self, state: Tensor, now: Now) -> Pair:
        k, rate = now.k / now.k.norm(dim=-1, keepdim=True), torch.sigmoid(now.r[..., :1])
        added = rate * now.v - 0.3 * rate * read(k, state)
        state = state * now.w[..., :1, None] + outer(k, added)
        return state, read(now.r - 0.1 * k, state)


class TwoRates(Rule):
    """What is corrected has decayed: by the decay of its head and a rate."""

    def step(self, state: Tensor, now: Now) -> Pair:
        k, rate = now.b, torch.sigmoid(now.r[..., :1])
        state = state * now.w.mean(-1)[..., None, None]
        state = state + outer(k, rate * (now.v - 0.7 * read(now.a, state)))
        return state, read(now.r, state)


class ReadsDecayed(Rule):
    """What is read has decayed: by w ∘ a."""

    def step(self, state: Tensor, now: Now) -> Pair:
        state = state * now.w[..., None]
        state = state + outer(now.b, read(now.a, state)) + outer(now.k, now.v)
        return state, read(now.r, state)


class OtherRate(Rule):
    """What is written is a product that the step doesn't compute."""

    def step(self, state: Tensor, now: Now) -> Pair:
        known = outer(now.b, 0.5 * read(now.a, state)) * now.r[..., None]
        state = state * now.w[..., None] - known + outer(now.k, now.v)
        return state, read(now.r, state)


class OneKey(Rule):
    """Read by the key that it is written by, without a rate of its own."""

    def step(self, state: Tensor, now: Now) -> Pair:
        state = (
            state * now.w[..., None] - 0.5 * outer(now.b, read(now.b, state)) + outer(now.k, now.v)
        )
        return state, read(now.r, state)


class Late(Rule):
    """The state is read before it is written, beside a bonus."""

    def step(self, state: Tensor, now: Now) -> Pair:
        o = read(now.r, state) + 0.3 * (now.r * now.k).sum(-1, keepdim=True) * now.v
        return super().step(state, now)[0], o


class Twice(Rule):
    """Two updates of a token."""

    def step(self, state: Tensor, now: Now) -> Pair:
        state, _ = super().step(state, now)
        state = state + outer(now.a, read(now.b, state)) + outer(now.r, now.v)
        return state, read(now.r, state)


class ReadsUpdated(Rule):
    """What is read has the new product."""

    def step(self, state: Tensor, now: Now) -> Pair:
        state = state * now.w[..., None] + outer(now.k, now.v)
        state = state + outer(now.b, read(now.a, state))
        return state, read(now.r, state)


class KeyOfState(Rule):
    def step(self, state: Tensor, now: Now) -> Pair:
        return super().step(state, now._replace(b=now.b * torch.sigmoid(state.sum(-1))))


class KeyIsState(Rule):
    def step(self, state: Tensor, now: Now) -> Pair:
        return super().step(state, now._replace(b=0.1 * state[..., 0]))


class WrongOrder(Rule):
    """Values are mixed, not keys."""

    def step(self, state: Tensor, now: Now) -> Pair:
        mixed = 0.1 * (state @ now.v[..., None]) * now.v[..., None, :]
        return state * now.w[..., None] + mixed + outer(now.k, now.v), read(now.r, state)


class ValuesDecay(Rule):
    def step(self, state: Tensor, now: Now) -> Pair:
        kept = state * torch.sigmoid(now.v)[..., None, :]
        state = kept + outer(now.b, read(now.a, state)) + outer(now.k, now.v)
        return state, read(now.r, state)


class TwoKeys(Rule):
    def step(self, state: Tensor, now: Now) -> Pair:
        after, _ = super().step(state, now)
        after = after + 0.1 * outer(now.k, read(now.r, state))
        return after, read(now.r, after)


class SignedDecay(Rule):
    def decays(self, w: Tensor) -> Tensor:
        return torch.tanh(w)


class Cut(Rule):
    def step(self, state: Tensor, now: Now) -> Pair:
        known = read(now.a, state).clamp(-1e6, 1e6)
        state = state * now.w[..., None] + outer(now.b, known) + outer(now.k, now.v)
        return state, read(now.r, state)


class FaintState(Rule):
    def step(self, state: Tensor, now: Now) -> Pair:
        after = super().step(state, now)[0] + faint(state.flip(-2))
        return after, read(now.r, after)


class FaintHead(Rule):
    def step(self, state: Tensor, now: Now) -> Pair:
        after = super().step(state, now)[0] + faint(state.flip(1))
        return after, read(now.r, after)


class FaintRead(Rule):
    """Another key reads as well, for the same one to write."""

    def step(self, state: Tensor, now: Now) -> Pair:
        after = super().step(state, now)[0] + outer(now.b, faint(read(now.k, state)))
        return after, read(now.r, after)


class FaintWrite(Rule):
    def step(self, state: Tensor, now: Now) -> Pair:
        after = super().step(state, now)[0] + faint(outer(now.b.flip(-1), read(now.a, state)))
        return after, read(now.r, after)


class FaintDecay(Rule):
    def step(self, state: Tensor, now: Now) -> Pair:
        after = super().step(state, now)[0] + faint(state * now.w.flip(-1)[..., None])
        return after, read(now.r, after)


class FaintQuery(Rule):
    def step(self, state: Tensor, now: Now) -> Pair:
        after = super().step(state, now)[0]
        return after, read(now.r, after) + faint(read(now.r.flip(-1), after))


class Cubed(Rule):
    """The key is another one where it is large."""

    def step(self, state: Tensor, now: Now) -> Pair:
        known = read(now.a, state)
        after = super().step(state, now)[0] + outer(faint(now.b) ** 3, known)
        return after, read(now.r, after)


BOUNDED: tuple[type[nn.Module], ...] = (
    *(Rule, Turned, ByMatrix, BySums, Accumulated, WithoutDecay, HeadsDecay, FixedDecay, Comba),
    *(TwoRates, ReadsDecayed, Late, Twice, DecayAfterDelta),
)
UNBOUNDED: dict[type[nn.Module], str] = {
    SteepDecay: "bounded decays",
    OtherRate: "keys that are divided by their norms",
}
"""What chunks ask for that they don't have."""
KEPT: dict[type[nn.Module], str] = {
    ReadsUpdated: "weren't all found",
    KeyOfState: "no linear function of the state, for sigmoid",
    KeyIsState: "no linear function of the state, for mul",
    WrongOrder: "mixed by a matrix",
    ValuesDecay: "mixed by a matrix",
    TwoKeys: "what more than one key reads",
    OneKey: "weren't all found",
    SignedDecay: "decay isn't known to be at least 0",
    Cut: "no linear function of the state, for clamp",
    FaintState: "weren't all found",
    FaintHead: "weren't all found",
    FaintRead: "weren't all found",
    FaintWrite: "weren't all found",
    FaintDecay: "weren't all found",
    FaintQuery: "otherwise than by one query",
    Cubed: "weren't all found",
}
"""Near misses, and what is said of them."""
