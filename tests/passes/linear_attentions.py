"""Recurrences of outer products as people write them, and what only looks like one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, KEYS, VALUES, WIDTH, TOKENS = 3, 4, 5, 24, 6


class Layer(nn.Module):
    """Projections; q, k and v are (B, H, T, D), the rest (B, T, H)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(WIDTH, HEADS * KEYS), nn.Linear(WIDTH, HEADS * KEYS)
        self.v, self.gates = nn.Linear(WIDTH, HEADS * VALUES), nn.Linear(WIDTH, HEADS * KEYS)
        self.a, self.b = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, HEADS)
        self.out = nn.Linear(HEADS * VALUES, WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (proj(x).unflatten(-1, (HEADS, -1)) for proj in (self.q, self.k, self.v))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def joined(self, o: Tensor) -> Tensor:
        return self.out(o.transpose(1, 2).flatten(2))

    def zeros(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], HEADS, KEYS, VALUES)


class Retention(Layer):
    """RetNet: a fixed decay of each head as a mask."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        decay = 1 - 2.0 ** (-5 - torch.arange(HEADS))
        place = torch.arange(x.shape[1])
        apart = place[:, None] - place[None]
        mask = torch.where(apart >= 0, decay[:, None, None] ** apart.clamp(min=0), 0.0)
        return self.joined((q @ k.mT * KEYS**-0.5 * mask) @ v)


class SwitchingRetention(Layer):
    """A retention up to some distance, position or number, and something else from there on."""

    def mask(self, apart: Tensor) -> Tensor:
        return torch.where(apart >= 0, 0.9 ** apart.clamp(min=0), 0.0)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        place = torch.arange(x.shape[1])
        mask = self.mask(place[:, None] - place[None])
        return self.joined((self.scores(q, k) * mask) @ v)


class FilledRetention(SwitchingRetention):
    """RetNet's own code: an infinite distance ahead, and NaN made 0."""

    def mask(self, apart: Tensor) -> Tensor:
        ahead = ~torch.ones(apart.shape).tril().bool()
        return (apart.float().masked_fill(ahead, torch.inf) * -0.1).exp().nan_to_num()


class Causal(Layer):
    """Katharopoulos et al.: cumulative sums, and a normaliser that is one as well."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        sums = (k[..., :, None] * v[..., None, :]).cumsum(2)
        total = torch.einsum("bhtk,bhtk->bht", q, k.cumsum(2))
        return self.joined((q[..., None, :] @ sums)[..., 0, :] / total[..., None])


class Normalised(Layer):
    """Causal weights over their own sum, which meet the values after that."""

    def weights(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = (self.weights(q) @ self.weights(k).mT).tril()
        return self.joined(scores / (scores.sum(-1, keepdim=True) + 1e-6) @ v)


class SoftFeatures(Normalised):
    """Hedgehog: feature maps that are softmaxes, which weigh no tokens."""

    def weights(self, x: Tensor) -> Tensor:
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)


class Slopes(SwitchingRetention):
    """Lightning attention: the logarithm of each head's decay, and an infinite fill."""

    def mask(self, apart: Tensor) -> Tensor:
        slopes = torch.tensor([0.5, 0.02, 4e-8])[:, None, None]
        return torch.where(apart >= 0, -slopes * apart, -torch.inf).exp()


class CountedPlaces(SwitchingRetention):
    """Places as a running sum, masks as numbers."""

    def mask(self, apart: Tensor) -> Tensor:
        place = torch.ones(apart.shape[0]).cumsum(0)
        apart = place[:, None] - place[None]
        return (-0.1 * apart + (apart < 0).float() * -1e30).exp()


