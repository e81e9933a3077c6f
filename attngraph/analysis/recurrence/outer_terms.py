"""The terms of one step S' = A S + k ⊗ v of a loop, and runs of the step on numbers of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attngraph.analysis.recurrence.units import Unit, units_of, units_of_general
from attngraph.analysis.values.running import run_nodes
from attngraph.analysis.values.widening import widened
from attngraph.ir import Graph, Node, Value
from attngraph.ir.dims import substitute
from attngraph.ir.slices import backward_slice, forward_slice

_ROWS = 2  # the least size of a dim that is drawn


@dataclass(frozen=True)
class StateStep:
    """What a step of a loop does with one of its states, (B, H, X, Y), or (B, X, Y) of one head.

    `after` is the next state, `rest` are the step's other results. `known` are the values that no
    state reaches, in the step's order; of these `narrow` are others without an axis along which
    they are equal. `data` gives a constant's numbers, `least` what no number of a value is below.
    `shown` is a predicate that holds where `after` isn't `state`.
    """

    body: Graph
    state: Value
    after: Value
    rest: Sequence[Value]
    known: Sequence[Value]
    narrow: Mapping[Value, Value]
    data: Callable[[Value], torch.Tensor | None]
    least: Callable[[Value], float]
    shown: Value | None = None


@dataclass(frozen=True)
class OuterStep:
    """Operands as values of the step, their elements in the order (B, H, features).

    `rate` multiplies the value. `seen` is z, (B, H, dv) in that order; without a `query` nothing
    reads the state. The state is (B, H, dv, dk) if `turned`. A decay that isn't `is_log` is a
    number of at least 0; `constant` is one that is known, (H, 1) or (H, dk). Where z
    `reads_before`, it is of S and not of S', beside `gain` · (Σ q ∘ w ∘ k) v, w being `bonus`,
    (H, dk) or (H, 1), or ones. With `reads`, S' has `turn` · b ⊗ (aᵀ S) as well, a being the
    product of these and b that of `writes`, each (B, H, dk) or (B, H, 1).
    """

    query: Value | None
    key: Value
    value: Value
    seen: Value | None
    heads: int
    keys: int
    features: int
    turned: bool
    scale: float = 1.0
    rate: Value | None = None
    beta: Value | None = None
    decay: Value | None = None
    is_log: bool = True
    is_constant: bool = False
    constant: torch.Tensor | None = None
    reads_before: bool = False
    gain: float = 0.0
    bonus: Value | None = None
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    turn: float = 1.0

    @property
    def rule(self) -> str:
        """What it does beside the product of a key and a value: "none", "delta" or "general"."""
        return "general" if self.reads else "none" if self.beta is None else "delta"

    @property
    def operands(self) -> list[Value]:
        parts = (self.query, self.key, self.value, self.rate, self.beta, self.decay, self.bonus)
        return list(dict.fromkeys(part for part in parts + self.factors if part is not None))

    @property
    def factors(self) -> tuple[Value, ...]:
        return self.reads + self.writes

    def units(self, state: Value) -> dict[Value, Unit] | None:
        """Those of the operands and the state; None where an operand can have none of its own."""
        parts = self.query, self.key, self.value
        rate, decay = self.rate, self.decay
        if self.reads:
            return units_of_general(*parts, self.factors, rate=rate, decay=decay, state=state)
        return units_of(*parts, rate=rate, beta=self.beta, decay=decay, state=state)

    def run(self, given: Mapping[Value, torch.Tensor], state: torch.Tensor) -> list[torch.Tensor]:
        """S' and, with a query, z (B, H, dv), of a state (B, H, dk, dv) and operands
        (B, H, features)."""
        k, v = given[self.key], given[self.value]
        rate, beta, decay = (
            None if each is None else given[each] for each in (self.rate, self.beta, self.decay)
        )
        before = state
        v = v if rate is None else v * rate
        written = v if beta is None else v * beta
        if self.constant is not None:
            state = state * self.constant[..., None]
        if decay is not None:
            state = state * (decay.exp() if self.is_log else decay)[..., None]
        if beta is not None:
            v = beta * (v - (k[..., None] * state).sum(-2))
        state = state + k[..., None] * v[..., None, :]
        if self.reads:
            a, b = (
                math.prod((given[part] for part in parts), start=torch.ones_like(k))
                for parts in (self.reads, self.writes)
            )
            read = (a[..., None] * before).sum(-2)
            state = state + self.turn * b[..., None] * read[..., None, :]
        if self.query is None:
            return [state]
        q = given[self.query]
        if not self.reads_before:
            return [state, self.scale * (q[..., None] * state).sum(-2)]
        w = q * k if self.bonus is None else q * k * given[self.bonus]
        own = self.gain * w.sum(-1, keepdim=True) * written
        return [state, self.scale * (q[..., None] * before).sum(-2) + own]


class Runs:
    """Runs a step on drawn numbers.

    `stays` is what the state stays where the loop says so, if that isn't `state` itself: the step
    is one of several, and no other reads it.
    """

    def __init__(
        self,
        body: Graph,
        state: Value,
        results: Sequence[Value],
        known: Sequence[Value],
        data: Callable[[Value], torch.Tensor | None],
        stays: Value | None = None,
    ) -> None:
        self.body, self.state, self.results, self.data = body, state, results, data
        self.stays = None if stays is state else stays
        self.leaves, nodes = backward_slice([*results, *known], lambda value: value is state)
        reached = forward_slice([state], nodes)
        self.behind = [node for node in nodes if node.outputs[0] in reached]
        self.before = [node for node in nodes if node.outputs[0] not in reached]
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
        return run_nodes(nodes, memory, self.sizes)
