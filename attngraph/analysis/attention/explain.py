"""Explains scores that are no product: what they are instead, and whether it is an attention."""

from __future__ import annotations

from collections.abc import Sequence

from attngraph.analysis.attention.context import Below
from attngraph.analysis.attention.decline import (
    ELEMENTWISE,
    MASKS,
    is_context,
    is_elementwise,
    is_layout,
    is_product,
    linear_attention,
    mixed_by,
    mixer_of,
    pairs_activations,
    pooling,
    projected_by,
    sources_of,
)
from attngraph.analysis.attention.logits import Declined
from attngraph.analysis.layout.axes import Atom, fresh_axes, resolve, top
from attngraph.analysis.layout.contraction import read_contraction
from attngraph.ir import Node, Value

_PAIRS = frozenset(["aten.add.Tensor", "aten.sub.Tensor"])
_REDUCTIONS = frozenset(
    ["aten.sum.dim_IntList", "aten.mean.dim", "aten.linalg_vector_norm", "aten.norm.ScalarOpt_dim"]
)


def explain(
    anchor: Node, below: Below, declined: Declined, keys: Sequence[Atom]
) -> Declined | None:
    """A better name for logits that are no product; None where the softmax is no attention."""
    if declined.code != "logits-not-a-product":
        return declined
    if not resolve(keys):  # an axis of one element
        return pooling(anchor)
    rows = {atom for atom in below.probabilities.atoms if atom not in set(resolve(keys))}
    source = anchor.inputs[0]
    if top(below.value).value.is_constant:
        return None  # an expectation under a distribution
    if (mixer := mixer_of(source)) is not None:
        return mixed_by("scores", mixer)
    if (picked := _picked(source)) is not None:
        return picked
    if _compared(source):
        return Declined(
            declined.code,
            "The scores are a sum over differences, or sums, of queries and keys, not a product.",
            declined.node,
            "Write -|q - k|² as 2 q·k - |k|²: they differ by |q|², which a softmax doesn't see.",
        )
    if rows and rows <= set(below.value.atoms):
        return pooling(anchor)
    if _projected(source):
        if is_context(below.value) or _is_value_again(below.root):
            return linear_attention(declined.node or anchor)
        return projected_by(declined.node or anchor)
    return Declined(declined.code, declined.reason, declined.node or anchor, declined.hint)


def _picked(logits: Value | None) -> Declined | None:
    """Scores that are picked out of a product's, for values that are gathered for each query."""
    node = None if logits is None else logits.producer
    while node is not None and is_layout(node):
        node = None if node.inputs[0] is None else node.inputs[0].producer
    if node is None or node.op not in ("aten.topk", "aten.gather"):
        return None
    if node.inputs[0] is None or not is_product(node.inputs[0]):
        return None
    return Declined(
        "logits-not-a-product",
        f"The softmax is over scores that {node.op} picks, with values of their own for each "
        "query.",
        node,
        "Fill the scores that are not picked with -inf and keep all values: that mask fuses.",
    )


def _compared(logits: Value | None) -> bool:
    """Whether the logits are a sum over a difference or sum that is taken of every pair.

    That is so for -‖q - k‖²: a query is broadcast along the keys there.
    """
    queue: list[tuple[Value, bool]] = [] if logits is None else [(logits, False)]
    for _ in range(24):
        if not queue:
            return False
        value, is_summed = queue.pop(0)
        node = value.producer
        if node is None or len(node.outputs) != 1:
            continue
        varying = [source for source in sources_of(node) if not source.is_constant]
        if node.op == "aten.cdist":
            return True
        if node.op in _REDUCTIONS:
            queue.append((varying[0], True))
        elif is_summed and node.op in _PAIRS and len(varying) == 2:
            if any(1 in source.shape[:-1] and source.shape != value.shape for source in varying):
                return True
        elif is_elementwise(node):
            queue += [(source, is_summed) for source in varying]
    return False


def _is_value_again(root: Node) -> bool:
    """Whether a product of weights and values enters another product of activations."""
    queue = [root]
    for _ in range(8):
        for user in queue.pop(0).output.users if queue else ():
            product = None
            if len(user.outputs) == 1:
                product = read_contraction(user, fresh_axes(user.output.shape))
            if product is not None and product.summed and pairs_activations(product):
                return True
            if product is None and (is_layout(user) or user.op in ELEMENTWISE):
                queue.append(user)
    return False


def _projected(logits: Value | None) -> bool:
    """Whether the logits are a projection or an input, with nothing but layout and masks above."""
    while logits is not None and (node := logits.producer) is not None:
        if node.op in ("aten.linear", "aten.addmm", "aten.conv1d", "aten.conv2d"):
            return True
        if not is_layout(node) and node.op not in MASKS and node.op not in ELEMENTWISE:
            return False
        logits = node.inputs[1] if node.op == "aten.where.self" else node.inputs[0]
    return logits is not None and not logits.is_constant