class Gated(Layer):
    """Decays of each token in the parallel form, as sums of logarithms."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        total = F.logsigmoid(self.a(x)).transpose(1, 2).cumsum(-1)
        apart = total[..., :, None] - total[..., None, :]
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.joined((q @ k.mT * apart.masked_fill(later, -torch.inf).exp()) @ v)


class Loop(Layer):
    """One token after the other, from a state that is handed on."""

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        k = F.normalize(k, dim=-1)
        decays, rates = self.decays(x), self.b(x).sigmoid()
        given = []
        state = self.zeros(x) if state is None else state
        for t in range(x.shape[1]):
            state = self.step(state, k[:, :, t], v[:, :, t], decays[:, t], rates[:, t, :, None])
            given.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
        return self.joined(torch.stack(given, 2)), state

    def decays(self, x: Tensor) -> Tensor:
        return self.a(x).sigmoid()

    def step(self, state: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return state + k[..., None] * v[..., None, :]


class GatedLoop(Loop):
    def step(self, state: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return state * a[..., None, None] + k[..., None] * v[..., None, :]


class EulerLoop(GatedLoop):
    """1 − dt · rate, which is below 0 where a rate is 100, and has no logarithm there."""

    def decays(self, x: Tensor) -> Tensor:
        return 1 - 0.01 * F.softplus(self.a(x))


class FeatureGatedLoop(Loop):
    """GLA: a decay of each key feature."""

    def decays(self, x: Tensor) -> Tensor:
        return F.logsigmoid(self.gates(x)).unflatten(-1, (HEADS, KEYS))

    def step(self, state: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return state * a.exp()[..., None] + k[..., None] * v[..., None, :]


class FeatureEulerLoop(Loop):
    """The same of each key feature."""

    def decays(self, x: Tensor) -> Tensor:
        return (1 - 0.01 * F.softplus(self.gates(x))).unflatten(-1, (HEADS, KEYS))

    def step(self, state: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return state * a[..., None] + k[..., None] * v[..., None, :]


class DeltaLoop(Loop):
    def step(self, state: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        rest = v - (state * k[..., None]).sum(-2)
        return state + k[..., None] * (b * rest)[..., None, :]


class GatedDeltaLoop(Loop):
    def decays(self, x: Tensor) -> Tensor:
        return -F.softplus(self.a(x))

    def step(self, state: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        state = state * a.exp()[..., None, None]
        rest = v - (state * k[..., None]).sum(-2)
        return state + k[..., None] * (b * rest)[..., None, :]


class CubicLoop(Loop):
    """A state of 1e6 grows by its cube."""

    def step(self, state: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return super().step(state, k, v, a, b) + (state * 1e-4) ** 3


class CubicDeltaLoop(GatedDeltaLoop):
    """As it, in a delta rule."""

    def step(self, state: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return super().step(state, k, v, a, b) + (state * 1e-4) ** 3


class Chunked(Layer):
    """The state between chunks of four, and a mask of decays in each: segment sums."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        length, size = x.shape[1], 4
        missing = -length % size
        q, k, v = (F.pad(part, (0, 0, 0, missing)).unflatten(2, (-1, size)) for part in (q, k, v))
        gates = F.pad(F.logsigmoid(self.a(x)).transpose(1, 2), (0, missing)).unflatten(
            2, (-1, size)
        )
        total = gates.cumsum(-1)
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        inside = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
        state, given = self.zeros(x), []
        for c in range(q.shape[2]):
            seen = q[:, :, c] * total[:, :, c].exp()[..., None] @ state
            given.append(seen + (q[:, :, c] @ k[:, :, c].mT * inside[:, :, c]) @ v[:, :, c])
            left = (total[:, :, c, -1:] - total[:, :, c]).exp()[..., None]
            state = self.kept(state, c) * total[:, :, c, -1].exp()[..., None, None]
            state = state + (k[:, :, c] * left).mT @ v[:, :, c]
        return self.joined(torch.stack(given, 2).flatten(2, 3)[:, :, :length])

    def kept(self, state: Tensor, c: int) -> Tensor:
        return state


