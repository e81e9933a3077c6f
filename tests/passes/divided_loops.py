"""Loops of several states, of which some read none of the others: what can be behind a loop of
these is, and what is in a circle stays."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, KEYS, VALUES, WIDTH = 2, 4, 6, 12

States: TypeAlias = tuple[Tensor, Tensor, Tensor]


class Now(NamedTuple):
    """A token: q, k (B, H, dk), v (B, H, dv), gates in log space i and f (B, H)."""

    q: Tensor
    k: Tensor
    v: Tensor
    i: Tensor
    f: Tensor


class Matrix(nn.Module):
    """mLSTM (Beck et al. 2024): C (B, H, dk, dv), n (B, H, dk), m (B, H), of which C and n are kept
    divided by e^m."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(WIDTH, HEADS * KEYS), nn.Linear(WIDTH, HEADS * KEYS)
        self.v = nn.Linear(WIDTH, HEADS * VALUES)
        self.i, self.f = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        given, _ = self.run(x, self.start(x))
        return given

    def start(self, x: Tensor) -> States:
        rows = x.shape[0], HEADS
        return x.new_zeros(*rows, KEYS, VALUES), x.new_zeros(*rows, KEYS), x.new_zeros(rows)

    def run(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)) for each in (self.q, self.k, self.v))
        i, f, given = self.i(x), F.logsigmoid(self.f(x)), []
        for t in range(x.shape[1]):
            now = Now(q[:, t], k[:, t], v[:, t], i[:, t], f[:, t])
            states, o = self.token(states, now)
            given.append(o)
        return torch.stack(given, 1), states

    def token(self, states: States, now: Now) -> tuple[States, Tensor]:
        states = self.step(states, now)
        return states, self.read(states, now)

    def step(self, states: States, now: Now) -> States:
        c, n, m = states
        new = torch.maximum(now.f + m, now.i)
        return self.written(c, n, torch.exp(now.f + m - new), torch.exp(now.i - new), now, new)

    def written(
        self, c: Tensor, n: Tensor, kept: Tensor, rate: Tensor, now: Now, new: Tensor
    ) -> States:
        c = kept[..., None, None] * c + rate[..., None, None] * outer(now.k, now.v)
        return c, kept[..., None] * n + rate[..., None] * now.k, new

    def read(self, states: States, now: Now) -> Tensor:
        c, n, m = states
        least = torch.exp(-m)
        return read(now.q, c) / torch.maximum((n * now.q).sum(-1).abs(), least)[..., None]


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., None] * v[..., None, :]


