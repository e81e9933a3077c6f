"""Attention without a softmax over keys: scores that weigh values after some other function.

Sigmoid and ReLU attention, sparsemax, exponentials that are normalised in a way that is no softmax,
a softmax in blocks with a running maximum; linear attention (Katharopoulos et al., 2020), which
multiplies keys with values first, or scores with a decay (RetNet); attention over the edges of a
graph (Veličković et al., 2018). No operator computes them, so each is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, product

from attngraph.analysis.attention.activations import contraction_at, pairs_activations
from attngraph.analysis.attention.bare_scores import bare, by_a_network
from attngraph.analysis.attention.by_feature import by_feature
from attngraph.analysis.attention.exponentials import EXP, NORM, SUM, added
from attngraph.analysis.attention.refusals import Declined, Refusal
from attngraph.analysis.attention.roles import pair_of
from attngraph.analysis.attention.shapes import divisions
from attngraph.analysis.layout.axes import (
    Operand,
    climb,
    fresh_axes,
    resolve,
    sides_of,
    spread,
    top,
)
from attngraph.analysis.layout.contraction import Contraction, read_contraction
from attngraph.analysis.walks import behind, origin, readers, users, varying, walk
from attngraph.ir import Graph, Node, TensorType, Value
from attngraph.ir.ops import attribute
from attngraph.ir.traits import (
    ADDITIVE,
    CAST,
    CHOICE,
    GATHER,
    JOIN,
    LAYOUT,
    LOG_SUM,
    MULTIPLICATIVE,
    NEGATION,
    POINTWISE,
    REVERSED,
    RUNNING_SUM,
    SCALE,
    SCATTER,
    SHIFT,
    SOFTMAX,
    TRIANGLE,
)

_LINEAR = ADDITIVE | SHIFT | MULTIPLICATIVE | SCALE | NEGATION | REVERSED | CHOICE | TRIANGLE | CAST


def without_softmax(graph: Graph) -> Iterator[tuple[Node, Declined]]:
    """Each product with values, or division of a scattered sum, that is one of these, and which."""
    named: set[Node] = set()
    for root in list(graph):
        readings = _weighed(root), _over_edges(root), _of_keys_alone(root), _running(root)
        for scores, declined in chain(*readings, by_feature(root)):
            if scores not in named:
                named.add(scores)
                yield root, declined


def _over_edges(quotient: Node) -> Iterator[tuple[Node, Declined]]:
    """Exponentials that are divided by their sums, which are scattered, one for each target."""
    if quotient.op != "aten.div.Tensor":
        return
    scatter = _above(quotient.inputs[1])
    if scatter is None or scatter.op not in SCATTER or not _is_sum(scatter):
        return
    exponential = _above(scatter.inputs[2])
    if exponential is not None and exponential.op == EXP:
        yield exponential, Refusal.GRAPH.at(scatter)


def _of_keys_alone(quotient: Node) -> Iterator[tuple[Node, Declined]]:
    """Exponentials that meet no queries: the sum of values that they weigh, over their own sum."""
    if quotient.op != "aten.div.Tensor":
        return
    weighed, totals = ([*_sums(value)] for value in quotient.inputs)
    for node, total in product(weighed, totals):
        shared = _exponentials(node) & _exponentials(total)
        if node is not total and len(shared) == 1:
            yield shared.pop(), Refusal.OF_KEYS_ALONE.at(node)


def _sums(value: Value | None) -> Iterator[Node]:
    """The sums and products that a side of a quotient is, past factors."""

    def passes(node: Node) -> bool:
        return node.op in LAYOUT | CAST | MULTIPLICATIVE or bool(added(node))

    for found in behind([] if value is None else [value], passes):
        node = found.producer
        if node is not None and (
            node.op == SUM or (len(node.outputs) == 1 and contraction_at(node))
        ):
            yield node


def _exponentials(sum_: Node) -> set[Node]:
    """The exponentials in a sum, of computed scores that are no product of activations."""
    found = (
        value.producer
        for value in behind(sum_.operands, lambda node: node is sum_ or node.op in _LINEAR | LAYOUT)
    )
    powers = {node for node in found if node is not None and node.op == EXP}
    return {node for node in powers if _is_of_inputs(node) and not _has_pairs(node)}


def _is_of_inputs(node: Node) -> bool:
    """Whether a node is no table of the model's own, which may be cut to a size of the inputs."""

    def above(value: Value) -> list[Value]:
        return [] if value.producer is None else varying(value.producer)

    return any(value.producer is None for value in walk(varying(node), above, limit=None))


def _is_computed(side: Operand) -> bool:
    """Whether a side of a product is computed from the inputs, not from their sizes alone."""
    node = top(side).value.producer
    return node is None or _is_of_inputs(node)


def _has_pairs(power: Node) -> bool:
    """Whether the scores of exponentials are read from a product of activations."""
    through = _LINEAR | LAYOUT | POINTWISE | JOIN
    products = (
        contraction_at(value.producer)
        for value in behind(power.operands, lambda node: node.op in through)
        if value.producer is not None and len(value.producer.outputs) == 1
    )
    return any(found is not None and pairs_activations(found) for found in products)


