"""The prologue of an attention: what precedes it that some operators compute inside.

GroupQueryAttention can normalise each head and then apply the rotary embedding itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attngraph.ir import Node, Value
from attngraph.ir.dims import Dim, divide, same, same_shape
from attngraph.ir.ops import attribute, input_of, inputs_of
from attngraph.ir.traits import CAST, EXPAND, RESHAPE


@dataclass(frozen=True)
class Norms:
    """RMS norms over the features of each head: weights (D,) or None for ones."""

    query: Value | None
    key: Value | None
    epsilon: float


@dataclass(frozen=True)
class Prologue:
    """Query and key as they are before norms and rotary embedding, both packed.

    `cos` and `sin` are (1, S, R/2): one row per position, the same for all elements of the batch.
    They may be wider in dtype than the operands.
    """

    query: Value
    key: Value
    cos: Value
    sin: Value
    interleaved: bool
    norms: Norms | None

    @property
    def width(self) -> int | None:
        """R, the number of features of each head that are rotated."""
        half = self.cos.shape[2]
        return 2 * half if isinstance(half, int) else None


def prologue_of(node: Node, *, norms: bool = True) -> Prologue | None:
    """The rotary embedding of an `attn.attention`'s query and key, if one does both and only that.

    With `norms` also the norms before it, if there are any. Positions are those of the tokens in
    the operands, so a past has no place here.
    """
    query, key = inputs_of(node, "query", "key")
    sides = query.producer, key.producer
    heads = attribute(node, "heads"), attribute(node, "kv_heads")
    first, second = sides
    if first is None or second is None or first is second:
        return None
    for side, value, count in zip((first, second), (query, key), heads, strict=True):
        if side.op != "attn.rotary" or attribute(side, "heads") != count or len(value.uses) != 1:
            return None
    if input_of(node, "past_key") is not None or not same(query.shape[1], key.shape[1]):
        return None
    tables = inputs_of(first, "cos", "sin")
    interleaved = attribute(first, "interleaved")
    if tables != inputs_of(second, "cos", "sin"):
        return None
    if interleaved != attribute(second, "interleaved"):
        return None
    cos, sin = (_of_positions(table) for table in tables)
    if cos is None or sin is None:
        return None
    before = input_of(first, "x"), input_of(second, "x")
    of_query, of_key = _normed(before[0], heads[0]), _normed(before[1], heads[1])
    if norms and of_query is not None and of_key is not None:
        (query, weight, epsilon), (key, other, same_epsilon) = of_query, of_key
        if epsilon == same_epsilon:
            return Prologue(query, key, cos, sin, interleaved, Norms(weight, other, epsilon))
    return Prologue(*before, cos, sin, interleaved, None)


def _of_positions(table: Value) -> Value | None:
    """The (1, S, R/2) tensor that a (B, S, R/2) one repeats, at most one cast away."""
    casts = 0
    while not same(table.shape[0], 1):
        node = table.producer
        if node is None or node.op not in EXPAND | CAST:
            return None
        casts += node.op in CAST
        source = node.inputs[0]
        if source is None or len(source.shape) != 3 or casts > 1:
            return None
        if not same_shape(source.shape[1:], table.shape[1:]):
            return None
        table = source
    return table


def _normed(packed: Value, heads: int) -> tuple[Value, Value | None, float] | None:
    """The operand of an RMS norm over each head's features, packed, its weight and its ε."""
    node = packed.producer
    if node is None or node.op not in RESHAPE or len(packed.uses) != 1:
        return None
    by_head = node.inputs[0]
    norm = None if by_head is None else by_head.producer
    if by_head is None or norm is None or norm.op != "attn.rms_norm" or len(by_head.uses) != 1:
        return None
    lead, width = list(packed.shape[:2]), divide(packed.shape[2], heads)
    shape = [*lead, heads, width]
    inner = input_of(norm, "x")
    split = inner.producer
    if width is None or not _is(inner, shape) or split is None or split.op not in RESHAPE:
        return None
    source = split.inputs[0]
    if source is None or not _is(source, list(packed.shape)):
        return None
    weight = input_of(norm, "weight")
    if weight is not None and (weight.dtype != packed.dtype or not _is(weight, [width])):
        return None
    return source, weight, float(attribute(norm, "eps"))


def _is(value: Value, shape: Sequence[Dim]) -> bool:
    return same_shape(value.shape, shape)
