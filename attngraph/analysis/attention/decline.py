"""Names a softmax that can't be fused: additive, linear, mixed over heads, or no attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attngraph.analysis.attention.logits import Declined, Logits
from attngraph.analysis.attention.roles import Stage, stages
from attngraph.analysis.layout.axes import (
    COPIES,
    LAYOUTS,
    RESHAPES,
    Atom,
    Axes,
    Operand,
    fresh_axes,
    resolve,
    top,
)
from attngraph.analysis.layout.contraction import Contraction, read_contraction
from attngraph.analysis.values.scalars import is_cast
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute, op_def

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
_CONV = "aten.conv2d"
_KEEPING = frozenset(["aten.add.Scalar", "aten.clamp_min", "aten.clamp", "aten.mul.Scalar"])
_WEIGHTED = frozenset(["aten.linear", "aten.matmul", "aten.addmm", "aten.sum.dim_IntList"])


def linear_attention(node: Node) -> Declined:
    """A softmax of queries over their features, or of keys over tokens, each by itself."""
    return Declined(
        "linear-attention",
        "This is linear attention: the softmax is taken of a projection, not of a product of "
        "queries and keys.",
        node,
        "It is kept as it is; no attention op computes it.",
    )


def renormalised(anchor: Node, axes: Axes, logits: Logits, keys: Sequence[Atom]) -> Declined | None:
    """Weights that are normalised again after the softmax, over another axis than its own.

    Not where a projection makes both axes of each token: those weights mix what the token has.
    """
    sides = [set(top(side).atoms) for side in (logits.contraction.left, logits.contraction.right)]
    queue = [anchor.output]
    for _ in range(16):
        value = queue.pop(0) if queue else None
        for user in () if value is None else value.users:
            if user.op == "aten.sum.dim_IntList":
                again = [
                    atom for dim in attribute(user, "dim") or () for atom in resolve(axes[dim])
                ]
                both = {*again, *resolve(keys)}
                is_other = again and not {*again} & {*resolve(keys)}
                is_mixture = any(both <= side for side in sides)
                is_divided = any(node.inputs[0] is value for node in divisions(user))
                if is_other and is_divided and not is_mixture:
                    return Declined(
                        "softmax-axis",
                        "The weights are normalised by the softmax over one axis, and by their sum "
                        "over another, as in slot attention: no attention op does both.",
                        user,
                        "It is kept as it is; weights from one softmax over the keys would fuse.",
                    )
            elif user.op in _KEEPING or is_cast(user):
                queue += user.outputs
    return None


def divisions(total: Node) -> list[Node]:
    """The divisions by a sum, or by the sum and a small number."""
    queue, found = [total], []
    for _ in range(8):
        for user in queue.pop(0).output.users if queue else ():
            if user.op == "aten.div.Tensor" and user not in found:
                found.append(user)
            elif user.op in _KEEPING or is_layout(user):
                queue.append(user)
    return found


def projection(
    anchor: Node, logits: Logits, pair: tuple[Operand, Operand], value: Operand
) -> Declined | None:
    """Scores that a projection makes of the keys, or of the queries, alone; None if attention fits.

    Queries that are weights fit, where one set of keys serves them all: not if each has values, or
    a copy of the keys, of its own.
    """
    query, key = (stages(side)[-1].operand for side in pair)
    values = stages(value)[-1].operand
    if is_context(pair[1]):
        return None  # scores that are weighed again: heads that are mixed
    if key.value.is_constant:
        return linear_attention(logits.node) if is_context(value) else None
    known = set(query.atoms)
    if not query.value.is_constant or not known & set(values.atoms) - set(key.atoms):
        return None
    known |= set(key.atoms)
    if any(set(step.operand.atoms) - known for step in logits.steps):
        return Declined(
            "no-queries",
            "The scores are a projection of the keys alone, for each feature of the values, and "
            "biases: there are no queries.",
            logits.node,
            "It is kept as it is; scores that are a product of queries and keys would fuse.",
        )
    rows = {atom for atom in query.atoms if atom not in set(logits.contraction.summed)}
    return pooling(anchor) if rows <= set(values.atoms) else linear_attention(logits.node)


def is_context(operand: Operand) -> bool:
    """Whether values are a product of activations themselves, or an attention's result."""
    values = stages(operand)[-1].operand
    node = values.value.producer
    if node is None or node.op == "attn.attention":
        return node is not None
    product = read_contraction(node, values.axes) if len(node.outputs) == 1 else None
    return product is not None and pairs_activations(product)


def pairs_activations(product: Contraction) -> bool:
    """Whether neither side of a product is a constant, past layout and scales."""
    sides = (product.left, product.right)
    return not any(stages(side)[-1].operand.value.is_constant for side in sides)


