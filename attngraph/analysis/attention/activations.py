"""Products of activations around a softmax, told from projections by constants."""

from __future__ import annotations

from attngraph.analysis.attention.roles import computed
from attngraph.analysis.layout.axes import Operand, fresh_axes
from attngraph.analysis.layout.contraction import Contraction, read_contraction
from attngraph.analysis.walks import origin, varying
from attngraph.ir import Node, TensorType, Value
from attngraph.ir.traits import (
    ADDITIVE,
    CAST,
    CHOICE,
    CONVOLUTION,
    JOIN,
    LAYOUT,
    MULTIPLICATION,
    POINTWISE,
    PRODUCT,
)


def is_layout(node: Node) -> bool:
    """Whether a node moves elements, or converts them."""
    return node.op in LAYOUT | CAST


def is_projection(node: Node) -> bool:
    """Whether a node multiplies one value with a constant."""
    return node.op in PRODUCT | CONVOLUTION and len(varying(node)) == 1


def are_projections(node: Node) -> bool:
    """Whether a node is a projection, or joins some, with learned rows or without."""
    if node.op not in JOIN:
        return is_projection(node)
    ends = [origin(value, is_layout) for value in node.operands]
    made = [end.producer for end in ends if not end.is_constant]
    return bool(made) and all(node is not None and is_projection(node) for node in made)


def keeps_scores(node: Node) -> bool:
    """Whether scores are still scores behind a node: layout, masks, biases, factors."""
    return node.op in LAYOUT | CAST | CHOICE | ADDITIVE | MULTIPLICATION


def is_elementwise(node: Node) -> bool:
    """Whether each element of the result is made of one place of the operands."""
    return node.op in LAYOUT | POINTWISE


def contraction_at(node: Node) -> Contraction | None:
    """The contraction that a node computes, over new axes."""
    if len(node.outputs) != 1 or not isinstance(node.output.type, TensorType):
        return None
    return read_contraction(node, fresh_axes(node.output.shape))


def pairs_activations(product: Contraction) -> bool:
    """Whether neither side of a product is a constant, past layout and scales."""
    return not any(computed(side).value.is_constant for side in product.sides)


def is_product(value: Value | None) -> bool:
    """Whether a value is a product of two activations, past layout, scales, caps and masks."""
    node = None if value is None else origin(value, is_elementwise).producer
    product = None if node is None else contraction_at(node)
    return product is not None and pairs_activations(product)


def is_context(operand: Operand) -> bool:
    """Whether values are a product of activations themselves, or an attention's result."""
    values = computed(operand)
    node = values.value.producer
    if node is None or node.op == "attn.attention":
        return node is not None
    product = read_contraction(node, values.axes) if len(node.outputs) == 1 else None
    return product is not None and pairs_activations(product)
