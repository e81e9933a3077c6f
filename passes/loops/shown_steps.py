"""Which steps of a row count where a loop is split, and convolutions over these steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attngraph.analysis.recurrence.registers import Register
from attngraph.ir import Builder, Dim, Value
from attngraph.ir.dims import as_dim


@dataclass(frozen=True)
class Places:
    """Which steps of each row are `shown` (B, T): their places (B, T) in `order`, those that are
    not anywhere behind; how many are `before` each step (B, T), and in all (B, 1)."""

    shown: Value
    order: Value
    before: Value
    count: Value

    @classmethod
    def of(cls, build: Builder, shown: Value) -> Places:
        steps = shown.shape[1]
        places = build("aten.arange", end=steps)
        behind = build("aten.arange.start", start=steps, end=as_dim(2 * steps))
        keys = build("aten.where.self", shown, places, behind)
        found = build.node("aten.sort", keys, dim=1).outputs[0]
        order = build("aten.minimum", found, build("aten.slice.Tensor", places, dim=0, start=-1))
        whole = build("aten._to_copy", shown, dtype=torch.int64)
        before = build("aten.sub.Tensor", build("aten.cumsum", whole, dim=1), whole)
        count = build("aten.sum.dim_IntList", whole, dim=[1], keepdim=True)
        return cls(shown, order, before, count)


@dataclass
class Convolution:
    """A convolution over all steps from its inputs before them, `initial` (B, C, L).

    Where a row has steps that aren't shown in `mask`, its other inputs are brought together in
    front, in their order; each step reads the result at the number of shown ones before it.
    """

    build: Builder
    found: Register
    initial: Value
    mask: Places | None
    steps: Dim

    def made(self, x: Value, weight: Value, bias: Value | None) -> tuple[Value, Value]:
        """The results (T, …) and the last inputs (B, C, L)."""
        build, found = self.build, self.found
        batch, channels, kept = self.initial.shape
        rows = build("aten.reshape", x, shape=[self.steps, batch, channels])
        rows = build("aten.permute", rows, dims=[1, 0, 2])
        before = build("aten.permute", self.initial, dims=[0, 2, 1])
        if self.mask is not None:
            rows = self._gathered(rows, self.mask.order, self.steps)
        x = build("aten.permute", rows, dims=[0, 2, 1])
        past = build("aten.slice.Tensor", self.initial, dim=2, start=kept - found.reach)
        y = build.node("attn.causal_conv", x, weight, bias, past, **found.attrs).outputs[0]
        joined = build("aten.cat", before, rows, dim=1)
        if self.mask is None:
            given = build("aten.permute", y, dims=[2, 0, 1])
            last = build("aten.slice.Tensor", joined, dim=1, start=-kept)
        else:
            y = build("aten.permute", y, dims=[0, 2, 1])
            given = self._gathered(y, self.mask.before, self.steps)
            given = build("aten.permute", given, dims=[1, 0, 2])
            places = build("aten.add.Tensor", self.mask.count, build("aten.arange", end=kept))
            last = self._gathered(joined, places, as_dim(self.steps + kept))
        given = build("aten.reshape", given, shape=[self.steps, *found.result.shape])
        return given, build("aten.permute", last, dims=[0, 2, 1])

    def _gathered(self, rows: Value, places: Value, length: Dim) -> Value:
        """The rows (B, length, C) at places (B, P) of each, (B, P, C)."""
        build = self.build
        batch, channels = rows.shape[0], rows.shape[2]
        flat = build("aten.reshape", rows, shape=[as_dim(batch * length), channels])
        first = build("aten.arange", end=as_dim(batch * length))
        first = build("aten.reshape", first, shape=[batch, length])
        first = build("aten.slice.Tensor", first, dim=1, start=0, end=1)
        return build("aten.embedding", flat, build("aten.add.Tensor", places, first))
