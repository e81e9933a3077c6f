"""Linear attention in which each feature is a head of its own, so that no product is outer.

Hydra attention (Bolya et al., 2022): queries times Σ k ∘ v over the tokens, or its running sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attngraph.analysis.attention.bare_scores import projection
from attngraph.analysis.attention.exponentials import EXP
from attngraph.analysis.attention.refusals import Declined, Refusal
from attngraph.analysis.layout.axes import Atom, Operand, climb, fresh_axes, resolve, sides_of, top
from attngraph.analysis.layout.contraction import read_contraction
from attngraph.analysis.walks import walk
from attngraph.ir import Node, TensorType
from attngraph.ir.ops import attribute
from attngraph.ir.traits import CAST, MULTIPLICATION, POINTWISE, RUNNING_SUM

_Sum = tuple[Node, Atom, tuple[Operand, Operand]]
"""A sum over tokens of a product, the tokens, and what is multiplied."""


def by_feature(root: Node) -> Iterator[tuple[Node, Declined]]:
    """The sum of products of keys and values that queries are multiplied with at `root`, if each
    feature of the three is summed up by itself.
    """
    if root.op != "aten.mul.Tensor" or len(root.outputs) != 1 or len(root.operands) != 2:
        return
    if not isinstance(root.output.type, TensorType):
        return
    axes = fresh_axes(root.output.shape)
    first, second = sides_of(root, axes)
    for query, state in ((first, second), (second, first)):
        for node, token, sides in _sums(state):
            if _are_heads(token, (*sides, query), {*top(state).atoms}):
                yield node, Refusal.LINEAR.at(node, what="queries meet sums of keys times values")


def _sums(state: Operand) -> Iterator[_Sum]:
    """The sums and running sums of a product that a factor is, past layout and factors."""

    def above(place: Operand) -> list[Operand]:
        node = place.value.producer
        if (source := climb(place)) is not None:
            return [source]
        passes = node is not None and node.op in CAST | MULTIPLICATION
        return sides_of(node, place.axes) if node is not None and passes else []

    for place in walk([state], above):
        node = place.value.producer
        if node is None or len(node.outputs) != 1:
            continue
        if node.op in RUNNING_SUM:
            yield from _running(node, place)
        elif (product := read_contraction(node, place.axes)) and len(product.summed) == 1:
            yield node, product.summed[0], product.sides


def _running(node: Node, place: Operand) -> Iterator[_Sum]:
    (value,) = node.operands
    tokens = place.axes[attribute(node, "dim") % len(place.axes)]
    product = top(Operand(value, place.axes))
    maker = product.value.producer
    if maker is None or maker.op != "aten.mul.Tensor" or len(tokens) != 1:
        return
    left, right = sides_of(maker, product.axes)
    yield node, tokens[0], (left, right)


def _are_heads(token: Atom, sides: Sequence[Operand], state: set[Atom]) -> bool:
    """Whether keys and values have rows for the tokens, queries rows of their own or the same, and
    all three the same features. An exponential is another attention's: it pools.
    """
    *pair, query = sides
    found = projection(query)
    key, value = map(top, pair)
    if found is None or key.value is value.value or any(map(_is_exponential, pair)):
        return False  # a sum of squares is of one value alone
    rows, features = ({*part.atoms} for part in found)
    shared = features & state
    has_tokens = bool(rows - state) or {*resolve((token,))} <= rows
    return bool(shared) and has_tokens and all(_is_made(side, token, shared) for side in pair)


def _is_made(side: Operand, token: Atom, features: set[Atom]) -> bool:
    """Whether a projection with a row for each token makes an operand's features."""
    found = projection(side)
    if found is None:
        return False
    rows, made = found
    return {*resolve((token,))} <= {*rows.atoms} and features <= {*made.atoms}


def _is_exponential(side: Operand) -> bool:
    """Whether an exponential or a softmax makes an operand, which no projection then does."""

    def above(place: Operand) -> list[Operand]:
        node = place.value.producer
        if (source := climb(place)) is not None:
            return [source]
        passes = node is not None and node.op in POINTWISE and node.op != EXP
        return sides_of(node, place.axes) if node is not None and passes else []

    makers = (place.value.producer for place in walk([side], above))
    return any(node is not None and node.op == EXP for node in makers)
