"""Attention without a softmax over keys: scores that weigh values after some other function.

Sigmoid and ReLU attention, sparsemax, exponentials that are normalised in a way that is no softmax,
a softmax in blocks with a running maximum, and linear attention (Katharopoulos et al., 2020;
Performer), which multiplies keys with values first, or its scores with a decay (RetNet). No
operator computes them; they are named, so that nobody has to wonder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attngraph.analysis.attention.decline import ELEMENTWISE, MASKS, divisions, pairs_activations
from attngraph.analysis.attention.exponentials import EXP, NORM, SUM, added, placed
from attngraph.analysis.attention.logits import Declined
from attngraph.analysis.attention.site import SOFTMAXES, pair_of
from attngraph.analysis.layout.axes import Operand, climb, fresh_axes, resolve, top
from attngraph.analysis.layout.contraction import Contraction, read_contraction
from attngraph.analysis.values.scalars import is_cast
from attngraph.ir import Graph, Node, TensorType, Value
from attngraph.ir.ops import attribute, op_def

_FAR = 24
_FACTORS = frozenset(["aten.mul.Tensor", "aten.div.Tensor"])
_MORE = "neg add.Scalar sub.Scalar rsub.Scalar rsub.Tensor"
_TRIANGLES = frozenset(["aten.tril", "aten.triu"])
_LINEAR = ELEMENTWISE | MASKS | _TRIANGLES | {f"aten.{name}" for name in _MORE.split()}


@dataclass(frozen=True, slots=True)
class _Scores:
    """A product of queries and keys, and the functions between it and the product with values.

    `weighed` is what makes some of the scores matter more: a mask, or a factor for each pair.
    """

    product: Contraction
    node: Node
    functions: tuple[Node, ...]
    weighed: Node | None = None


def strays(graph: Graph) -> Iterator[tuple[Node, Declined]]:
    """Each product with values whose weights no softmax makes, and what it is."""
    named: set[Node] = set()
    for root in list(graph):
        if len(root.outputs) != 1 or root.graph is None or not _is_float(root):
            continue
        values = read_contraction(root, fresh_axes(root.output.shape))
        if values is None or not values.summed or not pairs_activations(values):
            continue
        for weights, other in ((values.left, values.right), (values.right, values.left)):
            scores = _climb_to_scores(weights, values)
            if scores is not None and not _has_features(other, scores.product):
                continue  # scores that are weighed themselves: an index of heads
            found = None if scores is None else _name(scores, other, values, root)
            if scores is not None and found is not None and scores.node not in named:
                named.add(scores.node)
                yield root, found


def _is_float(node: Node) -> bool:
    kind = node.output.type
    return isinstance(kind, TensorType) and kind.dtype.is_floating_point


def _has_features(values: Operand, scores: Contraction) -> bool:
    """Whether values have an axis of their own, as the features of an attention are."""
    known = {atom for side in (scores.left, scores.right) for atom in top(side).atoms}
    return bool(set(top(values).atoms) - known)


def is_pointwise(node: Node) -> bool:
    """Whether torch says that each element of the result depends on one element of each input."""
    tags = getattr(op_def(node.op).function, "tags", ())
    return torch.Tag.pointwise in tags and len(node.outputs) == 1


def _is_linear(node: Node) -> bool:
    return node.op in _LINEAR or is_cast(node)


def _climb_to_scores(weights: Operand, values: Contraction) -> _Scores | None:
    """Past layout and pointwise functions, but no softmax, to a product that has the key axis.

    Of several ways to it, the one with most functions.
    """
    keys = resolve(values.summed)
    found: _Scores | None = None
    start = weights.value.producer
    queue = [] if start is None else [(weights, _Scores(values, start, ()))]
    for _ in range(_FAR):
        if not queue:
            break
        operand, way = queue.pop(0)
        node = operand.value.producer
        if node is None or node.op in SOFTMAXES:
            continue
        product = read_contraction(node, operand.axes) if len(node.outputs) == 1 else None
        if product is not None:
            if (
                product.summed
                and pairs_activations(product)
                and pair_of(product, resolve(values.summed))
            ):
                is_further = found is None or len(way.functions) > len(found.functions)
                if found is None or (is_further and node is found.node):
                    found = replace(way, product=product, node=node)
        elif (above := climb(operand)) is not None:
            queue.append((above, way))
        elif _is_linear(node) or is_pointwise(node):
            if not _is_linear(node):
                way = replace(way, functions=(*way.functions, node))
            sources = [v for v in node.inputs if v and v.tensor_type.dtype.is_floating_point]
            sides = [placed(operand.axes, value, node) for value in sources]
            for side in sides:
                others = [set(top(other).atoms) for other in sides if other is not side]
                pairs = any(atoms & {*keys} and atoms - {*keys} for atoms in others)
                masks = node.op in MASKS or node.op in _TRIANGLES
                weighed = node if masks or (node.op in _FACTORS and pairs) else way.weighed
                queue.append((side, replace(way, weighed=weighed)))
    return found


def _name(scores: _Scores, other: Operand, values: Contraction, root: Node) -> Declined | None:
    if not scores.functions:
        query, key = pair_of(scores.product, resolve(values.summed)) or (None, None)
        if query is None or key is None:
            return None
        if _feature_map(key) and (_feature_map(other) or _feature_map(query)):
            has_features = set(top(query).atoms) - set(top(key).atoms)  # else it is a sum of keys
            mapped = _linear_attention("feature maps of queries and keys", scores.node)
            return mapped if has_features else None
        if scores.weighed is not None:
            return _linear_attention("scores with a mask or a decay", scores.weighed)
        if (total := _own_total(scores.node)) is not None:
            return _no_softmax("the scores divided by their own sum", total)
        return None
    exponential = next((node for node in scores.functions if node.op == EXP), None)
    if exponential is not None and (total := _with_epsilon(exponential)) is not None:
        does = "is added to" if total.op == "aten.add.Scalar" else "is the least value of"
        return Declined(
            "epsilon-in-softmax",
            f"{added(total):g} {does} the sum that normalises the weights, so this is no softmax.",
            total,
            "Subtract the row maximum and leave the number out: the sum is then at least 1.",
        )
    if exponential is not None and _is_rescaled(root):
        return Declined(
            "online-softmax",
            "The softmax is taken over the keys in blocks, with a running maximum and sum.",
            exponential,
            "Take one softmax over all keys: the fused operator works in blocks by itself.",
        )
    names = " of ".join(dict.fromkeys(_function(node) for node in scores.functions))
    return _no_softmax(f"{names} of the scores", scores.functions[-1])


def _no_softmax(weights: str, node: Node) -> Declined:
    return Declined(
        "no-softmax",
        f"The values are weighed by {weights}, which no softmax over the keys makes.",
        node,
        "Use softmax(scores, -1), if attention with weights that sum to one is meant.",
    )


def _linear_attention(what: str, node: Node) -> Declined:
    return Declined(
        "linear-attention",
        f"This is linear attention: {what}, without a softmax over keys.",
        node,
        "It is kept as it is; no attention op computes it.",
    )


def _is_rescaled(root: Node) -> bool:
    """Whether a product with values, or a sum it enters, is scaled by exponentials.

    So are results for blocks of keys, when a block brings a larger maximum.
    """

    def is_scaled(value: Value | None) -> bool:
        node = None if value is None else value.producer
        sides = node.inputs if node is not None and node.op == "aten.mul.Tensor" else ()
        tops = [top(Operand(side, fresh_axes(side.shape))).value.producer for side in sides if side]
        return any(above is not None and above.op == EXP for above in tops)

    sums = [user for user in root.output.users if user.op == "aten.add.Tensor"]
    after = [
        value for node in (root, *sums) for user in node.output.users for value in user.outputs
    ]
    return any(map(is_scaled, [*after, *(side for node in sums for side in node.inputs)]))


def _own_total(scores: Node) -> Node | None:
    """The sum of scores, or of their absolute values, that divides them."""
    queue = [scores]
    for _ in range(_FAR):
        for user in queue.pop(0).output.users if queue else ():
            if user.op == SUM or (user.op == NORM and attribute(user, "ord") == 1):
                return user if divisions(user) else None
            if _is_linear(user) or user.op == "aten.abs":
                queue.append(user)
    return None


def _function(node: Node) -> str:
    return node.op.removeprefix("aten.").partition(".")[0]


def _feature_map(operand: Operand) -> bool:
    """Whether a nonlinear function, but no softmax, made an operand."""
    for _ in range(_FAR):
        node = operand.value.producer
        if node is None:
            return False
        above = climb(operand)
        if above is not None:
            operand = above
        elif node.op == "aten.cat" and node.inputs[0] is not None:
            operand = Operand(node.inputs[0], fresh_axes(node.inputs[0].shape))
        elif _is_linear(node):
            sources = [v for v in node.inputs if v is not None and not v.is_constant]
            if not sources:
                return False
            operand = placed(operand.axes, max(sources, key=lambda v: len(v.shape)), node)
        else:
            return is_pointwise(node)
    return False


def _with_epsilon(exponential: Node) -> Node | None:
    """The node that adds a number to the sum of exponentials, past casts and masks of them."""
    queue: list[Node] = [exponential]
    for _ in range(_FAR):
        if not queue:
            return None
        for user in queue.pop(0).output.users:
            if user.op in (SUM, NORM):
                protected = [node for node in user.output.users if added(node) is not None]
                if protected:
                    return protected[0]
            elif _is_linear(user):
                queue.append(user)
    return None
