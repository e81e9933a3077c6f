"""One step of a loop as S' = A S + k ⊗ v: read off the step, so that it holds for all lengths.

The values that the state doesn't reach are found among the step's own by what they must satisfy,
on drawn numbers in float64: S' is affine in S, its offset is k ⊗ v in each head, and its slope,
which acts on the key's features only, is diag(a), (1 − β k kᵀ) diag(a), or diag(a) + b cᵀ
(corrections.py). Behind the step, only z = scale · qᵀ S' is read, or scale · qᵀ S + gain ·
(Σ q ∘ w ∘ k) v, as RWKV-6 does.

What was found is then confirmed with the state and the operands as drawn numbers of their own
(outer_proof.py); and a loop whose step is the recurrence's is the recurrence, whatever its length:
by induction over the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attngraph.analysis.recurrence.corrections import Corrections, Vector, first_of_each
from attngraph.analysis.recurrence.outer_proof import proven
from attngraph.analysis.recurrence.outer_terms import OuterStep, Runs, StateStep
from attngraph.analysis.values.running import is_near
from attngraph.ir import Dim, Graph, Value
from attngraph.ir.dims import product, same
from attngraph.ir.slices import backward_slice, forward_slice


def read_outer_step(given: StateStep) -> OuterStep | None:
    """How the step gets the next state from the one before it.

    What else it gives must see the state through z alone. With `shown`, what is read is what the
    step does where that holds, and nothing between the next state and z may read it.
    """
    for sizes in Sizes.of(given.state):
        seen = seen_through(given.body, given.state, given.after, given.rest, sizes.seen)
        if seen is None:
            continue
        results = [given.after, seen]
        runs = Runs(given.body, given.state, results, given.known, given.data)
        for found in Reader(runs, sizes, given.least).read():
            step = proven(found, runs, given.narrow, given.shown)
            if step is not None:
                return step
    return None


@dataclass(frozen=True)
class Sizes:
    """Those of a state (B, H, dk, dv), or (B, H, dv, dk) if `turned`, or without one head."""

    rows: Dim
    heads: int
    keys: int
    features: int
    turned: bool

    @classmethod
    def of(cls, state: Value) -> Iterator[Sizes]:
        """The ways to read a state."""
        shape = state.shape[1:]
        if len(shape) not in (2, 3) or not all(isinstance(size, int) for size in shape):
            return
        heads = 1 if len(shape) == 2 else int(shape[0])
        one, other = int(shape[-2]), int(shape[-1])
        yield cls(state.shape[0], heads, one, other, False)
        yield cls(state.shape[0], heads, other, one, True)

    @property
    def seen(self) -> Dim:
        """Elements of z."""
        return product([self.rows, self.heads, self.features])


def seen_through(
    body: Graph,
    state: Value,
    after: Value,
    rest: Sequence[Value],
    elements: Dim,
    others: Sequence[Value] = (),
) -> Value | None:
    """The first value of so many elements, but `after`, through which alone `rest` depends on the
    state, beside what it reads of the others."""
    leaves, behind = backward_slice(rest, {state, *others}.__contains__)
    if state not in leaves:
        return None
    own = set(behind)
    nodes = [node for node in body if node in own]
    reached = forward_slice([state], nodes)
    for node in nodes:
        for value in node.outputs:
            if value in reached and value is not after and same(product(value.shape), elements):
                cut = {value, state, *others}
                if state not in backward_slice(rest, cut.__contains__)[0]:
                    return value
    return None


@dataclass
class Reader:
    """Reads S' and, if the runs give it as their second result, z."""

    runs: Runs
    sizes: Sizes
    least: Callable[[Value], float]

    def __post_init__(self) -> None:
        self.rows = self.runs.shape[0]
        sizes = self.sizes
        self.heads, self.keys, self.features = sizes.heads, sizes.keys, sizes.features

    def read(self) -> Iterator[OuterStep]:
        known = self.runs.known(0)
        if known is None:
            return
        zero = self._after(known, self._states(1, 0)[0] * 0)
        states = self._states(2 + -(-self.keys // self.features), 1)
        found = None if zero is None else [self._after(known, each) for each in states]
        if zero is None or found is None or any(each is None for each in found):
            return
        offset = zero[0]
        s = torch.cat(list(states), -1)
        moved = torch.cat([each[0] - offset for each in found if each is not None], -1)
        slope = torch.linalg.lstsq(s.mT, moved.mT).solution.mT
        if not is_near(slope @ s, moved):
            return
        vectors = self._candidates(known, self.keys)
        values = self._candidates(known, self.features)
        rates = self._candidates(known, 1)
        first = found[0]
        assert first is not None
        written_alike: list[OuterStep] = []
        for key, k in vectors:
            along = (k[..., None] * offset).sum(-2) / k.square().sum(-1, keepdim=True)
            if not is_near(k[..., None] * along[..., None, :], offset):
                continue
            for value, v in values:
                for rate, r in [(None, None), *rates]:
                    written = v if r is None else v * r
                    if not is_near(written, along):
                        continue
                    reads = self._reads(known, (key, k), written, vectors, (zero, first, states[0]))
                    for step in reads:
                        whole = replace(step, value=value)
                        yield from self._sloped(whole, rate, (k, r), slope, vectors, rates)
                        written_alike.append(replace(whole, rate=rate))
        yield from self._corrected(written_alike, slope, vectors, values, rates)

    def _step(self, query: Value | None, key: Value, scale: float, **more: Any) -> OuterStep:
        seen = None if query is None else self.runs.results[1]
        sizes = self.heads, self.keys, self.features, self.sizes.turned
        return OuterStep(query, key, key, seen, *sizes, scale=scale, **more)

    def _reads(
        self,
        known: Mapping[Value, Any],
        key: Vector,
        written: torch.Tensor,
        vectors: Sequence[Vector],
        results: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor],
    ) -> Iterator[OuterStep]:
        """How z reads the state: its query, and what else is in it, without the value written."""
        (_, *zeros), (after, *seen), state = results
        if not seen:
            yield self._step(None, key[0], 1.0)
            return
        z_of_zeros, z = zeros[0], seen[0]
        for query, scale in _multiples(vectors, after, z):
            yield self._step(query, key[0], scale)
        for query, scale in _multiples(vectors, state, z - z_of_zeros):
            step = self._step(query, key[0], scale, reads_before=True)
            if not z_of_zeros.any():
                yield step
                continue
            (q,) = (x for value, x in vectors if value is query)
            for bonus, w in self._bonuses(known):
                own = (q * w * key[1]).sum(-1, keepdim=True) * written
                gain = float((own * z_of_zeros).sum() / own.square().sum())
                gain = round(gain) if abs(gain - round(gain)) < 1e-8 else gain
                if gain and is_near(own * gain, z_of_zeros):
                    yield replace(step, bonus=bonus, gain=gain)

    def _bonuses(
        self, known: Mapping[Value, Any]
    ) -> Iterator[tuple[Value | None, torch.Tensor | float]]:
        yield None, 1.0
        for value, x in known.items():
            is_float = isinstance(x, torch.Tensor) and x.dtype == torch.float64
            if is_float and product(value.shape) in (self.heads, self.heads * self.keys):
                yield value, x.reshape(1, self.heads, -1)

    def _sloped(
        self,
        step: OuterStep,
        rate: Value | None,
        numbers: tuple[torch.Tensor, torch.Tensor | None],
        slope: torch.Tensor,
        vectors: Sequence[Vector],
        rates: Sequence[Vector],
    ) -> Iterator[OuterStep]:
        """The recurrences of that update with that slope."""
        k, r = numbers
        eye = torch.eye(self.keys, dtype=torch.float64)
        kept = eye if r is None else eye - r[..., None] * k[..., None] * k[..., None, :]
        for is_delta, a in [
            (False, slope),
            *([(True, torch.linalg.solve(kept, slope))] * (r is not None)),
        ]:
            own = a.diagonal(dim1=-2, dim2=-1)
            if not is_near(a, own[..., None] * eye):
                continue
            found = replace(step, beta=rate) if is_delta else replace(step, rate=rate)
            yield from self._decayed(found, own, vectors, rates)

    def _corrected(
        self,
        steps: Sequence[OuterStep],
        slope: torch.Tensor,
        vectors: Sequence[Vector],
        values: Sequence[Vector],
        rates: Sequence[Vector],
    ) -> Iterator[OuterStep]:
        """The recurrences of these updates with the slope diag(a) + b cᵀ."""
        if not steps:
            return
        firsts = [first_of_each(each) for each in (vectors, values, rates)]
        same = {value: first for each in firsts for value, first in each.items()}
        parts = "query", "key", "value", "rate"
        alike = [
            replace(step, **{name: same.get(x := getattr(step, name), x) for name in parts})
            for step in steps
        ]
        own, other = (
            [pair for pair in each if same[pair[0]] is pair[0]] for each in (vectors, rates)
        )
        for found in Corrections(own, other).of(slope):
            for step in dict.fromkeys(alike):
                whole = replace(step, reads=found.reads, writes=found.writes, turn=found.turn)
                yield from self._decayed(whole, found.decay, vectors, rates)

    def _decayed(
        self, step: OuterStep, a: torch.Tensor, vectors: Sequence[Vector], rates: Sequence[Vector]
    ) -> Iterator[OuterStep]:
        """The step with what decays its state by `a` (B, H, dk): one number of a head, if it is."""
        if is_near(a, torch.ones_like(a)):
            yield step
            return
        by_head = is_near(a[..., :1].expand_as(a), a)
        a, given = (a[..., :1], rates) if by_head else (a, vectors)
        for value, x in given:
            if is_near(x.exp(), a):
                yield replace(step, decay=value)
        for value, x in given:
            if is_near(x, a) and self.least(value) >= 0:  # whose logarithm is −∞ where it is 0
                yield replace(step, decay=value, is_log=False)
        if is_near(a, a[:1].expand_as(a)):
            yield replace(step, is_constant=True)

    def _candidates(self, known: Mapping[Value, Any], width: int) -> list[Vector]:
        """(B, H, width), those next to the state first."""
        found = []
        elements = product([self.runs.state.shape[0], self.heads, width])
        for value, x in reversed(list(known.items())):
            is_float = isinstance(x, torch.Tensor) and x.dtype == torch.float64
            if is_float and same(product(value.shape), elements) and bool(x.isfinite().all()):
                found.append((value, x.reshape(self.rows, self.heads, width)))
        return found

    def _states(self, count: int, seed: int) -> torch.Tensor:
        """So many states (B, H, dk, dv)."""
        random = torch.Generator().manual_seed(seed)
        shape = count, self.rows, self.heads, self.keys, self.features
        return torch.randn(shape, generator=random, dtype=torch.float64)

    def _after(self, known: Mapping[Value, Any], state: torch.Tensor) -> list[torch.Tensor] | None:
        """S' (B, H, dk, dv) and z (B, H, dv)."""
        turned = self.sizes.turned
        given = (state.mT if turned else state).reshape(self.runs.shape)
        found = self.runs.after(known, given)
        numbers = self.rows * self.heads * self.features
        if found is None or any(z.numel() != numbers for z in found[1:]):
            return None
        after = found[0].reshape(self.rows, self.heads, *state.shape[-2:][:: -1 if turned else 1])
        seen = [z.reshape(self.rows, self.heads, self.features) for z in found[1:]]
        return [after.mT if turned else after, *seen]


def _multiples(
    vectors: Sequence[Vector], state: torch.Tensor, z: torch.Tensor
) -> Iterator[tuple[Value, float]]:
    """The queries of which z is a multiple in a state, the same in all heads."""
    if not z.any():
        return
    for query, q in vectors:
        own = (q[..., None] * state).sum(-2)
        scale = float((own * z).sum() / own.square().sum())
        if scale and is_near(own * scale, z):
            yield query, scale
