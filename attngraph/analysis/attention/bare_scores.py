"""Scores that weigh values as they are: the axes tell an attention, where no function does.

A product of three activations is an attention where one of the two sums is over tokens, the rows of
the projections that made both of its sides, and the other over features that projections made:
(Q Kᵀ) V, or Q (Kᵀ V) as in Galerkin-type attention (Cao, 2021). Products of rotations, of factors
that a network gives, or of a Gram matrix have no such pair. Scores may also be what a network makes
of a query and each key, joined (deep interest network, Zhou et al., 2018).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from attngraph.analysis.attention.activations import pairs_activations
from attngraph.analysis.attention.refusals import Declined, Refusal
from attngraph.analysis.layout.axes import (
    Atom,
    Axes,
    Operand,
    climb,
    resolve,
    sides_of,
    spread,
    top,
)
from attngraph.analysis.layout.contraction import Contraction, read_contraction
from attngraph.analysis.walks import walk
from attngraph.ir import Node
from attngraph.ir.ops import attribute
from attngraph.ir.traits import (
    ACTIVATION,
    ADDITIVE,
    BATCH_NORM,
    JOIN,
    NORM,
    POINTWISE,
    ROTARY,
)

# On the way up from weights: whether a projection lies below, and the last activation above it.
_Place = tuple[Operand, bool, Node | None]


def bare(node: Node, product: Contraction, values: Contraction, other: Operand) -> Declined | None:
    """The attention of scores without a function, `product` at `node`, which `values` sums up.

    `other` is what the product is multiplied with.
    """
    keys = [side for side in product.sides if _has(side, values.summed)]
    rest = [side for side in product.sides if not _has(side, values.summed)]
    if len(keys) != 1 or len(rest) != 1:
        return None
    (key,), (query,) = keys, rest
    if _are_rows(values.summed, (key, other)) and _are_features(product.summed, (query, key)):
        return Refusal.NO_SOFTMAX.at(node, weights="the scores themselves")
    if _are_rows(product.summed, (query, key)) and _are_features(values.summed, (key, other)):
        return Refusal.LINEAR.at(node, what="queries meet products of keys and values")
    return None


def _has(side: Operand, atoms: Iterable[Atom]) -> bool:
    return bool({*resolve(atoms)} & {*top(side).atoms})


def _are_rows(atoms: Sequence[Atom], sides: Iterable[Operand]) -> bool:
    """Whether an axis counts the rows that projections were made of, on every side."""
    found = [projection(side) for side in sides]
    return all(made is not None and {*resolve(atoms)} <= {*made[0].atoms} for made in found)


def _are_features(atoms: Sequence[Atom], sides: Iterable[Operand]) -> bool:
    """Whether an axis counts features that projections made, on every side."""
    found = [projection(side) for side in sides]
    return all(made is not None and {*resolve(atoms)} <= {*made[1].atoms} for made in found)


def projection(side: Operand) -> tuple[Operand, Operand] | None:
    """The rows and the weight of the projection that made an operand.

    It may be followed by norms, rotations and pointwise functions.
    """

    def above(place: Operand) -> Iterator[Operand]:
        node = place.value.producer
        if (source := climb(place)) is not None:
            yield source
        elif node is not None and node.op in NORM | ROTARY:
            yield Operand(node.operands[0], place.axes)
        elif node is not None and node.op in POINTWISE:
            yield from sides_of(node, place.axes)

    for place in walk([side], above):
        node = place.value.producer
        product = None if node is None else _contraction(node, place.axes)
        if product is not None and not pairs_activations(product):
            return _rows_and_weight(product)
    return None


def _contraction(node: Node, axes: Axes) -> Contraction | None:
    return read_contraction(node, axes) if len(node.outputs) == 1 else None


def _rows_and_weight(product: Contraction) -> tuple[Operand, Operand]:
    left, right = map(top, product.sides)
    return (right, left) if left.value.is_constant else (left, right)


def by_a_network(values: Contraction) -> Iterator[Node]:
    """The nonlinearity of a network that makes scores of a query with each key, and no softmax."""
    keys = {*resolve(values.summed)}
    for weights, other in (values.sides, values.sides[::-1]):
        known, weighed = ({*top(side).atoms} for side in (weights, other))
        if keys <= known & weighed and weighed - known:
            yield from _networks(weights, keys, weighed)


def _networks(weights: Operand, keys: set[Atom], weighed: set[Atom]) -> Iterator[Node]:
    """An activation below a projection that makes one score, or one of each head that values have.

    What is made of a row for features of its own is a filter, as of a convolution over points.
    """

    def above(place: _Place) -> Iterator[_Place]:
        operand, is_made, activation = place
        node = operand.value.producer
        if node is None or not keys <= {*operand.atoms}:
            return
        if (source := climb(operand)) is not None:
            yield source, is_made, activation
        elif (product := _contraction(node, operand.axes)) is not None:
            rows, weight = _rows_and_weight(product)
            features = {*weight.atoms} - {*resolve(product.summed)}
            if weight.value.is_constant and (is_made or features <= weighed):
                yield rows, True, activation
        elif node.op in POINTWISE | ACTIVATION | BATCH_NORM:
            is_activation = is_made and node.op in ACTIVATION
            for value in node.operands if node.op in POINTWISE else node.operands[:1]:
                found = node if is_activation and activation is None else activation
                yield spread(value, operand.axes, node.output.shape), is_made, found

    start: _Place = weights, False, None
    for operand, _, activation in walk([start], above):
        node = operand.value.producer
        if node is not None and activation is not None and _joins(operand, node, keys):
            yield activation


def _joins(operand: Operand, node: Node, keys: set[Atom]) -> bool:
    """Whether a node brings what has a row for each key together with what has none."""
    if node.op in ADDITIVE:
        sides = sides_of(node, operand.axes)
    elif node.op in JOIN:
        dim = attribute(node, "dim") % len(operand.axes)
        sides = [
            Operand(value, tuple(() if at == dim else axis for at, axis in enumerate(operand.axes)))
            for value in node.operands
        ]
    else:
        return False
    have = [keys <= {*top(side).atoms} for side in sides if not top(side).value.is_constant]
    return any(have) and not all(have)
