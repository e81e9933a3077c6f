"""One attention of packed heads, as its forms see it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import torch

from attngraph.analysis.masks.masking import Masking
from attngraph.export.kernels.prologue import Prologue
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.ir import Value
from attngraph.ir.dims import Dim, same
from attngraph.ir.ops import attribute, input_of

QKV = tuple[ir.Value, ir.Value, ir.Value]
"""Query, key and value, in whichever layout."""
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

    @property
    def given(self) -> tuple[Value, Value] | None:
        """Keys (B, G, T, D) and values (B, G, T, E) as the graph is given them, if it is: a decoder
        is given what its cross-attentions read at each step, and packing that is a copy."""
        found = [_as_given(packed, self.groups) for packed in (self.key, self.value)]
        if self.past_key is not None or found[0] is None or found[1] is None:
            return None
        return found[0], found[1]


def _as_given(packed: Value, heads: int) -> Value | None:
    """The input (B, G, T, D) of the graph that a packed (B, T, G·D) is another layout of."""
    joined = packed.producer
    if joined is None or joined.op != "aten.reshape":
        return None
    turned = input_of(joined, "self").producer
    if turned is None or turned.op != "aten.permute":
        return None
    source = input_of(turned, "self")
    is_input = source.producer is None and not source.is_constant
    is_turned = list(attribute(turned, "dims")) == [0, 2, 1, 3] and source.shape[1] == heads
    is_joined = len(packed.shape) == 3 and all(
        same(*pair) for pair in zip(packed.shape[:2], turned.outputs[0].shape[:2], strict=True)
    )
    return source if is_input and is_turned and is_joined else None


def by_head(ctx: LoweringContext, value: ir.Value, shape: tuple[Dim, ...], heads: int) -> ir.Value:
    """(B, S, H·D) → (B, H, S, D)."""
    if heads == 1:
        return ctx.op("Unsqueeze", value, ctx.constant([1]))
    split = ctx.reshape(value, shape, [*shape[:2], heads, shape[2] // heads])
    return ctx.op("Transpose", split, perm=[0, 2, 1, 3])
