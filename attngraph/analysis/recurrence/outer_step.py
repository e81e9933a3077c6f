"""One step of a loop as S' = A S + k ⊗ v: read off the step, so that it holds for all lengths.

The values that the state doesn't reach are found among the step's own by what they must satisfy,
on drawn numbers in float64: S' is affine in S, its offset is k ⊗ v in each head, and its slope,
which acts on the key's features only, is diag(a) or (1 − β k kᵀ) diag(a). Behind the step, only
z = scale · qᵀ S' is read.

What was found is then confirmed with the state and the operands as drawn numbers of their own. The
nodes between are analytic functions of these that keep to units (units.py), so they are the formula
for all numbers; and a loop
whose step is the recurrence's is the recurrence, whatever its length: by induction over the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attngraph.analysis.recurrence.uniform import is_analytic
from attngraph.analysis.recurrence.units import Unit, units_of, unlike
from attngraph.analysis.values.widening import wide_node, widened
from attngraph.errors import IRError
from attngraph.ir import Dim, Graph, Node, Value
from attngraph.ir.dims import product, same, substitute
from attngraph.ir.ops import evaluate
from attngraph.ir.slices import backward_slice, forward_slice

_NEAR = 1e-8  # of float64, relative to the largest element
_RUNS = 3  # of a confirmation
_FAILURES = (IRError, KeyError, RuntimeError, IndexError, TypeError, ValueError)
_ROWS = 2  # the least size of a dim that is drawn


@dataclass(frozen=True)
class OuterStep:
    """Operands as values of the step, their elements in the order (B, H, features).

    `rate` multiplies the value. `seen` is z, (B, H, dv) in that order. The state is (B, H, dv, dk)
    if `turned`. A decay that isn't `is_log` is a number of at least 0.
    """

    query: Value
    key: Value
    value: Value
    seen: Value
    heads: int
    keys: int
    features: int
    turned: bool
    scale: float = 1.0
    rate: Value | None = None
    beta: Value | None = None
    decay: Value | None = None
    is_log: bool = True

    @property
    def operands(self) -> list[Value]:
        parts = (self.query, self.key, self.value, self.rate, self.beta, self.decay)
        return list(dict.fromkeys(part for part in parts if part is not None))

    def units(self, state: Value) -> dict[Value, Unit]:
        others = {"rate": self.rate, "beta": self.beta, "decay": self.decay}
        return units_of(self.query, self.key, self.value, **others, state=state)

    def run(self, given: Mapping[Value, Any], state: torch.Tensor) -> list[torch.Tensor]:
        """S' and z (B, H, dv) of a state (B, H, dk, dv) and the operands' numbers."""
        shaped = {x: given[x].reshape(len(state), self.heads, -1) for x in self.operands}
        q, k, v = shaped[self.query], shaped[self.key], shaped[self.value]
        rate, beta, decay = (
            None if each is None else shaped[each] for each in (self.rate, self.beta, self.decay)
        )
        v = v if rate is None else v * rate
        if decay is not None:
            state = state * (decay.exp() if self.is_log else decay)[..., None]
        if beta is not None:
            v = beta * (v - (k[..., None] * state).sum(-2))
        state = state + k[..., None] * v[..., None, :]
        return [state, self.scale * (q[..., None] * state).sum(-2)]


def read_outer_step(
    body: Graph,
    state: Value,
    after: Value,
    rest: Sequence[Value],
    known: Sequence[Value],
    narrow: Mapping[Value, Value],
    data: Callable[[Value], torch.Tensor | None],
    least: Callable[[Value], float],
    shown: Value | None = None,
) -> OuterStep | None:
    """How the step gets `after` from `state` (B, H, X, Y), or (B, X, Y) of one head.

    `rest` are the step's other results; they must see the state through z alone. `known` are the
    values that no state reaches, in the step's order; of these `narrow` are others without an axis
    along which they are equal. `data` gives a constant's numbers, `least` what no number of a value
    is below. `shown` is a predicate that holds where `after` isn't `state`: what is read is what
    the step does there, and nothing between `after` and z may read it.
    """
    shape = state.shape[1:]
    if len(shape) not in (2, 3) or not all(isinstance(size, int) for size in shape):
        return None
    heads = 1 if len(shape) == 2 else int(shape[0])
    for turned in (False, True):
        keys, features = (int(size) for size in (shape[-2:][::-1] if turned else shape[-2:]))
        seen = _seen(body, state, after, rest, product([state.shape[0], heads, features]))
        if seen is None:
            continue
        runs = _Runs(body, state, [after, seen], known, data)
        reader = _Reader(runs, heads, keys, features, turned, narrow, least, shown)
        for found in reader.read():
            if reader.is_confirmed(found):
                return found
    return None


def _seen(
    body: Graph, state: Value, after: Value, rest: Sequence[Value], elements: Dim
) -> Value | None:
    """The first value of so many elements through which alone `rest` depends on the state."""
    reached = forward_slice([state], body)
    if not any(value in reached for value in rest):
        return None
    for node in body:
        for value in node.outputs:
            if value in reached and value is not after and same(product(value.shape), elements):
                leaves, _ = backward_slice(rest, lambda each, cut=value: each is cut)  # type: ignore[misc]
                if state not in leaves:
                    return value
    return None


class _Runs:
    """Runs a step on drawn numbers."""

    def __init__(
        self,
        body: Graph,
        state: Value,
        results: Sequence[Value],
        known: Sequence[Value],
        data: Callable[[Value], torch.Tensor | None],
    ) -> None:
        self.body, self.state, self.results, self.data = body, state, results, data
        self.leaves, nodes = backward_slice([*results, *known], lambda value: value is state)
        reached = {state}
        self.before: list[Node] = []
        self.behind: list[Node] = []
        for node in nodes:
            is_behind = any(value in reached for value in node.inputs)
            (self.behind if is_behind else self.before).append(node)
            if is_behind:
                reached.update(node.outputs)
        self.sizes = {name: _ROWS + at for at, name in enumerate(body.dims)}
        self.shape = [int(size) for size in substitute(list(state.shape), self.sizes)]

    def known(self, seed: int) -> dict[Value, Any] | None:
        """The numbers of everything that the state doesn't reach."""
        random = torch.Generator().manual_seed(seed)
        memory: dict[Value, Any] = {}
        for leaf in self.leaves:
            if leaf is not self.state:
                numbers = self.data(leaf)
                if numbers is not None and numbers.is_meta:
                    return None
                memory[leaf] = self._drawn(leaf, random) if numbers is None else widened(numbers)
        return self.through(self.before, memory)

    def _drawn(self, leaf: Value, random: torch.Generator) -> Any:
        shape = [int(size) for size in substitute(list(leaf.shape), self.sizes)]
        if not leaf.dtype.is_floating_point:
            return torch.ones(shape, dtype=leaf.dtype)
        return torch.randn(shape, generator=random, dtype=torch.float64)

    def after(self, known: Mapping[Value, Any], state: torch.Tensor) -> list[torch.Tensor] | None:
        """The results of a state in the graph's own shape."""
        memory = self.through(self.behind, {**known, self.state: state})
        return None if memory is None else [memory[value] for value in self.results]

    def through(self, nodes: Sequence[Node], memory: dict[Value, Any]) -> dict[Value, Any] | None:
        with torch.no_grad():
            for node in nodes:
                given = [None if value is None else memory[value] for value in node.inputs]
                try:
                    made = evaluate(wide_node(node), given, self.sizes)
                except _FAILURES:
                    return None
                memory.update(zip(node.outputs, made, strict=True))
        return memory


@dataclass
class _Reader:
    runs: _Runs
    heads: int
    keys: int
    features: int
    turned: bool
    narrow: Mapping[Value, Value]
    least: Callable[[Value], float]
    shown: Value | None

    def __post_init__(self) -> None:
        self.rows = self.runs.shape[0]

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
        if not _is_near(slope @ s, moved):
            return
        vectors = self._candidates(known, self.keys)
        values = self._candidates(known, self.features)
        rates = self._candidates(known, 1)
        first = found[0]
        assert first is not None
        for key, k in vectors:
            along = (k[..., None] * offset).sum(-2) / k.square().sum(-1, keepdim=True)
            if not _is_near(k[..., None] * along[..., None, :], offset):
                continue
            for query, scale in self._queries(vectors, first):
                for value, v in values:
                    for rate, r in [(None, None), *rates]:
                        if _is_near(v if r is None else v * r, along):
                            step = self._step(query, key, value, scale)
                            yield from self._sloped(
                                step, rate, (k, r), slope, known, vectors, rates
                            )

    def _step(self, query: Value, key: Value, value: Value, scale: float) -> OuterStep:
        seen = self.runs.results[1]
        sizes = self.heads, self.keys, self.features, self.turned
        return OuterStep(query, key, value, seen, *sizes, scale=scale)

    def _sloped(
        self,
        step: OuterStep,
        rate: Value | None,
        numbers: tuple[torch.Tensor, torch.Tensor | None],
        slope: torch.Tensor,
        known: Mapping[Value, Any],
        vectors: Sequence[tuple[Value, torch.Tensor]],
        rates: Sequence[tuple[Value, torch.Tensor]],
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
            if not _is_near(a, own[..., None] * eye):
                continue
            found = replace(step, beta=rate) if is_delta else replace(step, rate=rate)
            if _is_near(own, torch.ones_like(own)):
                yield found
            elif _is_near(own[..., :1].expand_as(own), own):
                yield from self._decayed(found, own[..., :1], rates)
            else:
                yield from self._decayed(found, own, vectors)

    def _decayed(
        self, step: OuterStep, a: torch.Tensor, given: Sequence[tuple[Value, torch.Tensor]]
    ) -> Iterator[OuterStep]:
        for value, x in given:
            if _is_near(x.exp(), a):
                yield replace(step, decay=value)
        for value, x in given:
            if _is_near(x, a) and self.least(value) >= 0:  # whose logarithm is −∞ where it is 0
                yield replace(step, decay=value, is_log=False)

    def _queries(
        self, vectors: Sequence[tuple[Value, torch.Tensor]], found: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Value, float]]:
        """Those of which z is a multiple, the same in all heads."""
        after, z = found
        for query, q in vectors:
            own = (q[..., None] * after).sum(-2)
            scale = float((own * z).sum() / own.square().sum())
            if scale and _is_near(own * scale, z):
                yield query, scale

    def _candidates(
        self, known: Mapping[Value, Any], width: int
    ) -> list[tuple[Value, torch.Tensor]]:
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
        given = (state.mT if self.turned else state).reshape(self.runs.shape)
        found = self.runs.after(known, given)
        if found is None or found[1].numel() != self.rows * self.heads * self.features:
            return None
        after = found[0].reshape(
            self.rows, self.heads, *state.shape[-2:][:: -1 if self.turned else 1]
        )
        z = found[1].reshape(self.rows, self.heads, self.features)
        return [after.mT if self.turned else after, z]

    def is_confirmed(self, step: OuterStep) -> bool:
        """Whether the nodes between the operands, the state and both results are the formula."""
        cut = {self.narrow.get(value, value): value for value in step.operands}
        leaves, nodes = backward_slice(
            self.runs.results,
            lambda value: value in cut or value in (self.runs.state, self.shown),
        )
        fixed = {leaf: self.runs.data(leaf) for leaf in leaves if leaf not in cut}
        del fixed[self.runs.state]
        if self.shown is not None:
            after, z = self.runs.results
            ends = backward_slice([z], lambda each: each in cut or each in (after, self.shown))[0]
            if self.shown in ends:
                return False
            fixed[self.shown] = torch.ones((), dtype=torch.bool)
        if any(x is None for x in fixed.values()) or not set(cut) <= set(leaves):
            return False
        memory = {leaf: widened(x) for leaf, x in fixed.items() if x is not None}
        varied = {*cut, self.runs.state}
        for node in nodes:
            if any(value in varied for value in node.inputs):
                varied.update(node.outputs)
                if not is_analytic(node, memory):
                    return False
        units = step.units(self.runs.state)
        units.update({base: units[value] for base, value in cut.items()})
        if unlike(self.runs.results, units) is not None:
            return False
        for seed in range(_RUNS):
            random = torch.Generator().manual_seed(seed)
            given: dict[Value, Any] = {}
            for base, value in cut.items():
                shape = substitute(list(value.shape), self.runs.sizes)
                x = torch.randn([int(n) for n in shape], generator=random, dtype=torch.float64)
                x = x.abs() if value is step.decay and not step.is_log else x
                whole = [int(n) for n in substitute(list(base.shape), self.runs.sizes)]
                given[value], memory[base] = x, x.expand(whole) if base is not value else x
            state = self._states(1, seed)[0]
            own = (state.mT if self.turned else state).reshape(self.runs.shape)
            made = self.runs.through(nodes, {**memory, self.runs.state: own})
            if made is None:
                return False
            after, z = (made[value] for value in self.runs.results)
            after = after.reshape(own.shape if own.ndim == 4 else (self.rows, 1, *own.shape[1:]))
            expected = step.run(given, state)
            pairs = [(after.mT if self.turned else after, expected[0])]
            pairs.append((z.reshape(expected[1].shape), expected[1]))
            if not all(_is_near(a, b) for a, b in pairs):
                return False
        return True


def _is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or not bool(torch.isfinite(a).all()):
        return False
    return bool((a - b).abs().max() <= _NEAR * b.abs().max().clamp(min=1e-300))
