"""Whether an `attn.generalized_delta_rule` is computed in chunks of tokens, or why not."""

from __future__ import annotations

import math

from attngraph.analysis.values.intervals import Intervals
from attngraph.ir import Node
from attngraph.ir.ops import attribute, input_of

CHUNK = 16
"""Tokens of a chunk."""

_MOST_OF_PRODUCTS = 2.0
_MOST_OF_KEYS = 1.0
_MOST_OF_HEADS = 4.0


def is_in_chunks(node: Node) -> bool:
    """Whether chunks are as exact as single tokens."""
    return lacking(node) is None


def lacking(node: Node) -> str | None:
    """What chunks ask for that a rule isn't known to have: keys by which its state doesn't grow, or
    decays that can be multiplied over a chunk. None where they are as exact as single tokens.

    What is read by a and written by b is as large as |a| |b| times what was there: more than twice
    that, which is a reflection, grows with every token of one direction, and in a chunk's products
    so do errors. RWKV-7 and Comba divide their keys by their norms for that.

    Decays of key features come into a chunk's products as running products and as quotients by
    these: e^{−16} at the most, whose exponent is off by 16 roundings. Those of heads come in as
    sums of logarithms between two tokens, which are small or make what they are factors of small;
    but a chunk whose state is zeros is 0 · ∞ if they may grow.
    """
    known, size = (
        Intervals(vanishing=False),
        input_of(node, "key").shape[2] // attribute(node, "heads"),
    )
    if math.prod(known.length(input_of(node, name), size) for name in "ab") > _MOST_OF_PRODUCTS:
        return "keys that are divided by their norms"
    decay = input_of(node, "decay")
    low, high = (0.0, 0.0) if decay is None else known.of(decay)
    if is_of_heads(node):
        is_bounded = high <= _MOST_OF_HEADS and not math.isnan(low)
    else:
        is_bounded = low >= -_MOST_OF_KEYS and high <= _MOST_OF_KEYS
    return None if is_bounded else "bounded decays"


def is_of_heads(node: Node) -> bool:
    """Whether a decay is one number for each head."""
    decay = input_of(node, "decay")
    return decay is not None and decay.shape[2] == attribute(node, "heads")
