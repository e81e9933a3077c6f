"""What masks one attention, as one value from the reading of a model to its lowering.

A `Masking` holds tensors, attributes and the row policy, as an `attn.attention` does. `Scores`
reads it as predicates over the indices (b, h, q, k) of the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import sympy

from attngraph.analysis.layout.index_maps import Index, aligned
from attngraph.analysis.masks.predicates import (
    TRUE,
    VARIABLES,
    Domain,
    Linear,
    Predicate,
    conjunction,
)
from attngraph.analysis.masks.reading import Reader
from attngraph.ir import Dim, DimInfo, Node, Value
from attngraph.ir.dims import as_dim
from attngraph.ir.ops import attribute, input_of, inputs_of


@dataclass(frozen=True, slots=True)
class Masking:
    """What is done to the scores of one attention, as in `attn.attention`; `past` is its P.

    `bias` is float and `mask` bool, and both broadcast to (B, H, S, T). With `causal`, key j is
    allowed for query i iff j ≤ i + P, with a `window` w > 0 only if j > i + P − w, with `lengths`
    (B,) only if j < lengths[b]. `masked_rows` is the result of a row that may attend to nothing.
    """

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

    @property
    def is_bounded(self) -> bool:
        """Whether it has a window or lengths, to which masks are folded last."""
        return self.window > 0 or self.lengths is not None

    @property
    def is_open(self) -> bool:
        """Whether nothing but causality says which keys a query sees."""
        return self.mask is None and not self.is_bounded

    @property
    def is_band(self) -> bool:
        """Whether causality and a window are all that says it, and nothing is added to scores."""
        return self.mask is None and self.lengths is None and self.bias is None


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
    query, key = inputs_of(site, "query", "key")
    keys = as_dim(sympy.sympify(key.shape[1] + _past(site)))
    return query.shape[0], attribute(site, "heads"), query.shape[1], keys


class Scores:
    """The scores (B, H, S, T) of one attention: a box of indices, and what masks them in it.

    `reader` reads any tensor's element at an index of the box. `index` is (b, h, q, k), with 0 for
    each axis of size 1.
    """

    def __init__(self, masking: Masking, shape: Sequence[Dim], dims: Mapping[str, DimInfo]) -> None:
        self.masking = masking
        self.shape = tuple(shape)
        self.domain = Domain(shape, dims)
        self.reader = Reader(self.domain)
        self.index: Index = tuple(map(self.domain.index, VARIABLES))

    def at(self, value: Value) -> Index:
        """The index into a tensor that broadcasts to the scores."""
        return aligned(value, self.index)

    def holds(self, mask: Value) -> Predicate:
        """Where a bool tensor that broadcasts to the scores is true."""
        return self.domain.simplify(self.reader.predicate(mask, self.at(mask)))

    @cached_property
    def lower(self) -> Linear:
        """What causality allows: k ≤ q + P."""
        return Linear(self.index[3] - self.index[2] - self.masking.past)

    @cached_property
    def mask(self) -> Predicate:
        """What the bool mask allows."""
        return TRUE if self.masking.mask is None else self.holds(self.masking.mask)

    @cached_property
    def visible(self) -> Predicate:
        """What the mask and causality allow together."""
        lower = self.lower if self.masking.causal else TRUE
        return self.domain.simplify(conjunction(lower, self.mask))


NO_MASKED_ROWS = "no-fully-masked-rows"
"""The assumption, as the user states it."""
