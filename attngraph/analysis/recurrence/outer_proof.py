"""Whether a step of a loop is S' = A S + k ⊗ v as it was read, for all numbers.

The nodes between the operands, the state and the results may be analytic functions only that keep
to units (units.py), so that agreeing on drawn numbers is agreeing everywhere; but a summand with a
coefficient of 1e-12 agrees as far as drawn numbers show. So it is asked as well what each element
depends on, whatever the coefficient:

- NaN at places of an axis (apart.py) shows every element that is read from another head, feature or
  row than the formula's.
- A size is no number: it would be that of the run.
- Where the formula sums over keys, operands are drawn with zeros at places that make the formula's
  terms vanish, one by one: a result of 0 has to be 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch

from attngraph.analysis.recurrence.apart import is_apart, places, with_nan
from attngraph.analysis.recurrence.outer_terms import OuterStep, Runs
from attngraph.analysis.recurrence.positions import Positions
from attngraph.analysis.recurrence.uniform import is_analytic
from attngraph.analysis.recurrence.units import unlike
from attngraph.analysis.values.widening import widened
from attngraph.ir import Node, Value
from attngraph.ir.dims import product, same, substitute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import LAYOUT

_NEAR = 1e-12  # of float64, relative to the largest element, after sums over some hundred keys
_ROUNDED = 1e-15  # what is left where terms cancel
_RUNS = 3  # with numbers everywhere
_SPARSE = 6  # of each kind with zeros

Numbers = dict[Value, torch.Tensor]
"""Operands as (B, H, features)."""


def proven(
    step: OuterStep, runs: Runs, narrow: Mapping[Value, Value], shown: Value | None
) -> OuterStep | None:
    """The step, with its constant decay, if the nodes between the operands, the state and its
    results, S' and with a query z, are its formula. `narrow` and `shown` are those of
    `read_outer_step`.
    """
    region = _Region.of(step, runs, narrow, shown)
    if region is None:
        return None
    if step.is_constant:
        decay = region.constant_decay()
        if decay is None:
            return None
        region.step = replace(step, constant=decay)
    return region.step if region.agrees() and region.depends_alike() else None


class _Region:
    """The nodes between the operands, the state and the results."""

    def __init__(
        self, step: OuterStep, runs: Runs, cut: dict[Value, Value], nodes: list[Node], fixed: Any
    ) -> None:
        self.step, self.runs, self.cut, self.nodes, self.fixed = step, runs, cut, nodes, fixed
        self.rows = runs.shape[0]

    @classmethod
    def of(
        cls, step: OuterStep, runs: Runs, narrow: Mapping[Value, Value], shown: Value | None
    ) -> _Region | None:
        cut = {narrow.get(value, value): value for value in step.operands}
        given = {runs.state, *([] if runs.stays is None else [runs.stays])}
        leaves, nodes = backward_slice(
            runs.results, lambda value: value in cut or value in given or value is shown
        )
        fixed = {leaf: runs.data(leaf) for leaf in leaves if leaf not in cut and leaf not in given}
        if runs.state not in leaves:
            return None
        if shown is not None:
            after, *seen = runs.results
            ends = backward_slice(seen, lambda each: each in cut or each in (after, shown))[0]
            if shown in ends:
                return None
            fixed[shown] = torch.ones((), dtype=torch.bool)
        if any(x is None for x in fixed.values()) or not set(cut) <= set(leaves):
            return None
        memory = {leaf: widened(x) for leaf, x in fixed.items() if x is not None}
        numbers = Positions()
        for leaf in fixed:
            numbers.constant(leaf)
        varied = {*cut, *given}
        for node in nodes:
            if node.op not in LAYOUT and any(
                isinstance(x, sympy.Basic) for x in node.attrs.values()
            ):
                return None
            if any(value in varied for value in node.inputs):
                varied.update(node.outputs)
                if not is_analytic(node, memory, runs.state.dtype) or not numbers.admits(node):
                    return None
            elif all(value is None or value in numbers.parts for value in node.inputs):
                numbers.numbers(node)
        units = step.units(runs.state)
        if units is None:
            return None
        units.update({base: units[value] for base, value in cut.items() if value in units})
        units.update(dict.fromkeys(given, units[runs.state]))
        if unlike(runs.results, units) is not None:
            return None
        if runs.stays is not None:  # which no row of a shown step reads
            memory[runs.stays] = torch.full(runs.shape, torch.nan, dtype=torch.float64)
        return cls(step, runs, cut, nodes, memory)

    def made(self, given: Numbers, state: torch.Tensor) -> list[torch.Tensor] | None:
        """S' and with a query z, of a state (B, H, dk, dv)."""
        runs, step = self.runs, self.step
        memory = dict(self.fixed)
        for base, value in self.cut.items():
            shape = [int(n) for n in substitute(list(value.shape), runs.sizes)]
            whole = [int(n) for n in substitute(list(base.shape), runs.sizes)]
            x = given[value][:1] if value is step.bonus else given[value]
            memory[base] = x.reshape(shape).expand(whole)
        own = (state.mT if step.turned else state).reshape(runs.shape)
        found = runs.through(self.nodes, {**memory, runs.state: own})
        if found is None:
            return None
        after, *seen = (found[value] for value in runs.results)
        sizes = (step.features, step.keys) if step.turned else (step.keys, step.features)
        after = after.reshape(self.rows, step.heads, *sizes)
        seen = [z.reshape(self.rows, step.heads, -1) for z in seen]
        return [after.mT if step.turned else after, *seen]

    def drawn(self, seed: int) -> tuple[Numbers, torch.Tensor]:
        step = self.step
        random = torch.Generator().manual_seed(seed)
        given = {}
        for value in step.operands:
            rows = 1 if value is step.bonus else self.rows
            count = substitute(list(value.shape), self.runs.sizes)
            width = int(torch.Size([int(n) for n in count]).numel()) // (rows * step.heads)
            x = torch.randn(rows, step.heads, width, generator=random, dtype=torch.float64)
            x = x.expand(self.rows, -1, -1).clone()
            given[value] = x.abs() if value is step.decay and not step.is_log else x
        shape = self.rows, step.heads, step.keys, step.features
        return given, torch.randn(shape, generator=random, dtype=torch.float64)

    def constant_decay(self) -> torch.Tensor | None:
        """What a state of ones becomes under a key of zeros: (H, 1), or (H, dk)."""
        given, state = self.drawn(0)
        for nothing in (self.step.key, *self.step.reads):
            given[nothing] = torch.zeros_like(given[nothing])
        made = self.made(given, torch.ones_like(state))
        if made is None:
            return None
        decay = made[0][:1, ..., :1]
        is_one = bool((made[0] == decay).all()) and bool((decay > 0).all())
        if not is_one or not bool(decay.isfinite().all()):
            return None
        of_keys = decay[0, ..., 0]
        is_of_head = bool((of_keys == of_keys[:, :1]).all())
        return of_keys[:, :1] if is_of_head else of_keys

    def agrees(self) -> bool:
        """Whether results are the formula's, and 0 where all of its terms are."""
        drawn = [*map(self.drawn, range(_RUNS)), *self._sparse()]
        for given, state in drawn:
            made = self.made(given, state)
            if made is None:
                return False
            for x, expected in zip(made, self.step.run(given, state), strict=True):
                if x.shape != expected.shape or not bool(x.isfinite().all()):
                    return False
                size = expected.abs().max().clamp(min=1e-300)
                off = (x - expected).abs()
                if bool((off > _NEAR * size).any()):
                    return False
                if bool((off[expected == 0] > _ROUNDED * size).any()):
                    return False
        return True

    def _sparse(self) -> Iterator[tuple[Numbers, torch.Tensor]]:
        step = self.step
        query, key, value = step.query, step.key, step.value
        for seed in range(_SPARSE):
            given, state = self.drawn(_RUNS + seed)
            random = torch.Generator().manual_seed(seed)

            def half(like: torch.Tensor, random: torch.Generator = random) -> torch.Tensor:
                return torch.randint(0, 2, like.shape, generator=random).to(like.dtype)

            terms = {name: x for name, x in given.items() if name not in (step.decay, step.bonus)}
            sparse = given | {name: x * half(x) for name, x in terms.items()}
            yield sparse, state * half(state)
            k = sparse[key]
            nothing = {each: torch.zeros_like(x) for each, x in given.items()}
            yield given | {key: k, value: nothing[value]}, state * (k == 0).to(k.dtype)[..., None]
            yield from self._corrected(given, state, sparse, nothing)
            if query is not None and query is not key:
                q = sparse[query]
                outside_q = (q == 0).to(q.dtype)
                unread = given | {part: nothing[part] for part in step.reads[:1]}
                yield unread | {query: q, key: nothing[key]}, state * outside_q[..., None]
                yield unread | {query: q, key: given[key] * outside_q}, state * 0

    def _corrected(
        self, given: Numbers, state: torch.Tensor, sparse: Numbers, nothing: Numbers
    ) -> Iterator[tuple[Numbers, torch.Tensor]]:
        """What makes the next state 0 at some features of a key, beside a correction of it."""
        step = self.step
        for part in dict.fromkeys(step.reads):  # nothing is read, by this key
            outside = (sparse[part] == 0).to(state.dtype).expand(*state.shape[:3])[..., None]
            left = {step.value: nothing[step.value], part: sparse[part]}
            yield given | left, state * outside
        rows = (state[:, :, :, 0] > 0).to(state.dtype)  # any half of them
        kept = given | {step.key: given[step.key] * rows}
        for part in dict.fromkeys(step.writes):
            if given[part].shape[-1] != step.keys:
                continue
            own = kept | {part: given[part] * rows}
            yield own, state * rows[..., None]
            if step.decay is not None:
                decay = given[step.decay]
                stays = rows if decay.shape[-1] == step.keys else rows[..., :1]
                least = torch.tensor(-torch.inf if step.is_log else 0.0, dtype=decay.dtype)
                yield own | {step.decay: torch.where(stays > 0, decay, least)}, state

    def depends_alike(self) -> bool:
        """Whether each element is read from no other row, head or feature than the formula's."""
        step = self.step
        given, state = self.drawn(0)
        axes = [(0, self.rows), (1, step.heads), (3, step.features)]
        axes += [(2, step.keys)] if step.rule == "none" else []
        return all(
            self._is_apart(axis, at, given, state) for axis, size in axes for at in places(size)
        )

    def _is_apart(self, axis: int, at: torch.Tensor, given: Numbers, state: torch.Tensor) -> bool:
        """Whether NaN at some places of an axis of (B, H, dk, dv) shows nowhere else along it."""
        poisoned = {
            value: x if (own := self._along(value, axis)) is None else with_nan(x, own, at)
            for value, x in given.items()
        }
        made = self.made(poisoned, with_nan(state, axis, at))
        if made is None:
            return False
        after, *seen = made
        alike = axis == 2 or all(is_apart(z, min(axis, 2), at) for z in seen)
        return alike and is_apart(after, axis, at)

    def _along(self, value: Value, axis: int) -> int | None:
        """Which axis of an operand that one of (B, H, dk, dv) is."""
        step = self.step
        if axis < 2:
            return None if axis == 0 and value is step.bonus else axis
        of_values, of_keys = {step.value}, {step.key, *([] if step.query is None else [step.query])}
        rows = self.runs.state.shape[0]
        for part, each in ((step.decay, rows), (step.bonus, 1)):
            if part is not None and same(
                product(part.shape), product([each, step.heads, step.keys])
            ):
                of_keys.add(part)
        own, other = (of_keys, of_values) if axis == 2 else (of_values, of_keys)
        return 2 if value in own - other else None