def pointer(anchor: Node) -> Declined | None:
    """Additive attention whose weights are the result, as in pointer networks."""
    source = anchor.inputs[0]
    node = None if source is None else _additive(source)
    total = node.inputs[0].producer if node is not None and node.inputs[0] is not None else None
    if total is None or all(
        side is None or side.shape == total.output.shape for side in total.inputs
    ):
        return None
    return Declined(
        "no-values",
        "The weights of an additive attention are not multiplied with values over the key axis.",
        node,
        "Only the weights are used: there is no attention to fuse.",
    )


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
    return projected_by(logits.node)


def projected_by(node: Node) -> Declined:
    """Scores that a projection makes of each token alone."""
    return Declined(
        "synthesizer",
        "The scores are a projection of each token to one number per position (Synthesizer): "
        "there are no keys.",
        node,
        "It is kept as it is; scores that are a product of queries and keys would fuse.",
    )


def convolved(anchor: Node) -> Declined | None:
    """Scores or weights that a convolution mixes across heads, or with their neighbours."""
    source = anchor.inputs[0]
    if source is None:
        return None
    before, after = mixer_of(source), None
    if before is None and not is_product(source):
        return None
    queue = [anchor.output]
    for _ in range(16):
        for user in queue.pop(0).users if queue else ():
            if user.op == _CONV:
                after = after or user
            elif user.op in ELEMENTWISE or user.op in MASKS or is_layout(user):
                queue += user.outputs
    mixer = after or before
    return None if mixer is None else mixed_by("scores" if before is not None else "weights", mixer)


def mixed_by(what: str, mixer: Node) -> Declined:
    """A convolution of (B, H, S, T)."""
    weight = mixer.inputs[1]
    is_small = weight is not None and weight.shape[-2:] == (1, 1)
    with_what = "across heads" if is_small else "with those of other queries and keys"
    return Declined(
        "talking-heads",
        f"The {what} are mixed {with_what} by a convolution.",
        mixer,
        "No attention op mixes them; the layer stays as it is.",
    )


def mixer_of(scores: Value | None) -> Node | None:
    """The convolution that made scores of a product of queries and keys."""
    while scores is not None and (node := scores.producer) is not None:
        if node.op == _CONV:
            source = node.inputs[0]
            return node if source is not None and is_product(source) else None
        if not is_layout(node) and node.op not in MASKS and node.op not in ELEMENTWISE:
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


def sources_of(node: Node) -> list[Value]:
    """The inputs that are there."""
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
            varying = [source for source in sources_of(node) if not source.is_constant]
            if not weighted and len(varying) == 1:
                queue.append((varying[0], True))
        elif node.op in ELEMENTWISE or node.op in MASKS or is_layout(node):
            varying = [source for source in sources_of(node) if not source.is_constant]
            if not weighted or len(varying) == 1:  # else what is weighted is computed further on
                queue += [(source, weighted) for source in varying]
    return None


def joined(anchor: Node) -> Declined | None:
    """Several products of queries and keys, joined along the keys for one softmax."""
    queue = sources_of(anchor)[:1]
    for _ in range(16):
        node = queue.pop(0).producer if queue else None
        if node is None:
            continue
        if node.op == "aten.cat":
            if any(is_product(part) for part in sources_of(node)):
                return Declined(
                    "joined-scores",
                    "The scores of several products are joined along the keys for one softmax, and "
                    "its parts meet values of their own.",
                    node,
                    "Concatenate the keys and the values instead of the scores.",
                )
        elif is_elementwise(node):
            queue += sources_of(node)
    return None


def is_product(value: Value) -> bool:
    """Whether a value is a product of two activations, past layout, scales, caps and masks."""
    node = value.producer
    while node is not None and is_elementwise(node):
        sources = [source for source in sources_of(node) if _is_activation(source)]
        node = max(sources, key=lambda v: len(v.shape)).producer if sources else None
    if node is None or len(node.outputs) != 1:
        return False
    product = read_contraction(node, fresh_axes(node.output.shape))
    return product is not None and pairs_activations(product)


def is_elementwise(node: Node) -> bool:
    """Whether each element of the result depends on one element of each input, past layout."""
    tags = getattr(op_def(node.op).function, "tags", ())
    return node.op in MASKS or is_layout(node) or torch.Tag.pointwise in tags


def _is_activation(value: Value) -> bool:
    return not value.is_constant and value.dtype.is_floating_point


def _is_joined(node: Node) -> bool:
    """A sum of queries and keys, or a projection of their concatenation."""
    if node.op == "aten.add.Tensor":
        return True
    source = node.inputs[0] if node.op == "aten.linear" else None
    while source is not None and source.producer is not None and is_layout(source.producer):
        source = source.producer.inputs[0]
    return source is not None and source.producer is not None and source.producer.op == "aten.cat"


def is_layout(node: Node) -> bool:
    """Whether a node only moves elements, or changes their type."""
    return node.op in RESHAPES or node.op in COPIES or node.op in LAYOUTS or is_cast(node)


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