def _is_sum(scatter: Node) -> bool:
    return scatter.op.endswith("_add") or scatter.attrs.get("reduce") == "sum"


def _above(source: Value | None) -> Node | None:
    """What makes a value, past layout, gathers and a small number."""

    def passes(node: Node) -> bool:
        return node.op in LAYOUT | CAST | GATHER or added(node) is not None

    return None if source is None else origin(source, passes).producer


@dataclass(frozen=True, slots=True)
class _Scores:
    """A product of queries and keys, and the functions between it and the product with values.

    `weighed` is what makes some of the scores matter more: a mask, or a factor for each pair.
    """

    product: Contraction
    node: Node
    functions: tuple[Node, ...]
    weighed: Node | None = None

    @property
    def are_normalised(self) -> bool:
        """Whether they are exponentials that a sum of them divides: told of one feature as well."""
        return any(map(_is_normalised, self.functions))


def _is_normalised(power: Node) -> bool:
    """Whether an exponential is summed and divided, or of a difference from a log of a sum."""
    if power.op != EXP:
        return False
    below = readers(power, lambda node: node.op in _LINEAR)
    above = power.inputs[0].producer if power.inputs[0] is not None else None
    logs = () if above is None else (value.producer for value in above.operands)
    return any(node.op == SUM for node in below) or any(
        node is not None and node.op in LOG_SUM for node in logs
    )


def _weighed(root: Node) -> Iterator[tuple[Node, Declined]]:
    """Products of queries and keys that weigh the values of another product, `root`."""
    kind = root.output.type if len(root.outputs) == 1 else None
    if not isinstance(kind, TensorType) or not kind.dtype.is_floating_point:
        return
    values = contraction_at(root)
    if values is None or not values.summed or not pairs_activations(values):
        return
    for weights, other in (values.sides, values.sides[::-1]):
        scores = _climb_to_scores(weights, values)
        if scores is None or not (scores.are_normalised or _has_features(other, scores.product)):
            continue  # scores that are weighed themselves: an index of heads
        if not _has_queries(weights, other, values, scores.product):
            continue  # values that a linear makes of another attention's
        if not all(map(_is_computed, (other, *scores.product.sides))):
            continue  # a transform: cosines and sines of a length that is open
        if (found := _name(scores, other, values, root)) is not None:
            yield scores.node, found
    for node in by_a_network(values):
        yield node, Refusal.NO_SOFTMAX.at(node, weights="what a network makes of queries and keys")


def _running(root: Node) -> Iterator[tuple[Node, Declined]]:
    """Running sums of outer products of keys and values that queries are multiplied with."""
    queries = contraction_at(root)
    if queries is None or not queries.summed or not pairs_activations(queries):
        return

    def above(place: Operand) -> list[Operand]:
        node = place.value.producer
        if (source := climb(place)) is not None:
            return [source]
        if node is None or node.op not in _LINEAR | POINTWISE | RUNNING_SUM:
            return []
        return sides_of(node, place.axes)

    for state in queries.sides:
        summed: set[Node] = set()
        for place in walk([state], above):
            node = place.value.producer
            if node is not None and node.op in RUNNING_SUM:
                summed.add(node)
            elif node is not None and summed and _is_outer(place, queries):
                yield node, Refusal.LINEAR_RUNNING.at(node)


def _is_outer(place: Operand, queries: Contraction) -> bool:
    """Whether a value is a product of keys and values: each side has features of its own, one of
    which the queries are multiplied with."""
    node = place.value.producer
    if node is None or node.op not in MULTIPLICATIVE or len(node.operands) != 2:
        return False
    left, right = ({*side.atoms} for side in sides_of(node, place.axes))
    is_outer = bool(left - right) and bool(right - left)
    return is_outer and bool({*resolve(queries.summed)} & (left ^ right))


def _has_features(values: Operand, scores: Contraction) -> bool:
    """Whether values have an axis of their own, as the features of an attention are."""
    known = {atom for side in scores.sides for atom in top(side).atoms}
    return bool(set(top(values).atoms) - known)


def _has_queries(
    weights: Operand, other: Operand, values: Contraction, scores: Contraction
) -> bool:
    """Whether the axis that the weights have alone, if there is one, is the scores' own."""
    own = {*top(weights).atoms} - {*resolve(values.summed)} - {*top(other).atoms}
    return not own or any(own & {*top(side).atoms} for side in scores.sides)


def _climb_to_scores(weights: Operand, values: Contraction) -> _Scores | None:
    """Past layout, pointwise functions and mixed heads, but no softmax, to a product that has the
    key axis.

    Of several ways to it, the one with most functions.
    """
    keys = {*resolve(values.summed)}

    def above(place: tuple[Operand, _Scores]) -> Iterator[tuple[Operand, _Scores]]:
        operand, way = place
        node = operand.value.producer
        if node is None or node.op in SOFTMAX:
            return
        if (mixing := _product(operand)) is not None:  # heads by weights, say
            for side, other in (mixing.sides, mixing.sides[::-1]):
                if top(other).value.is_constant and keys <= set(top(side).atoms):
                    yield side, way
            return
        if (source := climb(operand)) is not None:
            yield source, way
            return
        if node.op not in _LINEAR:
            if node.op not in POINTWISE or len(node.outputs) != 1:
                return
            way = replace(way, functions=(*way.functions, node))
        inputs = [v for v in node.operands if v.tensor_type.dtype.is_floating_point]
        sides = [spread(value, operand.axes, node.output.shape) for value in inputs]
        for side in sides:
            others = [set(top(other).atoms) for other in sides if other is not side]
            pairs = any(atoms & keys and atoms - keys for atoms in others)
            masks = node.op in CHOICE | TRIANGLE
            weighed = node if masks or (node.op in MULTIPLICATIVE and pairs) else way.weighed
            yield side, replace(way, weighed=weighed)

    found: _Scores | None = None
    start = weights.value.producer
    starts = [] if start is None else [(weights, _Scores(values, start, ()))]
    for operand, way in walk(starts, above):
        node, product = operand.value.producer, _product(operand)
        if node is None or product is None or not (product.summed or way.are_normalised):
            continue
        if pairs_activations(product) and pair_of(product, values.summed):
            is_further = found is None or len(way.functions) > len(found.functions)
            if found is None or (is_further and node is found.node):
                found = replace(way, product=product, node=node)
    return found


def _product(operand: Operand) -> Contraction | None:
    node = operand.value.producer
    if node is None or node.op in SOFTMAX or len(node.outputs) != 1:
        return None
    return read_contraction(node, operand.axes)


def _name(scores: _Scores, other: Operand, values: Contraction, root: Node) -> Declined | None:
    if not scores.functions:
        pair = pair_of(scores.product, values.summed)
        if pair is None:
            return None
        query, key = pair
        if _has_feature_map(key) and (_has_feature_map(other) or _has_feature_map(query)):
            if not set(top(query).atoms) - set(top(key).atoms):
                return None  # a sum of keys
            return Refusal.LINEAR.at(scores.node, what="feature maps of queries and keys")
        if scores.weighed is not None:
            return Refusal.LINEAR_MASKED.at(scores.weighed)
        if (total := _own_total(scores.node)) is not None:
            return Refusal.NO_SOFTMAX.at(total, weights="the scores divided by their own sum")
        return bare(scores.node, scores.product, values, other)
    exponential = next((node for node in scores.functions if node.op == EXP), None)
    if exponential is not None and (total := _with_epsilon(exponential)) is not None:
        does = "is added to" if total.op == "aten.add.Scalar" else "is the least value of"
        return Refusal.EPSILON.at(total, epsilon=added(total), does=does)
    if exponential is not None and _is_rescaled(root):
        return Refusal.ONLINE.at(exponential)
    names = [node.op.removeprefix("aten.").partition(".")[0] for node in scores.functions]
    weights = f"{' of '.join(dict.fromkeys(names))} of the scores"
    return Refusal.NO_SOFTMAX.at(scores.functions[-1], weights=weights)


def _is_rescaled(root: Node) -> bool:
    """Whether a product with values, or a sum it enters, is scaled by exponentials.

    So are results for blocks of keys, when a block brings a larger maximum.
    """

    def is_scaled(value: Value | None) -> bool:
        node = None if value is None else value.producer
        sides = node.operands if node is not None and node.op == "aten.mul.Tensor" else ()
        tops = [top(Operand(side, fresh_axes(side.shape))).value.producer for side in sides]
        return any(above is not None and above.op == EXP for above in tops)

    sums = [user for user in users(root) if user.op == "aten.add.Tensor"]
    after = [value for node in (root, *sums) for user in users(node) for value in user.outputs]
    return any(map(is_scaled, [*after, *(side for node in sums for side in node.inputs)]))


def _own_total(scores: Node) -> Node | None:
    """The sum of scores, or of their absolute values, that divides them."""
    for user in readers(scores, lambda node: node.op in _LINEAR or node.op == "aten.abs"):
        if user.op == SUM or (user.op == NORM and attribute(user, "ord") == 1):
            return user if divisions(user) else None
    return None


def _with_epsilon(exponential: Node) -> Node | None:
    """The node that adds a number to the sum of exponentials, past casts and masks of them."""
    totals = [
        node
        for node in readers(exponential, lambda node: node.op in _LINEAR)
        if node.op in (SUM, NORM)
    ]
    return next((user for node in totals for user in users(node) if added(user) is not None), None)


def _has_feature_map(operand: Operand) -> bool:
    """Whether a nonlinear function, but no softmax, made an operand."""

    def passes(node: Node) -> bool:
        return node.op in LAYOUT | JOIN | _LINEAR

    node = origin(operand.value, passes).producer
    return node is not None and node.op in POINTWISE and not passes(node)
