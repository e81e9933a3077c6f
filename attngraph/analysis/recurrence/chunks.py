"""Whether an `attn.generalized_delta_rule` is computed for a chunk of tokens at once."""

from __future__ import annotations

import math

from attngraph.analysis.values.intervals import Intervals
from attngraph.ir import Node
from attngraph.ir.ops import attribute, input_of

CHUNK = 16
"""Tokens of a chunk."""

_MOST_OF_KEYS = 1.0
_MOST_OF_HEADS = 4.0


def is_in_chunks(node: Node) -> bool:
    """Whether its decays are known to be such that those of a chunk can be multiplied.

    Decays of key features come into a chunk's products as running products and as quotients by
    these: e^{−16} at the most, whose exponent is off by 16 roundings. Those of heads come in as
    sums of logarithms between two tokens, which are small or make what they are factors of small;
    but a chunk whose state is zeros is 0 · ∞ if they may grow.
    """
    decay = input_of(node, "decay")
    if decay is None:
        return True
    low, high = Intervals().of(decay)
    if is_of_heads(node):
        return high <= _MOST_OF_HEADS and not math.isnan(low)
    return low >= -_MOST_OF_KEYS and high <= _MOST_OF_KEYS


def is_of_heads(node: Node) -> bool:
    """Whether a decay is one number for each head."""
    decay = input_of(node, "decay")
    return decay is not None and decay.shape[2] == attribute(node, "heads")
