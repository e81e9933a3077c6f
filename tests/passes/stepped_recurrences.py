"""Loops over tokens that keep a state: some are one operator, others have none."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.passes.linear_attentions import (
    HEADS,
    KEYS,
    VALUES,
    WIDTH,
    CubicLoop,
    Layer,
    SwitchingRetention,
)
from tests.passes.linear_near_misses import DecayOfState, ValueGatedLoop

Pair: TypeAlias = tuple[Tensor, Tensor]


class Now(NamedTuple):
    """A token: q, k (B, H, dk), v (B, H, dv), a rate b (B, H, 1), a decay w (B, H, dk)."""

    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    w: Tensor


class Stepped(Layer):
    """`step` takes S (B, H, dk, dv) and a token, and gives the next S and a result (B, H, dv)."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(HEADS, KEYS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k = F.normalize(k, dim=-1)
        rates = self.b(x).sigmoid()
        decays = F.logsigmoid(self.gates(x)).unflatten(-1, (HEADS, KEYS))
        state, given = self.zeros(x), []
        for t in range(x.shape[1]):
            rate, decay = rates[:, t, :, None], decays[:, t].exp()
            now = Now(q[:, :, t], k[:, :, t], v[:, :, t], rate, decay)
            state, o = self.step(state, now)
            given.append(o)
        return self.joined(torch.stack(given, 2))

    def step(self, state: Tensor, now: Now) -> Pair:
        raise NotImplementedError


def read(q: Tensor, state: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", q, state)


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., None] * v[..., None, :]


def faint(x: Tensor) -> Tensor:
    """By factors that each show, which are 1e-12 together."""
    return 1e-3 * (1e-3 * (1e-3 * (1e-3 * x)))


class FixedDecay(Stepped):
    """RetNet, one token after the other: numbers of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gamma", 1 - 2.0 ** (-5 - torch.arange(HEADS)))

    def step(self, state: Tensor, now: Now) -> Pair:
        state = state * self.gamma[:, None, None] + outer(now.k, now.v)
        return state, read(now.q, state)


class OneDecay(Stepped):
    """A number in the code, under a delta rule."""

    def step(self, state: Tensor, now: Now) -> Pair:
        state = 0.9 * state
        state = state + outer(now.k, now.b * (now.v - read(now.k, state)))
        return state, read(now.q, state)


class UnitKeys(Stepped):
    """A delta rule whose step makes its key a unit vector, under a decay of each key feature."""

    def step(self, state: Tensor, now: Now) -> Pair:
        k = now.k + 0.1 * now.q
        k = k / torch.linalg.vector_norm(k, dim=-1, keepdim=True).clamp_min(1e-6)
        state = now.w[..., None] * state
        state = state + outer(k, now.b * (now.v - read(k, state)))
        return state, read(now.q, state)


class UnitKeysOfLate(Stepped):
    """The same without a decay, read before it is written."""

    def step(self, state: Tensor, now: Now) -> Pair:
        k = now.k / (now.k.var(-1, keepdim=True) + 1)
        o = read(now.q, state)
        return state + now.b[..., None] * outer(k, now.v - read(k, state)), o


class FeatureDecay(Stepped):
    """A parameter of each key feature."""

    def step(self, state: Tensor, now: Now) -> Pair:
        state = torch.exp(-torch.exp(self.u))[..., None] * state + outer(now.k, now.v)
        return state, read(now.q, state)


class Bonus(Stepped):
    """RWKV-6: what was before, and u times the token's own."""

    def step(self, state: Tensor, now: Now) -> Pair:
        own = outer(now.k, now.v)
        return now.w[..., None] * state + own, read(now.q, state + self.u[..., None] * own)


class DoubledBonus(Stepped):
    """RWKV-5: u of each head, as the row's own product."""

    def step(self, state: Tensor, now: Now) -> Pair:
        o = (now.q[..., None, :] @ state)[..., 0, :] + 2 * (now.q * self.u[:, :1] * now.k).sum(
            -1, keepdim=True
        ) * now.v
        return now.w[..., None] * state + now.k[..., None] @ now.v[..., None, :], o


class Late(Stepped):
    """A delta rule whose state is read before it is updated."""

    def step(self, state: Tensor, now: Now) -> Pair:
        o = read(now.q, state)
        state = state * now.w[..., None]
        return state + outer(now.k, now.b * (now.v - read(now.k, state))), o


class FaintValues(Stepped):
    """The state beside another value's, of which drawn numbers show nothing."""

    def step(self, state: Tensor, now: Now) -> Pair:
        state = state + 1e-12 * state.flip(-1) + outer(now.k, now.v)
        return state, read(now.q, state)


class FaintKeys(Stepped):
    def step(self, state: Tensor, now: Now) -> Pair:
        state = state + faint(state.flip(-2)) + outer(now.k, now.v)
        return state, read(now.q, state)


class FaintHeads(Stepped):
    def step(self, state: Tensor, now: Now) -> Pair:
        state = state + faint(state.flip(1)) + outer(now.k, now.v)
        return state, read(now.q, state)


class FaintSum(Stepped):
    """A delta rule sums over keys anyway."""

    def step(self, state: Tensor, now: Now) -> Pair:
        rest = now.b * (now.v - read(now.k, state))
        state = state + faint(state.sum(-2, keepdim=True)) + outer(now.k, rest)
        return state, read(now.q, state)


class FaintKey(Stepped):
    """What is corrected is read by a key of its own as well."""

    def step(self, state: Tensor, now: Now) -> Pair:
        rest = now.v - read(now.k, state) - faint(read(now.k.flip(-1), state))
        state = state + outer(now.k, now.b * rest)
        return state, read(now.q, state)


class FaintQuery(Stepped):
    def step(self, state: Tensor, now: Now) -> Pair:
        state = state + outer(now.k, now.v)
        return state, read(now.q, state) + faint(read(now.q.flip(-1), state))


class FaintDecay(Stepped):
    """A tenth after 10⁸ tokens."""

    def step(self, state: Tensor, now: Now) -> Pair:
        state = state * (1 - 1e-9) + outer(now.k, now.v)
        return state, read(now.q, state)


class TwoProducts(Stepped):
    def step(self, state: Tensor, now: Now) -> Pair:
        state = state + outer(now.k, now.v) + outer(now.k.flip(-1), now.v.flip(-1))
        return state, read(now.q, state)


class TwoDeltas(Stepped):
    """Each token corrects the state twice."""

    def step(self, state: Tensor, now: Now) -> Pair:
        for k, v in ((now.k, now.v), (now.k.flip(-1), now.v.flip(-1))):
            state = state + outer(k, now.b * (v - read(k, state)))
        return state, read(now.q, state)


class TwoQueries(Stepped):
    def step(self, state: Tensor, now: Now) -> Pair:
        state = state + outer(now.k, now.v)
        return state, read(now.q, state) + torch.tanh(read(now.k, state))


class Squashed(Stepped):
    def step(self, state: Tensor, now: Now) -> Pair:
        state = torch.tanh(state + outer(now.k, now.v))
        return state, read(now.q, state)


class MixedValues(Stepped):
    def step(self, state: Tensor, now: Now) -> Pair:
        state = state @ (torch.eye(VALUES) + 0.1) + outer(now.k, now.v)
        return state, read(now.q, state)


class SortedKeys(Stepped):
    """A delta rule whose key is made by an op that isn't known for all steps at once."""

    def step(self, state: Tensor, now: Now) -> Pair:
        k = now.k.sort(-1).values
        return state + outer(k, now.b * (now.v - read(k, state))), read(now.q, state)


class DecayedSortedKeys(Stepped):
    """The same under a decay of each head."""

    def step(self, state: Tensor, now: Now) -> Pair:
        k, state = now.k.sort(-1).values, 0.5 * state
        return state + outer(k, now.b * (now.v - read(k, state))), read(now.q, state)


class SelectiveScan(nn.Module):
    """Mamba's: a decay of each channel and state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.u, self.dt = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.b, self.c = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.a = nn.Parameter(torch.rand(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        step, b, c = F.softplus(self.dt(x)), self.b(x), self.c(x)
        decay = torch.exp(-step[..., None] * self.a)
        added = (step * self.u(x))[..., None] * b[..., None, :]
        state, given = x.new_zeros(x.shape[0], 16, 4), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + added[:, t]
            given.append((state * c[:, t, None, :]).sum(-1))
        return torch.stack(given, 1)


class Channels(nn.Module):
    """RG-LRU: one number for each channel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.u, self.a = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        u, decay = self.u(x), self.a(x).sigmoid()
        state, given = x.new_zeros(x.shape[0], 16), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + (1 - decay[:, t] ** 2).sqrt() * u[:, t]
            given.append(state)
        return torch.stack(given, 1)


class DecayBefore(Stepped):
    """RWKV-5 as its paper has it: a decay that is computed of parameters in front of the loop."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        decay, state, given = torch.exp(-torch.exp(self.u))[..., None], self.zeros(x), []
        for t in range(x.shape[1]):
            own = k[:, :, t, :, None] @ v[:, :, t, None, :]
            given.append(q[:, :, t, None, :] @ (self.u[..., None] * own + state))
            state = own + decay * state
        return self.joined(torch.cat(given, 2))


class SharedKeys(nn.Module):
    """Mamba-2 token by token: all heads have one key and one query, and einsums spread them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.u, self.dt = nn.Linear(WIDTH, HEADS * VALUES), nn.Linear(WIDTH, HEADS)
        self.b, self.c = nn.Linear(WIDTH, KEYS), nn.Linear(WIDTH, KEYS)
        self.a = nn.Parameter(torch.rand(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        u, dt = self.u(x).unflatten(-1, (HEADS, VALUES)), F.softplus(self.dt(x))
        b, c = self.b(x), self.c(x)
        decay, given = torch.exp(-dt * self.a.exp()), []
        state = x.new_zeros(x.shape[0], HEADS, VALUES, KEYS)
        for t in range(x.shape[1]):
            added = torch.einsum("bh,bn,bhp->bhpn", dt[:, t], b[:, t], u[:, t])
            state = state * decay[:, t, :, None, None] + added
            given.append(torch.einsum("bhpn,bn->bhp", state, c[:, t]).flatten(1))
        return torch.stack(given, 1)


class HardDecay(Stepped):
    """A decay that is cut to 0 and to 1."""

    def step(self, state: Tensor, now: Now) -> Pair:
        decay = F.hardsigmoid(8 * now.q.sum(-1))
        state = decay[..., None, None] * state + outer(now.k, now.v)
        return state, read(now.q, state)


class SignedDecay(Stepped):
    """A decay between -1 and 1."""

    def step(self, state: Tensor, now: Now) -> Pair:
        state = torch.tanh(now.q)[..., None] * state + outer(now.k, now.v)
        return state, read(now.q, state)


class FaintScores(SwitchingRetention):
    """A product under a mask of decays, beside that of another head."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().scores(q, k)
        return scores + faint(scores.flip(1))


class Held(nn.Module):
    """The last matrix (B, 2, 3, 4) that was chosen."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        state, given = x.new_zeros(x.shape[0], 2, 3, 4), []
        for t in range(x.shape[1]):
            state = torch.where(chosen[:, t, None, None, None], x[:, t], state)
            given.append(state.sum((-1, -2)))
        return torch.stack(given, 1)


class Accumulated(Layer):
    """The delta rule of one head by products that are added to what is given."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each[:, 0] for each in self.heads(x))
        k, rates = F.normalize(k, dim=-1), self.b(x).sigmoid()
        state, given = self.zeros(x)[:, 0], []
        for t in range(x.shape[1]):
            error = torch.baddbmm(v[:, t, None], k[:, t, None], state, alpha=-1)
            update = rates[:, t, :1, None] * error
            state = torch.baddbmm(state, k[:, t, :, None], update)
            given.append(torch.bmm(q[:, t, None], state)[:, 0])
        return torch.stack(given, 1)


class Squared(Stepped):
    """A product of two that both have the state."""

    def step(self, state: Tensor, now: Now) -> Pair:
        flat = state.flatten(0, 1)
        both = torch.baddbmm(flat, 0.1 * flat, flat.mT @ flat)
        state = both.view_as(state).tanh() + outer(now.k, now.v)
        return state, read(now.q, state)


READ: tuple[type[nn.Module], ...] = (
    *(FixedDecay, OneDecay, UnitKeys, UnitKeysOfLate, FeatureDecay, Bonus, DoubledBonus, Late),
    *(DecayBefore, SharedKeys, HardDecay, TwoProducts, TwoDeltas, Accumulated),
)
FAINT: tuple[type[nn.Module], ...] = (
    *(FaintValues, FaintKeys, FaintHeads, FaintSum, FaintKey, FaintQuery, FaintDecay),
)
"""Near misses by terms that are too small to show on drawn numbers."""
FAINT_IN_PARALLEL: tuple[type[nn.Module], ...] = (FaintScores,)
"""As they are, without a loop."""
KEPT: dict[type[nn.Module], tuple[str, str]] = {
    DecayOfState: ("declined", "no linear function of the state, for sigmoid"),
    CubicLoop: ("declined", "no linear function of the state, for pow"),
    Squashed: ("declined", "no linear function of the state, for tanh"),
    ValueGatedLoop: ("declined", "is that of each value feature"),
    Squared: ("declined", "no linear function of the state"),
    TwoQueries: ("declined", "read otherwise than by one query"),
    MixedValues: ("declined", "mixed by a matrix"),
    SortedKeys: ("declined", "sort of a step isn't known for all steps at once"),
    DecayedSortedKeys: ("declined", "sort of a step isn't known for all steps at once"),
    SignedDecay: ("declined", "decay isn't known to be at least 0"),
    SelectiveScan: ("declined", "decays by its own factor"),
    Channels: ("note", "one number for each channel"),
}
"""What becomes of a loop that no operator computes, and what its remark says."""
