"""Names a softmax that can't be fused: additive, linear, mixed over heads, or no attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attngraph.ir import Node, Value
from attngraph.ir.ops import op_def
from attngraph.passes.axes import COPIES, LAYOUTS, RESHAPES, Atom, Operand, fresh_axes, resolve, top
from attngraph.passes.context import Below
from attngraph.passes.contraction import read_contraction
from attngraph.passes.logits import Declined, Logits
from attngraph.passes.roles import Stage, stages
from attngraph.passes.scalars import is_cast

_NONLINEAR = frozenset(
    ["aten.tanh", "aten.relu", "aten.leaky_relu", "aten.sigmoid", "aten.gelu", "aten.silu"]
)
ELEMENTWISE = frozenset(
    "aten." + name
    for name in ["add.Tensor", "sub.Tensor", "mul.Tensor", "mul.Scalar", "div.Scalar", "div.Tensor"]
)
MASKS = frozenset(
    [
        "aten.where.self",
        "aten.where.ScalarOther",
        "aten.where.ScalarSelf",
        "aten.masked_fill.Scalar",
    ]
)
_PAIRS = frozenset(["aten.add.Tensor", "aten.sub.Tensor"])
_REDUCTIONS = frozenset(
    ["aten.sum.dim_IntList", "aten.mean.dim", "aten.linalg_vector_norm", "aten.norm.ScalarOpt_dim"]
)
_WEIGHTED = frozenset(["aten.linear", "aten.matmul", "aten.addmm", "aten.sum.dim_IntList"])


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
    if rows and rows <= set(below.value.atoms) and not _compared(source):
        return pooling(anchor)
    if (mixer := _mixer(source)) is not None:
        return _mixed_heads("scores are mixed across heads before the softmax", mixer)
    if _projected(source):
        return Declined(
            "linear-attention",
            "This is linear attention: the softmax is taken of a projection, not of a product of "
            "queries and keys.",
            declined.node or anchor,
            "It is kept as it is; no attention op computes it.",
        )
    return Declined(declined.code, declined.reason, declined.node or anchor, declined.hint)


def additive(anchor: Node) -> Declined | None:
    """Additive attention, by the nonlinearity of a sum above its logits."""
    source = anchor.inputs[0]
    node = None if source is None else _additive(source)
    if node is None:
        return None
    return Declined(
        "additive",
        "This is additive (Bahdanau) attention: the scores are a nonlinear function of a sum "
        "of queries and keys, for which onnxruntime has no attention op.",
        node,
        "It is kept as it is; scaled dot-product attention would fuse.",
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
        varying = [source for source in _sources(node) if not source.is_constant]
        if node.op in _REDUCTIONS:
            queue.append((varying[0], True))
        elif is_summed and node.op in _PAIRS and len(varying) == 2:
            if any(1 in source.shape[:-1] and source.shape != value.shape for source in varying):
                return True
        elif _is_elementwise(node):
            queue += [(source, is_summed) for source in varying]
    return False


def _tags(node: Node) -> Sequence[torch.Tag]:
    return getattr(op_def(node.op).function, "tags", ())


def pooling(anchor: Node) -> Declined:
    """Weights for values that each row has of its own: gated pooling, or a mixture of experts."""
    return Declined(
        "pooling",
        "The softmax weighs values that each row has of its own, by scores without keys: pooling, "
        "or a mixture.",
        anchor,
    )


def synthesizer(logits: Logits, anchor: Node) -> Declined | None:
    """Weights that a projection makes of each token alone (Tay et al., 2021)."""
    sides = (logits.contraction.left, logits.contraction.right)
    if sum(top(side).value.is_constant for side in sides) != 1:
        return None
    return Declined(
        "synthesizer",
        "The scores are a projection of each token to one number per position (Synthesizer): "
        "there are no keys.",
        logits.node,
        "It is kept as it is; scores that are a product of queries and keys would fuse.",
    )


def convolved(anchor: Node) -> Declined | None:
    """Scores or weights that a 1 × 1 convolution mixes across heads."""
    source = anchor.inputs[0]
    if source is None:
        return None
    before, after = _mixer(source), None
    if before is None and not is_product(source):
        return None
    queue = [anchor.output]
    for _ in range(16):
        for user in queue.pop(0).users if queue else ():
            if _is_mixing(user):
                after = after or user
            elif user.op in ELEMENTWISE or user.op in MASKS or _is_layout(user):
                queue += user.outputs
    mixer = after or before
    what = "weights are" if before is None else "scores are"
    return None if mixer is None else _mixed_heads(f"{what} mixed across heads", mixer)


def _mixed_heads(what: str, mixer: Node) -> Declined:
    return Declined(
        "talking-heads",
        f"The {what} by a convolution.",
        mixer,
        "No attention op mixes heads; the layer stays as it is.",
    )


def _is_mixing(node: Node) -> bool:
    """Whether a node is a 1 × 1 convolution of (B, H, S, T)."""
    weight = node.inputs[1] if node.op == "aten.conv2d" else None
    return weight is not None and weight.shape[-2:] == (1, 1)


def _mixer(scores: Value | None) -> Node | None:
    """The 1 × 1 convolution that made scores of a product of queries and keys."""
    while scores is not None and (node := scores.producer) is not None:
        if _is_mixing(node):
            source = node.inputs[0]
            return node if source is not None and is_product(source) else None
        if not _is_layout(node) and node.op not in MASKS and node.op not in ELEMENTWISE:
            return None
        scores = node.inputs[1] if node.op == "aten.where.self" else node.inputs[0]
    return None


def is_mixture(
    logits: Logits, value: Sequence[Stage], scores: Operand, keys: Sequence[Atom]
) -> bool:
    """Whether constant keys weigh values that each row has of its own: experts, not attention."""
    sides = (logits.contraction.left, logits.contraction.right)
    if not any(stages(side)[-1].operand.value.is_constant for side in sides):
        return False
    rows = set(scores.atoms) - set(resolve(keys))
    return rows <= set(value[-1].operand.atoms)


def _sources(node: Node) -> list[Value]:
    return [value for value in node.inputs if value is not None]


def _additive(logits: Value) -> Node | None:
    """The nonlinearity of a sum, of which the logits are a weighted sum by constant weights."""
    queue: list[tuple[Value, bool]] = [(logits, False)]
    for _ in range(24):
        if not queue:
            return None
        value, weighted = queue.pop(0)
        node = value.producer
        if node is None:
            continue
        if node.op in _NONLINEAR:
            total = node.inputs[0].producer if node.inputs[0] is not None else None
            is_cap = node.op == "aten.tanh" and not weighted
            if not is_cap and total is not None and _is_joined(total):
                return node
        elif node.op in _WEIGHTED:
            varying = [source for source in _sources(node) if not source.is_constant]
            if not weighted and len(varying) == 1:
                queue.append((varying[0], True))
        elif node.op in ELEMENTWISE or node.op in MASKS or _is_layout(node):
            queue += [(source, weighted) for source in _sources(node)]
    return None


def joined(anchor: Node) -> Declined | None:
    """Several products of queries and keys, joined along the keys for one softmax."""
    queue = _sources(anchor)[:1]
    for _ in range(16):
        node = queue.pop(0).producer if queue else None
        if node is None:
            continue
        if node.op == "aten.cat":
            if any(is_product(part) for part in _sources(node)):
                return Declined(
                    "joined-scores",
                    "The scores of several products are joined along the keys for one softmax, and "
                    "its parts meet values of their own.",
                    node,
                    "Concatenate the keys and the values instead of the scores.",
                )
        elif _is_elementwise(node):
            queue += _sources(node)
    return None


def is_product(value: Value) -> bool:
    """Whether a value is a product of two activations, past layout, scales, caps and masks."""
    node = value.producer
    while node is not None and _is_elementwise(node):
        sources = [source for source in _sources(node) if _is_activation(source)]
        node = max(sources, key=lambda v: len(v.shape)).producer if sources else None
    if node is None or len(node.outputs) != 1:
        return False
    product = read_contraction(node, fresh_axes(node.output.shape))
    if product is None:
        return False
    return not any(top(side).value.is_constant for side in (product.left, product.right))


def _is_elementwise(node: Node) -> bool:
    return node.op in MASKS or _is_layout(node) or torch.Tag.pointwise in _tags(node)


def _is_activation(value: Value) -> bool:
    return not value.is_constant and value.dtype.is_floating_point


def _is_joined(node: Node) -> bool:
    """A sum of queries and keys, or a projection of their concatenation."""
    if node.op == "aten.add.Tensor":
        return True
    source = node.inputs[0] if node.op == "aten.linear" else None
    while source is not None and source.producer is not None and _is_layout(source.producer):
        source = source.producer.inputs[0]
    return source is not None and source.producer is not None and source.producer.op == "aten.cat"


def _is_layout(node: Node) -> bool:
    return node.op in RESHAPES or node.op in COPIES or node.op in LAYOUTS or is_cast(node)


def _projected(logits: Value | None) -> bool:
    """Whether the logits are a projection or an input, with nothing but layout and masks above."""
    while logits is not None and (node := logits.producer) is not None:
        if node.op in ("aten.linear", "aten.addmm", "aten.conv1d", "aten.conv2d"):
            return True
        if not _is_layout(node) and node.op not in MASKS and node.op not in ELEMENTWISE:
            return False
        logits = node.inputs[1] if node.op == "aten.where.self" else node.inputs[0]
    return logits is not None and not logits.is_constant


def mixed_heads(logits: Logits, why: str) -> Declined | None:
    """Talking heads: the keys' side of the product is itself a product of queries and keys."""
    for side in (logits.contraction.left, logits.contraction.right):
        operand = stages(side)[-1].operand
        node = operand.value.producer
        if node is not None and read_contraction(node, operand.axes) is not None:
            other = _other(logits, side)
            if stages(other)[-1].operand.value.is_constant and "query" in why:
                return Declined(
                    "talking-heads",
                    "The scores are mixed across heads before the softmax.",
                    logits.node,
                    "No attention op mixes heads; the layer stays as it is.",
                )
    return None


def _other(logits: Logits, side: Operand) -> Operand:
    product = logits.contraction
    return product.right if side is product.left else product.left