class SegmentSums(Layer):
    """All chunks at once, of inputs and of a result whose heads are split where chunks are."""

    def chunks(self, part: Tensor) -> Tensor:
        """(B, T, F) as (B, chunks, 4, H, F/H)."""
        padded = F.pad(part, (0, 0, 0, -part.shape[1] % 4))
        return padded.reshape(part.shape[0], padded.shape[1] // 4, 4, HEADS, -1)

    def decays(self, log: Tensor) -> Tensor:
        """e^(the sum of what lies between two places), 0 for later ones."""
        size, total = log.shape[-1], log.cumsum(-1)
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        return (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.chunks(proj(x)) for proj in (self.q, self.k, self.v))
        log = self.chunks(F.logsigmoid(self.a(x)))[..., 0].permute(0, 3, 1, 2)
        total = log.cumsum(-1)
        inside = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", q, k, self.decays(log), v)
        left = (total[..., -1:] - total).exp()
        states = torch.einsum("bclhn,bhcl,bclhp->bchpn", k, left, v)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        between = self.decays(F.pad(total[..., -1], (1, 0)))
        states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
        before = torch.einsum("bclhn,bchpn,bhcl->bclhp", q, states, total.exp())
        given = self.given(inside + before)
        return self.out(given.reshape(x.shape[0], -1, HEADS * VALUES)[:, : x.shape[1]])

    def given(self, o: Tensor) -> Tensor:
        return o


def _leaking(size: int) -> Tensor:
    """(size, size), which adds 10⁻¹² of each place to the next."""
    own = torch.eye(size)
    return own + own.roll(1, 0) * 1e-12


class LeakingHeads(SegmentSums):
    """A head that shows in another by less than a trial tells."""

    def given(self, o: Tensor) -> Tensor:
        return (o.mT @ _leaking(HEADS)).mT


class LeakingFeatures(SegmentSums):
    """A feature that shows in another one of its head."""

    def given(self, o: Tensor) -> Tensor:
        return o @ _leaking(VALUES)


class SharedQueries(SegmentSums):
    """Values' heads that share one query and key."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return q[:, :1].expand_as(q), k[:, :1].expand_as(k), v


class SolvedChunks(Layer):
    """A delta rule: what a chunk's tokens take from each other is a triangular system."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        length, size = x.shape[1], 4
        missing = -length % size
        rate = F.pad(self.b(x).sigmoid().transpose(1, 2), (0, missing))[..., None]
        q, k, v = (F.pad(part, (0, 0, 0, missing)) for part in (q, k, v))
        state, given, one = self.zeros(x), torch.zeros_like(v), torch.eye(size)
        for start in range(0, length + missing, size):
            end = start + size
            now, key = rate[:, :, start:end], k[:, :, start:end]
            seen = self.system(one + (now * (key @ key.mT)).tril(-1), state)
            rest = now * (v[:, :, start:end] - key @ state)
            u = torch.linalg.solve_triangular(seen, rest, upper=False)
            inside = (q[:, :, start:end] @ key.mT).tril()
            given[:, :, start:end] = q[:, :, start:end] @ state + inside @ u
            state = state + key.mT @ u
        return self.joined(given[:, :, :length])

    def system(self, seen: Tensor, state: Tensor) -> Tensor:
        return seen


class SystemOfState(SolvedChunks):
    """A system that the state is part of, by less than a trial tells."""

    def system(self, seen: Tensor, state: Tensor) -> Tensor:
        return seen + seen * state[..., :1, :1] * 1e-12


class LateChunks(Chunked):
    """Fades from chunk to chunk, which shows after millions of them."""

    def kept(self, state: Tensor, c: int) -> Tensor:
        return state - state * (c * 1e-3) * 1e-3 * 1e-3 * 1e-3


class CubicChunks(Chunked):
    """What is not affine in the state shows where it is large."""

    def kept(self, state: Tensor, c: int) -> Tensor:
        little = state * 1e-3
        return state + little * 1e-3 * little * 1e-3 * little


class ClampedChunks(Chunked):
    """A limit that no trial reaches."""

    def kept(self, state: Tensor, c: int) -> Tensor:
        return state.clamp(max=1e3)


class Hidden(Layer):
    """A softmax over other tokens, written out: where all are hidden, exponentials are one."""

    def forward(self, x: Tensor, others: Tensor, hidden: Tensor) -> Tensor:
        q, (_, k, v) = self.heads(x)[0], self.heads(others)
        later = torch.ones(x.shape[1], others.shape[1], dtype=torch.bool).triu(2)
        hides = later | hidden[:, None, None, :]
        scores = (q @ k.mT).masked_fill(hides, -1e9)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return self.joined((weights / weights.sum(-1, keepdim=True)) @ v)


class Counted(Layer):
    """Linear attention over all tokens of so many: of one, a running sum."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        there = torch.arange(x.shape[1]) < lengths[:, None]
        k = (F.elu(k) + 1) * there[:, None, :, None]
        return self.joined(F.elu(q) @ (k.mT @ v))


class LastToken(Retention):
    """What goes out has the rank of a state, and is none."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, -1:]


class ChannelsFirst(Layer):
    """Mamba's scan as (B, C, T, N), its products computed ahead: a state for each channel."""

    def forward(self, x: Tensor) -> Tensor:
        u, delta = self.v(x).mT, F.softplus(self.v(x).mT)
        written, read = self.k(x)[..., :KEYS].mT, self.q(x)[..., :KEYS]
        rates = -torch.arange(1.0, KEYS + 1).expand(HEADS * VALUES, -1)
        decay = torch.einsum("bct,cn->bctn", delta, rates).exp()
        added = torch.einsum("bct,bnt,bct->bctn", delta, written, u)
        state = x.new_zeros(len(x), HEADS * VALUES, KEYS)
        results = []
        for t in range(x.shape[1]):
            state = decay[:, :, t] * state + added[:, :, t]
            results.append(torch.einsum("bcn,bn->bc", state, read[:, t]))
        return self.out(torch.stack(results, 1))


OF_ANY_LENGTH: tuple[type[Layer], ...] = (
    *(Retention, FilledRetention, Slopes, CountedPlaces, Causal, Gated, SegmentSums),
    *(Normalised, SoftFeatures, SharedQueries),
)
LOOPS: tuple[type[Layer], ...] = (
    *(Loop, GatedLoop, FeatureGatedLoop, DeltaLoop, GatedDeltaLoop),
    Chunked,
)
CHUNKED = (LateChunks, CubicChunks, ClampedChunks)
"""In which the loop over chunks is none of one recurrence at every length."""
