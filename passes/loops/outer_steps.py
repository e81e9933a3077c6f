"""Linear attention, or a generalized delta rule, over all steps of a loop, for split-loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attngraph.analysis.recurrence.outer_terms import OuterStep
from attngraph.ir import Builder, Dim, Node, Value
from attngraph.ir.dims import as_dim, product
from attngraph.passes.loops.shown_steps import Places

Parts = Sequence[Value | None]
"""The parts of an update, each (B, T, H·D): the query, key, value, decay and rate of a delta rule,
and by which keys the state is read and written, if these are others."""


@dataclass
class Outer:
    """The nodes of what each step does to a state, (B, H, dk, dv) or turned, by one update after
    the other.

    Several updates of a step are as many tokens of the operator, of which those are kept that
    something reads. A step that reads the state before it writes is an operator over tokens moved
    by one place: each is written where the next one reads, and the last one behind them.
    """

    build: Builder
    found: Sequence[OuterStep]
    steps: Dim
    state: Value

    @property
    def _rows(self) -> Dim:
        return self.state.shape[0]

    @property
    def _tokens(self) -> Dim:
        return as_dim(self.steps * len(self.found))

    def made(
        self, parts: Sequence[Parts], initial: Value, bonus: Value | None, mask: Places | None
    ) -> tuple[dict[Value, Value], Value, Node]:
        """Each step's z (T, …) by what it is in one step, the last state, and the operator. A step
        is written where `mask` is.
        """
        build, first = self.build, self.found[0]
        query, key, value, _, beta, *_ = parts[0]
        own = self._own(query, key, value, beta, bonus) if first.gain else None
        scales = [step.scale for step in self.found if step.query is not None]
        scale = scales[0] if len({*scales}) == 1 else 1.0
        decays = [self._decay(step, each) for step, each in zip(self.found, parts, strict=True)]
        queries: list[Value | None] = [None] * len(parts)
        for at, step in enumerate(self.found):
            if step.query is not None:
                queries[self._place(at)] = self._scaled(parts[at][0], step.scale / scale)
        keys, values, rates, reads, writes = ([x[at] for x in parts] for at in (1, 2, 4, 5, 6))
        columns = [queries, keys, values, self._alike(decays), rates, reads, writes]
        query, *written = [self._joined(each) for each in columns]
        if mask is not None:
            written = self._hidden(written, mask)
        flat = [self._flat(each) for each in (query, *written)]
        if first.reads_before:
            flat = [self._moved(flat[0], 1), *(self._moved(each, 0) for each in flat[1:])]
        shape = [self._rows, first.heads, *self.state.shape[-2:]]
        past = build("aten.reshape", initial, shape=shape)
        past = build("aten.permute", past, dims=[0, 1, 3, 2]) if first.turned else past
        node = self._operator(flat, past, scale)
        given, last = node.outputs[:2]
        if first.reads_before:
            given = build("aten.slice.Tensor", given, dim=1, start=0, end=self._tokens)
        last = build("aten.permute", last, dims=[0, 1, 3, 2]) if first.turned else last
        last = build("aten.reshape", last, shape=list(self.state.shape))
        return self._given(given, own), last, node

    def _operator(self, parts: Parts, past: Value, scale: float) -> Node:
        query, key, value, decay, beta, a, b = parts
        heads = self.found[0].heads
        if a is not None:
            return self.build.node(
                "attn.generalized_delta_rule",
                *(query, key, value, a, b, past, decay),
                heads=heads,
                scale=scale,
            )
        return self.build.node(
            "attn.linear_attention",
            *(query, key, value, past, decay, beta),
            heads=heads,
            kv_heads=heads,
            scale=scale,
        )

    def _place(self, at: int) -> int:
        """Which token of a step has what is read with its update of that number."""
        return at + 1 if at and self.found[0].reads_before else at

    def _given(self, given: Value, own: Value | None) -> dict[Value, Value]:
        """What is read in each step, of the operator's result (B, T·n, H·dv)."""
        build, count = self.build, len(self.found)
        made: dict[Value, Value] = {}
        for at, step in enumerate(self.found):
            if step.seen is None:
                continue
            z = given
            if count > 1:
                z = build("aten.reshape", z, shape=[self._rows, self.steps, count, given.shape[2]])
                z = build("aten.select.int", z, dim=2, index=self._place(at))
            z = z if own is None else build("aten.add.Tensor", z, own)
            z = build("aten.permute", z, dims=[1, 0, 2])
            made[step.seen] = build("aten.reshape", z, shape=[self.steps, *step.seen.shape])
        return made

    def _scaled(self, query: Value | None, by: float) -> Value | None:
        return query if by == 1 else self.build("aten.mul.Scalar", query, other=by)

    def _decay(self, step: OuterStep, parts: Parts) -> Value | None:
        """Logarithms, of each head or of each key feature."""
        decay = parts[3]
        if step.constant is not None:
            return self._constant(step.constant)
        return decay if decay is None or step.is_log else self.build("aten.log", decay)

    def _constant(self, decay: torch.Tensor) -> Value:
        """Logarithms of a decay that is known, for each token."""
        data = decay.log().to(self.state.dtype).flatten()[None, None]
        constant = self.build.constant(data, "decay")
        return self.build("aten.expand", constant, size=[self._rows, self.steps, data.shape[-1]])

    def _alike(self, decays: Sequence[Value | None]) -> list[Value | None]:
        """The decays: those of each head are one for each key feature where others are."""
        first = self.found[0]
        widths = {each.shape[2] for each in decays if each is not None}
        if len(widths) < 2:
            return list(decays)
        return [
            each if each is None or each.shape[2] != first.heads else self._spread(each)
            for each in decays
        ]

    def _spread(self, decay: Value) -> Value:
        build, first = self.build, self.found[0]
        rows = [*decay.shape[:2], first.heads]
        made = build("aten.reshape", decay, shape=[*rows, 1])
        made = build("aten.expand", made, size=[*rows, first.keys])
        return build("aten.reshape", made, shape=[*decay.shape[:2], first.heads * first.keys])

    def _joined(self, parts: Sequence[Value | None]) -> Value | None:
        """(B, T, n, H·D) of what n updates have, zeros where one has none; of one as it is."""
        given = [each for each in parts if each is not None]
        if len(parts) == 1 or not given:
            return parts[0]
        size = list(given[0].shape)
        zeros = self.build("aten.full", size=size, fill_value=0.0, dtype=given[0].dtype)
        whole = [zeros if each is None else each for each in parts]
        return self.build("aten.stack", *whole, dim=2)

    def _flat(self, x: Value | None) -> Value | None:
        """(B, T·n, H·D)."""
        if x is None or len(x.shape) == 3:
            return x
        return self.build("aten.reshape", x, shape=[self._rows, self._tokens, x.shape[3]])

    def _hidden(self, written: Sequence[Value | None], mask: Places) -> list[Value | None]:
        """Zeros where no step is; all of them: what a hidden token has may be NaN, which a 0
        beside it doesn't end."""
        build = self.build
        axes = [1] * (1 if len(self.found) == 1 else 2)
        there = build("aten.reshape", mask.shown, shape=[*mask.shown.shape, *axes])
        zero = build("aten.full", size=[], fill_value=0.0, dtype=self.state.dtype)
        return [
            None if each is None else build("aten.where.self", there, each, zero)
            for each in written
        ]

    def _moved(self, x: Value | None, behind: int) -> Value | None:
        """A value with zeros for one token more, in front or behind."""
        if x is None:
            return None
        size = [self._rows, 1, x.shape[2]]
        zeros = self.build("aten.full", size=size, fill_value=0.0, dtype=x.dtype)
        return self.build("aten.cat", *((x, zeros) if behind else (zeros, x)), dim=1)

    def _own(
        self,
        query: Value | None,
        key: Value | None,
        value: Value | None,
        beta: Value | None,
        bonus: Value | None,
    ) -> Value:
        """gain · (Σ q ∘ w ∘ k) v, (B, T, H·dv), of a step of one update."""
        build, found = self.build, self.found[0]
        assert query is not None
        assert key is not None
        assert value is not None
        tokens = [self._rows, self.steps, found.heads]
        q, k, v = (build("aten.reshape", x, shape=[*tokens, -1]) for x in (query, key, value))
        if bonus is not None:
            is_one = product(bonus.shape) in (found.heads, found.heads * found.keys)
            shape = [1, *([1] if is_one else [self.steps]), found.heads, -1]
            q = build("aten.mul.Tensor", q, build("aten.reshape", bonus, shape=shape))
        both = build("aten.mul.Tensor", q, k)
        summed = build("aten.sum.dim_IntList", both, dim=[-1], keepdim=True)
        if found.gain != 1:
            summed = build("aten.mul.Scalar", summed, other=found.gain)
        if beta is not None:
            summed = build(
                "aten.mul.Tensor", summed, build("aten.reshape", beta, shape=[*tokens, 1])
            )
        made = build("aten.mul.Tensor", summed, v)
        return build("aten.reshape", made, shape=[*tokens[:2], -1])
