"""One attention of packed heads, as its forms see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attngraph.export.kernels.turned import Turned
from attngraph.ir import Value


@dataclass(frozen=True)
class Packed:
    """Query (B, S, H·D), key (B, T, G·D) and value (B, T, G·E), with what is done to them.

    With a past, which is (B, G, P, D) and (B, G, P, E), T counts the new keys. `turned` is what the
    chosen form does to query and key by itself.
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
    causal: bool
    window: int
    lengths: Value | None
    sinks: Value | None
    turned: Turned | None

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype
