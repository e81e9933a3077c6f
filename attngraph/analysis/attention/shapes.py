"""Shapes of graph around a softmax that no attention op computes, each with its refusal.

Where logits.py and weighted_sum.py end without an attention, these say what stands there
instead: additive attention, scores that are convolved or compared, weights that are mixed or read
twice. They only name: a shape that none of them knows is refused with the reason of the reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeGuard

from attngraph.analysis.attention.activations import (
    are_projections,
    contraction_at,
    is_context,
    is_elementwise,
    is_layout,
    is_product,
    keeps_scores,
    pairs_activations,
)
from attngraph.analysis.attention.joined import read_joined_scores
from attngraph.analysis.attention.logits import Logits
from attngraph.analysis.attention.refusals import Declined, Refusal
from attngraph.analysis.attention.roles import computed
from attngraph.analysis.attention.weighted_sum import Below, hands_on
from attngraph.analysis.layout.axes import Atom, Axes, Operand, resolve, top
from attngraph.analysis.layout.contraction import Contraction, read_contraction
from attngraph.analysis.values.scalars import fill_of, widens
from attngraph.analysis.walks import FAR, behind, origin, readers, users, varying, walk
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute
from attngraph.ir.traits import (
    ACTIVATION,
    ADDITIVE,
    CAST,
    CHOICE,
    CLAMP,
    GATHER,
    JOIN,
    LAYOUT,
    OPAQUE,
    PAD,
    POINTWISE,
    PRODUCT,
    REDUCTION,
    SCALE,
    SCATTER,
    SHIFT,
    SOFTMAX,
    TRIANGLE,
)

_CONV = "aten.conv2d"
_SUM = "aten.sum.dim_IntList"
_KEEPS_SIGN = SHIFT | SCALE | CLAMP


def additive(anchor: Node, *, has_values: bool = True) -> Declined | None:
    """Additive attention; without values, one whose weights are the result (pointer networks)."""
    node = _nonlinear_sum(anchor)
    if node is None or has_values:
        return None if node is None else Refusal.ADDITIVE.at(node)
    total = node.operands[0]
    is_spread = any(side.shape != total.shape for side in (total.producer or node).operands)
    return Refusal.NO_VALUES_OF_ADDITIVE.at(node) if is_spread else None


def _nonlinear_sum(anchor: Node) -> Node | None:
    """The nonlinearity of a sum, of which the logits are a weighted sum by constant weights."""

    def above(place: tuple[Value, bool]) -> Iterable[tuple[Value, bool]]:
        value, is_weighted = place
        node = value.producer
        if node is None or node.op in ACTIVATION:
            return []
        inputs = varying(node)
        if node.op in PRODUCT or node.op == _SUM:
            return [(inputs[0], True)] if not is_weighted and len(inputs) == 1 else []
        # What several inputs of a weighted sum hold is computed further on.
        if not keeps_scores(node) or (is_weighted and len(inputs) != 1):
            return []
        return [(source, is_weighted) for source in inputs]

    for value, is_weighted in walk([(source, False) for source in anchor.operands[:1]], above):
        node = value.producer
        if node is None or node.op not in ACTIVATION or node.inputs[0] is None:
            continue
        is_cap = node.op == "aten.tanh" and not is_weighted
        if not is_cap and _is_joined(origin(node.inputs[0], is_layout).producer):
            return node
    return None


def _is_joined(node: Node | None) -> bool:
    """A sum of queries and keys, or a projection of their concatenation, but of no products."""
    if node is not None and node.op == "aten.linear" and node.inputs[0] is not None:
        node = origin(node.inputs[0], is_layout).producer
        is_joined = node is not None and node.op == "aten.cat"
    else:
        is_joined = node is not None and node.op == "aten.add.Tensor"
    return node is not None and is_joined and not any(map(is_product, node.operands))


def renormalised(anchor: Node, axes: Axes, logits: Logits, keys: Sequence[Atom]) -> Declined | None:
    """Weights that are normalised again after the softmax, over another axis than its own.

    Not where a projection makes both axes of each token: those weights mix what the token has.
    """
    sides = [set(top(side).atoms) for side in logits.contraction.sides]
    own = {*resolve(keys)}
    for total in readers(anchor, lambda node: node.op in _KEEPS_SIGN | CAST):
        if total.op != _SUM:
            continue
        again = {atom for dim in attribute(total, "dim") or () for atom in resolve(axes[dim])}
        is_mixture = any(again | own <= side for side in sides)
        is_divided = any(node.inputs[0] is total.inputs[0] for node in divisions(total))
        if again and not again & own and is_divided and not is_mixture:
            return Refusal.RENORMALISED.at(total)
    return None


def divisions(total: Node) -> list[Node]:
    """The divisions by a sum, or by the sum and a small number."""
    found = readers(total, lambda node: node.op in _KEEPS_SIGN | LAYOUT | CAST)
    return [node for node in found if node.op == "aten.div.Tensor"]


def projection(
    anchor: Node, logits: Logits, pair: tuple[Operand, Operand], value: Operand
) -> Declined | None:
    """Scores that a projection makes of the keys, or of the queries, alone; None if attention fits.

    Queries that are weights fit, where one set of keys serves them all: not if each has values, or
    a copy of the keys, of its own.
    """
    query, key = map(computed, pair)
    if is_context(pair[1]):
        return None  # scores that are weighed again: heads that are mixed
    if key.value.is_constant:
        return Refusal.SOFTMAX_OF_PROJECTION.at(logits.node) if is_context(value) else None
    known, values = set(query.atoms), set(computed(value).atoms)
    if not query.value.is_constant or not known & values - set(key.atoms):
        return None
    known |= set(key.atoms)
    if any(set(step.operand.atoms) - known for step in logits.steps):
        return Refusal.NO_QUERIES.at(logits.node)
    if set(query.atoms) - set(logits.contraction.summed) <= values:
        return Refusal.POOLING.at(anchor)
    return Refusal.SOFTMAX_OF_PROJECTION.at(logits.node)


def without_roles(
    anchor: Node, logits: Logits, below: Below, keys: Sequence[Atom], why: str
) -> Declined:
    """What a product, a softmax and a product are whose axes are not those of an attention."""
    ends = [computed(side) for side in logits.contraction.sides]
    constant = [end.value.is_constant for end in ends]
    rows = set(below.probabilities.atoms) - set(resolve(keys))
    # Constant keys that weigh what each row has of its own: experts.
    if any(constant) and rows <= set(computed(below.value).atoms):
        return Refusal.POOLING.at(anchor)
    for end, other_is_constant in zip(ends, reversed(constant), strict=True):
        node = end.value.producer
        inner = None if node is None else read_contraction(node, end.axes)
        if inner is not None and other_is_constant and "query" in why:
            return Refusal.SCORES_MIXED.at(logits.node)
    return synthesizer(logits) or Refusal.AXES.at(anchor, why=why)


def synthesizer(logits: Logits) -> Declined | None:
    """Weights that a projection makes of each token alone (Tay et al., 2021)."""
    return Refusal.SYNTHESIZER.at(logits.node) if logits.is_projection else None


def of_itself(anchor: Node, below: Below) -> Declined | None:
    """A distribution that weighs what is made of it place by place, as its logarithms."""
    start = origin(top(below.value).value, lambda node: node.op in POINTWISE)
    if start.producer is not anchor:
        return None
    return Refusal.DISTRIBUTION.at(anchor, why="it weighs what is made of it, as an entropy does")


# Scores that are not read as a product


def without_product(
    anchor: Node, below: Below, declined: Declined, keys: Sequence[Atom]
) -> Declined | None:
    """What logits that are no product are; None where the softmax is no attention."""
    if declined.code != Refusal.NOT_A_PRODUCT.code:
        return declined
    if not resolve(keys):  # an axis of one element
        return Refusal.POOLING.at(anchor)
    source = anchor.inputs[0]
    if source is None or top(below.value).value.is_constant:
        return Refusal.DISTRIBUTION.at(anchor, why="what it weighs is constant")
    start = origin(source, keeps_scores)
    node = start.producer
    if _is_convolution(node):
        return _mixed_by("scores", node)
    is_pick = node is not None and (node.op == "aten.topk" or node.op in GATHER)
    if node is not None and is_pick and is_product(node.inputs[0]):
        return Refusal.PICKED.at(node, op=node.op)
    if _is_compared(source):
        return Refusal.COMPARED.at(declined.node)
    if (moved := _laid_out(anchor, declined)) is not None:
        return moved
    rows = set(below.probabilities.atoms) - set(resolve(keys))
    blamed = declined.node or anchor
    if rows <= set(below.value.atoms) and (rows or blamed.op in REDUCTION):
        return Refusal.POOLING.at(anchor)
    is_projected = not start.is_constant if node is None else are_projections(node)
    if not is_projected:
        return replace(declined, node=blamed)
    is_linear = is_context(below.value) or _is_value_again(below.root)
    return (Refusal.SOFTMAX_OF_PROJECTION if is_linear else Refusal.SYNTHESIZER).at(blamed)


def _mixed_by(what: str, mixer: Node) -> Declined:
    """A convolution of (B, H, S, T)."""
    weight = mixer.inputs[1]
    is_small = weight is not None and weight.shape[-2:] == (1, 1)
    across = "across heads" if is_small else "with those of other queries and keys"
    return Refusal.CONVOLVED.at(mixer, what=what, across=across)


def _is_compared(logits: Value) -> bool:
    """Whether the logits are a sum over a difference or sum that is taken of every pair.

    That is so for -‖q - k‖²: a query is broadcast along the keys there.
    """

    def above(place: tuple[Value, bool]) -> Iterable[tuple[Value, bool]]:
        value, is_summed = place
        node = value.producer
        if node is None or len(node.outputs) != 1:
            return []
        if node.op in REDUCTION:
            return [(source, True) for source in varying(node)[:1]]
        return [(s, is_summed) for s in varying(node)] if is_elementwise(node) else []

    for value, is_summed in walk([(logits, False)], above):
        node = value.producer
        if node is None or len(node.outputs) != 1:
            continue
        if node.op == "aten.cdist":
            return True
        pair = varying(node) if is_summed and node.op in ADDITIVE else []
        if len(pair) == 2 and any(1 in s.shape[:-1] and s.shape != value.shape for s in pair):
            return True
    return False


def _is_value_again(root: Node) -> bool:
    """Whether a product of weights and values enters another product of activations."""
    products = map(contraction_at, readers(root, keeps_scores))
    return any(found and found.summed and pairs_activations(found) for found in products)


# Weights that don't meet values


def without_values(anchor: Node, below: Declined | None, logits: Logits | Declined) -> Declined:
    """What a softmax is that no product with values follows; `below` says what follows instead."""
    source = anchor.inputs[0]
    if source is not None and (mixed := _convolved(anchor, source)) is not None:
        return mixed
    if isinstance(logits, Logits) and _are_scores(logits.contraction):
        return below or _changed(anchor) or Refusal.NO_VALUES.at(anchor)
    if isinstance(logits, Declined):
        found = _joined(anchor) or (below if is_product(source) else None)
        if found is not None:
            return found
    # Weights that meet activations in another way than an attention's do.
    changed = below or _changed(anchor)
    if changed is not None and not _enter_scores(anchor):
        changed = Refusal.POOLING.at(anchor)
    named = additive(anchor, has_values=False) or _laid_out(anchor, logits) or changed
    why = "no product with values follows over its axis"
    return named or Refusal.DISTRIBUTION.at(anchor, why=why)


def _enter_scores(anchor: Node) -> bool:
    """Whether products of queries and keys, one for each weight, enter a softmax in some way."""
    shape = anchor.operands[0].shape
    found = behind(anchor.operands, lambda node: contraction_at(node) is None)
    return any(value.shape == shape and is_product(value) for value in found)


def _laid_out(anchor: Node, logits: Logits | Declined) -> Declined | None:
    """Scores of queries and keys of which elements change places, or are written over, before
    their softmax."""

    moves = SCATTER | GATHER | PAD | JOIN

    def passes(node: Node) -> bool:
        return is_elementwise(node) or node.op in moves | OPAQUE

    found = list(behind(anchor.operands, passes))
    movers = [node for value in found if (node := value.producer) is not None and node.op in moves]
    if not movers or not isinstance(logits, Declined) or not any(map(is_product, found)):
        return None
    mover = movers[0]
    is_in_place = mover.op in SCATTER and is_product(mover.operands[0])
    return (Refusal.WRITTEN_OVER if is_in_place else Refusal.LAID_OUT).at(mover, op=mover.op)


def _are_scores(product: Contraction) -> bool:
    """Whether a product is one of two activations, or has such a product as a side.

    So talking heads mix scores with constant weights before the softmax.
    """
    ends = map(computed, product.sides)
    inner = [read_contraction(end.value.producer, end.axes) for end in ends if end.value.producer]
    return any(found and pairs_activations(found) for found in (product, *inner))


def _holds_scores(value: Value) -> bool:
    """Whether a value is scores, mixed across heads or not, past layout and elementwise ops."""
    node = origin(value, is_elementwise).producer
    product = None if node is None else contraction_at(node)
    return product is not None and _are_scores(product)


def _convolved(anchor: Node, source: Value) -> Declined | None:
    """Scores or weights that a convolution mixes across heads, or with their neighbours."""
    mixer = origin(source, keeps_scores).producer
    before = mixer if _is_convolution(mixer) else None
    if before is None and not _holds_scores(source):
        return None
    after = next((node for node in readers(anchor, keeps_scores) if node.op == _CONV), None)
    blamed = after or before
    return None if blamed is None else _mixed_by("weights" if before is None else "scores", blamed)


def _is_convolution(node: Node | None) -> TypeGuard[Node]:
    """Whether a node convolves scores, which are a product of queries and keys."""
    return node is not None and node.op == _CONV and is_product(node.inputs[0])


def _joined(anchor: Node) -> Declined | None:
    """Several products of queries and keys, joined along the keys for one softmax."""
    for value in behind(anchor.operands[:1], is_elementwise):
        node = value.producer
        if node is not None and node.op == "aten.cat" and any(map(is_product, node.operands)):
            found = read_joined_scores(node)
            return found if isinstance(found, Declined) else Refusal.JOINED_SCORES.at(node)
    return None


def _changed(anchor: Node) -> Declined | None:
    """Weights that pass through some function before a product with values."""

    def below(place: tuple[Node, Node | None]) -> Iterable[tuple[Node, Node | None]]:
        node, function = place
        for user in users(node):
            if len(user.outputs) != 1 or contraction_at(user) is not None:
                continue
            rounds = user.op in CAST and not widens(user)
            chooses = user.op in CHOICE and fill_of(user) is None  # others in some places
            if function is not None or (hands_on(user) and not rounds and not chooses):
                yield user, function
            elif user.output.shape == anchor.output.shape or _keeps_keys(user, anchor):
                yield user, user

    start: tuple[Node, Node | None] = (anchor, None)
    for node, function in walk([start], below):
        for user in users(node) if function is not None else ():
            product = contraction_at(user)
            if function is None or product is None or not pairs_activations(product):
                continue
            is_cut = function.op in TRIANGLE
            return (Refusal.WEIGHTS_CUT if is_cut else Refusal.WEIGHTS_CHANGED).at(
                function, op=function.op
            )
    return None


def _keeps_keys(reduction: Node, anchor: Node) -> bool:
    """Whether a sum or mean over other axes of the weights leaves the last one, as over heads."""
    shape = reduction.output.shape
    return reduction.op in REDUCTION and len(shape) > 1 and shape[-1] == anchor.output.shape[-1]


# Scores that something besides their softmax reads


def escapes(node: Node, until: set[Node]) -> bool:
    """Whether a node's result reaches the graph's outputs other than through `until`."""
    outputs = set(node.graph.outputs) if node.graph else set()
    found = list(walk([node], lambda at: [user for user in users(at) if user not in until]))
    return len(found) == FAR or any(outputs & set(at.outputs) for at in found)


def reused(scores: Node, anchor: Node) -> Declined:
    """What else reads the scores: another softmax, a later layer's scores, their logsumexp."""
    made = {scores}
    for user in readers(scores, lambda node: node is not anchor):
        if user is anchor:
            continue
        if user.op in SOFTMAX:
            return Refusal.READ_BY_SOFTMAX.at(scores, loc=user.loc)
        if user.op == "aten.logsumexp":
            return Refusal.READ_BY_LOGSUMEXP.at(user)
        others = [value for value in user.operands if value.producer not in made]
        if user.op == "aten.add.Tensor" and any(map(is_product, others)):
            return Refusal.READ_BY_RESIDUAL.at(scores, loc=user.loc)
        if user.op in PRODUCT:
            return Refusal.READ_BY_PRODUCT.at(scores, loc=user.loc)
        made.add(user)
    return Refusal.READ_ELSEWHERE.at(scores)
