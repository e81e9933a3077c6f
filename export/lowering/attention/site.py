"""One attention of packed heads, as its forms see it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import torch

from attngraph.analysis.masks.masking import Masking
from attngraph.export.kernels.prologue import Prologue
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.ir import Value
from attngraph.ir.dims import Dim

Emitted = tuple[ir.Value, ir.Value | None, *tuple[ir.Value, ...]]
"""Context, weights if asked for, and with a past both presents."""


@dataclass(frozen=True)
class Packed:
    """Query (B, S, H·D), key (B, T, G·D) and value (B, T, G·E), with what is done to them.

    Of `masking`, some forms take bounds by themselves; the rest comes to them as a tensor.

    With a past, which is (B, G, P, D) and (B, G, P, E), T counts the new keys. `prologue` is what
    the chosen form does to query and key by itself.
    """

    query: Value
    key: Value
    value: Value
    past_key: Value | None
    past_value: Value | None
    heads: int
    groups: int
    scale: float
    softcap: float
    weights: bool
    masking: Masking
    sinks: Value | None
    prologue: Prologue | None

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype


def by_head(ctx: LoweringContext, value: ir.Value, shape: tuple[Dim, ...], heads: int) -> ir.Value:
    """(B, S, H·D) → (B, H, S, D)."""
    if heads == 1:
        return ctx.op("Unsqueeze", value, ctx.constant([1]))
    split = ctx.reshape(value, shape, [*shape[:2], heads, shape[2] // heads])
    return ctx.op("Transpose", split, perm=[0, 2, 1, 3])
