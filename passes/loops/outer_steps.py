"""Linear attention over all steps of a loop, as split-loops makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attngraph.analysis.recurrence.outer_terms import OuterStep
from attngraph.ir import Builder, Dim, Node, Value
from attngraph.ir.dims import product
from attngraph.passes.loops.shown_steps import Places


@dataclass
class Outer:
    """The nodes of what each step does to a state, (B, H, dk, dv) or turned.

    A step that reads the state before it writes is an operator over the tokens moved by one place:
    each is written where the next one reads, and the last one behind them.
    """

    build: Builder
    found: OuterStep
    steps: Dim
    state: Value

    @property
    def _rows(self) -> Dim:
        return self.state.shape[0]

    def made(
        self,
        parts: Sequence[Value | None],
        initial: Value,
        bonus: Value | None,
        mask: Places | None,
    ) -> tuple[Value, Value, Node]:
        """Each step's z (T, …), the last state, and the operator. `parts` are the query, key,
        value, rate of a delta rule and decay, each (B, T, H·D); a step is written where `mask` is.
        """
        build, found = self.build, self.found
        query, key, value, beta, decay = parts
        assert query is not None
        assert key is not None
        assert value is not None
        own = self._own(query, key, value, beta, bonus) if found.gain else None
        if decay is not None and not found.is_log:
            decay = build("aten.log", decay)
        if found.constant is not None:
            decay = self._constant(query)
        written = [key, value, decay, beta]
        if mask is not None:
            written = self._hidden(written, mask)
        if found.reads_before:
            written = [self._moved(each, 0) for each in written]
            query = self._moved(query, 1)
        key, value, decay, beta = written
        shape = [self._rows, found.heads, *self.state.shape[-2:]]
        past = build("aten.reshape", initial, shape=shape)
        past = build("aten.permute", past, dims=[0, 1, 3, 2]) if found.turned else past
        node = build.node(
            "attn.linear_attention",
            *(query, key, value, past, decay, beta),
            heads=found.heads,
            kv_heads=found.heads,
            scale=found.scale,
        )
        given, last = node.outputs[:2]
        if found.reads_before:
            given = build("aten.slice.Tensor", given, dim=1, start=0, end=self.steps)
        given = given if own is None else build("aten.add.Tensor", given, own)
        given = build("aten.permute", given, dims=[1, 0, 2])
        given = build("aten.reshape", given, shape=[self.steps, *found.seen.shape])
        last = build("aten.permute", last, dims=[0, 1, 3, 2]) if found.turned else last
        return given, build("aten.reshape", last, shape=list(self.state.shape)), node

    def _hidden(self, written: Sequence[Value | None], mask: Places) -> list[Value | None]:
        """Zeros where no step is; all of them: what a hidden token has may be NaN, which a 0
        beside it doesn't end."""
        build = self.build
        there = build("aten.reshape", mask.shown, shape=[*mask.shown.shape, 1])
        zero = build("aten.full", size=[], fill_value=0.0, dtype=self.state.dtype)
        return [
            None if each is None else build("aten.where.self", there, each, zero)
            for each in written
        ]

    def _moved(self, x: Value | None, behind: int) -> Value | None:
        """With zeros for one token more, in front or behind."""
        if x is None:
            return None
        size = [self._rows, 1, x.shape[2]]
        zeros = self.build("aten.full", size=size, fill_value=0.0, dtype=x.dtype)
        return self.build("aten.cat", *((x, zeros) if behind else (zeros, x)), dim=1)

    def _constant(self, like: Value) -> Value:
        """Logarithms of a decay that is known, for each token."""
        assert self.found.constant is not None
        data = self.found.constant.log().to(like.dtype).flatten()[None, None]
        constant = self.build.constant(data, "decay")
        size = [self._rows, self.steps, data.shape[-1]]
        return self.build("aten.expand", constant, size=size)

    def _own(
        self, query: Value, key: Value, value: Value, beta: Value | None, bonus: Value | None
    ) -> Value:
        """gain · (Σ q ∘ w ∘ k) v, (B, T, H·dv)."""
        build, found = self.build, self.found
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
