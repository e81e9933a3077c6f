"""Attention without a softmax over keys: scores that weigh values after some other function.

Sigmoid and ReLU attention, sparsemax, exponentials that are normalised in a way that is no softmax,
and linear attention (Katharopoulos et al., 2020; Performer), which multiplies keys with values
first. No operator computes them; they are named, so that nobody has to wonder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attngraph.ir import Graph, Node, TensorType
from attngraph.ir.ops import op_def
from attngraph.passes.axes import Operand, climb, fresh_axes, resolve, top
from attngraph.passes.contraction import Contraction, read_contraction
from attngraph.passes.decline import ELEMENTWISE, MASKS
from attngraph.passes.exponentials import EXP, NORM, SUM, added, placed
from attngraph.passes.logits import Declined
from attngraph.passes.scalars import is_cast
from attngraph.passes.site import SOFTMAXES, pair_of

_FAR = 24
_MORE = "neg add.Scalar sub.Scalar rsub.Scalar rsub.Tensor"
_LINEAR = ELEMENTWISE | MASKS | {f"aten.{name}" for name in _MORE.split()}


@dataclass(frozen=True, slots=True)
class _Scores:
    """A product of queries and keys, and the functions between it and the product with values."""

    product: Contraction
    node: Node
    functions: tuple[Node, ...]


def strays(graph: Graph) -> Iterator[tuple[Node, Declined]]:
    """Each product with values whose weights no softmax makes, and what it is."""
    named: set[Node] = set()
    for root in list(graph):
        if len(root.outputs) != 1 or root.graph is None or not _is_float(root):
            continue
        values = read_contraction(root, fresh_axes(root.output.shape))
        if values is None or not values.summed or not _varies(values):
            continue
        for weights, other in ((values.left, values.right), (values.right, values.left)):
            scores = _climb_to_scores(weights, values)
            if scores is not None and not _has_features(other, scores.product):
                continue  # scores that are weighed themselves: an index of heads
            found = None if scores is None else _name(scores, other, values)
            if scores is not None and found is not None and scores.node not in named:
                named.add(scores.node)
                yield root, found


def _is_float(node: Node) -> bool:
    kind = node.output.type
    return isinstance(kind, TensorType) and kind.dtype.is_floating_point


def _varies(product: Contraction) -> bool:
    return not any(top(side).value.is_constant for side in (product.left, product.right))


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
    """Past layout and pointwise functions, but no softmax, to a product that has the key axis."""
    queue: list[tuple[Operand, tuple[Node, ...]]] = [(weights, ())]
    for _ in range(_FAR):
        if not queue:
            return None
        operand, functions = queue.pop(0)
        node = operand.value.producer
        if node is None or node.op in SOFTMAXES:
            continue
        product = read_contraction(node, operand.axes) if len(node.outputs) == 1 else None
        if product is not None:
            if product.summed and _varies(product) and pair_of(product, resolve(values.summed)):
                return _Scores(product, node, functions)
        elif (above := climb(operand)) is not None:
            queue.append((above, functions))
        elif _is_linear(node) or is_pointwise(node):
            further = functions if _is_linear(node) else (*functions, node)
            for value in node.inputs:
                if value is not None and value.tensor_type.dtype.is_floating_point:
                    queue.append((placed(operand.axes, value, node), further))
    return None


def _name(scores: _Scores, other: Operand, values: Contraction) -> Declined | None:
    if not scores.functions:
        pair = pair_of(scores.product, resolve(values.summed))
        mapped = pair is not None and _feature_map(other) and _feature_map(pair[1])
        return _linear_attention(scores.node) if mapped else None
    exponential = next((node for node in scores.functions if node.op == EXP), None)
    if exponential is not None and (total := _with_epsilon(exponential)) is not None:
        does = "is added to" if total.op == "aten.add.Scalar" else "is the least value of"
        return Declined(
            "epsilon-in-softmax",
            f"{added(total):g} {does} the sum that normalises the weights, so this is no softmax.",
            total,
            "Subtract the row maximum and leave the number out: the sum is then at least 1.",
        )
    names = " of ".join(dict.fromkeys(_function(node) for node in scores.functions))
    return Declined(
        "no-softmax",
        f"The values are weighed by {names} of the scores, which no softmax over the keys makes.",
        scores.functions[-1],
        "Use softmax(scores, -1), if attention with weights that sum to one is meant.",
    )


def _linear_attention(node: Node) -> Declined:
    return Declined(
        "linear-attention",
        "This is linear attention: feature maps of queries and keys, without a softmax over keys.",
        node,
        "It is kept as it is; no attention op computes it.",
    )


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
