"""What masks one attention, and the shape of its scores."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from attngraph.ir import Dim, Node, Value
from attngraph.ir.dims import as_dim
from attngraph.ir.ops import attribute, input_of


@dataclass(frozen=True, slots=True)
class Masking:
    """What is done to the scores of one attention, as in `attn.attention`; `past` is its P."""

    bias: Value | None
    mask: Value | None
    causal: bool
    masked_rows: str
    past: Dim = 0
    window: int = 0
    lengths: Value | None = None

    @property
    def values(self) -> tuple[Value, ...]:
        given = (self.bias, self.mask, self.lengths)
        return tuple(value for value in given if value is not None)


def is_bounded(site: Node) -> bool:
    """Whether an `attn.attention` has a window or lengths, which are folded already."""
    return bool(attribute(site, "window")) or input_of(site, "lengths") is not None


def masking_of(site: Node) -> Masking:
    """What masks an `attn.attention`."""
    return Masking(
        input_of(site, "bias"),
        input_of(site, "mask"),
        attribute(site, "causal"),
        attribute(site, "masked_rows"),
        _past(site),
        attribute(site, "window"),
        input_of(site, "lengths"),
    )


def _past(site: Node) -> Dim:
    past = input_of(site, "past_key")
    return 0 if past is None else past.shape[2]


def scores_shape(site: Node) -> tuple[Dim, ...]:
    """(B, H, S, T)."""
    query, key = input_of(site, "query"), input_of(site, "key")
    keys = as_dim(sympy.sympify(key.shape[1] + _past(site)))
    return query.shape[0], attribute(site, "heads"), query.shape[1], keys


NO_MASKED_ROWS = "no-fully-masked-rows"
"""The assumption, as the user states it."""