def read(q: Tensor, state: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", q, state)


class FromNothing(Matrix):
    """m is −inf before the first token."""

    def start(self, x: Tensor) -> States:
        c, n, m = super().start(x)
        return c, n, torch.full_like(m, -torch.inf)


class OfOne(Matrix):
    """What is divided by is 1 at least."""

    def read(self, states: States, now: Now) -> Tensor:
        c, n, _ = states
        return read(now.q, c) / (n * now.q).sum(-1, keepdim=True).abs().clamp_min(1.0)


class Before(Matrix):
    """All states are read before they are updated."""

    def token(self, states: States, now: Now) -> tuple[States, Tensor]:
        o = self.read(states, now)
        return self.step(states, now), o


class Columns(Matrix):
    """C is v kᵀ, n and m have the axes of C."""

    def start(self, x: Tensor) -> States:
        rows = x.shape[0], HEADS
        column = x.new_zeros(*rows, KEYS, 1)
        return x.new_zeros(*rows, VALUES, KEYS), column, x.new_zeros(*rows, 1, 1)

    def step(self, states: States, now: Now) -> States:
        c, n, m = states
        i, f = now.i[..., None, None], now.f[..., None, None]
        new = torch.maximum(f + m, i)
        kept, rate = torch.exp(f + m - new), torch.exp(i - new)
        c = kept * c + rate * (now.v[..., None] @ now.k[..., None, :])
        return c, kept * n + rate * now.k[..., None], new

    def read(self, states: States, now: Now) -> Tensor:
        c, n, m = states
        total = (now.q[..., None, :] @ n).abs()
        return ((c @ now.q[..., None]) / torch.maximum(total, torch.exp(-m)))[..., 0]


class Rounds(Matrix):
    """A normaliser that no operator has, beside m in one loop."""

    def written(
        self, c: Tensor, n: Tensor, kept: Tensor, rate: Tensor, now: Now, new: Tensor
    ) -> States:
        c, n, new = super().written(c, n, kept, rate, now, new)
        return c, torch.tanh(n), new


class DecayOfNormaliser(Rounds):
    """C's decay is made of n, and n of m."""

    def written(
        self, c: Tensor, n: Tensor, kept: Tensor, rate: Tensor, now: Now, new: Tensor
    ) -> States:
        before = c
        c, n, new = super().written(c, n, kept, rate, now, new)
        return before * n.mean(-1).sigmoid()[..., None, None] + outer(now.k, now.v), n, new


class MaximumOfMatrix(Matrix):
    """m is made of C, and C of m."""

    def step(self, states: States, now: Now) -> States:
        c, n, m = super().step(states, now)
        return c, n, m + 1e-9 * states[0].mean((-1, -2))


class DecayOfMatrix(Matrix):
    """C decays by what it is."""

    def written(
        self, c: Tensor, n: Tensor, kept: Tensor, rate: Tensor, now: Now, new: Tensor
    ) -> States:
        own = kept * c.mean((-1, -2)).sigmoid()
        return super().written(c, n, own, rate, now, new)


class Recurrent(Matrix):
    """A GRU makes q, k, v and the gates."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.out = nn.Linear(HEADS * VALUES, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        c, _, _ = self.start(x)
        h, given = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            q, k, v = (each(h).unflatten(-1, (HEADS, -1)) for each in (self.q, self.k, self.v))
            rate, kept = self.i(h).sigmoid(), F.logsigmoid(self.f(h)).exp()
            c = kept[..., None, None] * c + rate[..., None, None] * outer(k, v)
            given.append(read(q, c))
        return torch.stack(given, 1)


class FedBack(Recurrent):
    """What is read of C is an input of the GRU: a circle."""

    def forward(self, x: Tensor) -> Tensor:
        c, _, _ = self.start(x)
        h, given = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            q, k, v = (each(h).unflatten(-1, (HEADS, -1)) for each in (self.q, self.k, self.v))
            rate, kept = self.i(h).sigmoid(), F.logsigmoid(self.f(h)).exp()
            c = kept[..., None, None] * c + rate[..., None, None] * outer(k, v)
            o = read(q, c)
            h = self.cell(x[:, t] + self.out(o.flatten(1)), h)
            given.append(o)
        return torch.stack(given, 1)


class OfSquashed(Matrix):
    """A squashed matrix, of which what is read makes the decays of C: what is handed on is the
    decays, and not all matrices."""

    def token(self, states: States, now: Now) -> tuple[States, Tensor]:
        c, s, m = states
        s = torch.tanh(s + outer(now.k, now.v))
        known = read(now.q, s)
        c = known.mean(-1).sigmoid()[..., None, None] * c + outer(now.k, now.v)
        return (c, s, m), read(now.q, c) + known

    def start(self, x: Tensor) -> States:
        c, _, m = super().start(x)
        return c, c, m


class OfWholeMatrix(OfSquashed):
    """All of a squashed matrix is added to C."""

    def token(self, states: States, now: Now) -> tuple[States, Tensor]:
        c, s, m = states
        s = torch.tanh(s + outer(now.k, now.v))
        c = now.f.exp()[..., None, None] * c + outer(now.k, now.v) + s
        return (c, s, m), read(now.q, c)


class TwoSquares(OfSquashed):
    """Beside linear attention, a sum of all that two products add to a matrix, which is no
    normaliser."""

    def token(self, states: States, now: Now) -> tuple[States, Tensor]:
        c, s, m = states
        kept = now.f.exp()[..., None, None]
        c = kept * c + outer(now.k, now.v)
        s = kept * s + outer(now.k, now.v) + outer(now.q, now.v.flip(-1))
        return (c, s, m), read(now.q, c) + s.tanh().sum(-2)


class Momentum(OfSquashed):
    """What a gradient adds, and what it added before: all of one matrix is added to the other."""

    def token(self, states: States, now: Now) -> tuple[States, Tensor]:
        c, s, m = states
        s = now.f.exp()[..., None, None] * s + outer(now.k, now.v)
        c = now.i.sigmoid()[..., None, None] * c + s
        return (c, s, m), read(now.q, c)


class Titans(OfSquashed):
    """Behrouz et al. 2025, with a linear memory: momentum, of a gradient at what is known."""

    def token(self, states: States, now: Now) -> tuple[States, Tensor]:
        c, s, m = states
        k, rate = F.normalize(now.k, dim=-1), now.i.sigmoid()[..., None]
        s = now.f.exp()[..., None, None] * s - outer(k, rate * (read(k, c) - now.v))
        c = (1 - 0.1 * rate[..., None]) * c + s
        return (c, s, m), read(now.q, c)


class TwoStages(Matrix):
    """What one mLSTM reads makes the gates of another."""

    def forward(self, x: Tensor) -> Tensor:
        given, _ = self.run(x, self.start(x))
        return given

    def run(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)) for each in (self.q, self.k, self.v))
        i, f, given, first, second = self.i(x), F.logsigmoid(self.f(x)), [], states, states
        for t in range(x.shape[1]):
            now = Now(q[:, t], k[:, t], v[:, t], i[:, t], f[:, t])
            first = self.step(first, now)
            seen = read(now.q, first[0])
            second = self.step(second, now._replace(v=seen, i=seen.mean(-1)))
            given.append(read(now.q, second[0]))
        return torch.stack(given, 1), second


class Scalar(nn.Module):
    """sLSTM: its gates read what it gave, through matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.r = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        c = n = m = h = torch.zeros_like(x[:, 0])
        given = []
        for t in range(x.shape[1]):
            i, f, z, o = (self.w(x[:, t]) + self.r(h)).chunk(4, -1)
            new = torch.maximum(F.logsigmoid(f) + m, i)
            kept, rate, m = torch.exp(F.logsigmoid(f) + m - new), torch.exp(i - new), new
            c, n = kept * c + rate * torch.tanh(z), kept * n + rate
            h = torch.sigmoid(o) * c / n
            given.append(h)
        return torch.stack(given, 1)


class Layers(nn.Module):
    """Two LSTMs, of which each token goes through one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low, self.high = nn.LSTMCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        self.gru, self.rnn = nn.GRUCell(WIDTH, WIDTH), nn.RNNCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = c = g = d = torch.zeros_like(x[:, 0])
        given = []
        for t in range(x.shape[1]):
            h, c = self.low(x[:, t], (h, c))
            g, d = self.high(h + x[:, t], (g, d))
            given.append(g + h)
        return torch.stack(given, 1)


class ThreeLayers(Layers):
    """An LSTM, a GRU and an RNN, and the last state of each."""

    def forward(self, x: Tensor) -> Tensor:
        h = c = g = r = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            h, c = self.low(x[:, t], (h, c))
            g = self.gru(h, g)
            r = self.rnn(g, r)
        return torch.stack([h, c, g, r], 1)


class SideBySide(Layers):
    """Two cells that read nothing of each other."""

    def forward(self, x: Tensor) -> Tensor:
        g = r = torch.zeros_like(x[:, 0])
        given = []
        for t in range(x.shape[1]):
            g, r = self.gru(x[:, t], g), self.rnn(x[:, t], r)
            given.append(g * r)
        return torch.stack(given, 1)


class OfNoCell(Layers):
    """A state that no operator has, of what an LSTM gives."""

    def forward(self, x: Tensor) -> Tensor:
        h = c = s = torch.zeros_like(x[:, 0])
        given = []
        for t in range(x.shape[1]):
            h, c = self.low(x[:, t], (h, c))
            s = torch.sin(s + h)
            given.append(s)
        return torch.stack(given, 1)


class Circle(Layers):
    """Two cells that read what the other one gave."""

    def forward(self, x: Tensor) -> Tensor:
        g = r = torch.zeros_like(x[:, 0])
        given = []
        for t in range(x.shape[1]):
            g = self.gru(x[:, t] + r, g)
            r = self.rnn(g, r)
            given.append(g * r)
        return torch.stack(given, 1)


_ATTENTION = "attn.linear_attention"
DIVIDED: dict[type[nn.Module], list[str]] = {
    Matrix: ["attn.scan", _ATTENTION, _ATTENTION],
    FromNothing: ["attn.scan", _ATTENTION, _ATTENTION],
    OfOne: ["attn.scan", _ATTENTION, _ATTENTION],
    Before: ["attn.scan", _ATTENTION, _ATTENTION],
    Columns: ["attn.scan", _ATTENTION, _ATTENTION],
    Rounds: ["attn.scan", _ATTENTION],
    DecayOfNormaliser: ["attn.scan", _ATTENTION],
    Recurrent: ["attn.recurrent", _ATTENTION],
    OfSquashed: ["attn.scan", _ATTENTION],
    TwoStages: ["attn.scan", _ATTENTION, "attn.scan", _ATTENTION],
    Layers: ["attn.recurrent", "attn.recurrent"],
    ThreeLayers: ["attn.recurrent", "attn.recurrent", "attn.recurrent"],
    SideBySide: ["attn.recurrent", "attn.recurrent"],
    OfNoCell: ["attn.recurrent", "attn.scan"],
}
"""The loops and operators that come of one loop, in their order."""
KEPT: dict[type[nn.Module], list[str]] = {
    MaximumOfMatrix: ["and that one on it", "its next state depends on another state of the loop"],
    DecayOfMatrix: ["no linear function of the state, for sigmoid", "another state of the loop"],
    FedBack: ["another state of the loop, and that one on it"],
    OfWholeMatrix: ["isn't the product of one key and one value", "for tanh"],
    Momentum: ["isn't the product of one key and one value", "made of all of its state"],
    Titans: ["another state of the loop, and that one on it"] * 2,
    Circle: ["no linear function of the state"],
    Scalar: ["no linear function of the state"],
}
"""What is said of a loop that stays one."""
