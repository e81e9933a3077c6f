"""Affine maps with constant numbers: what linears, convolutions, scales and offsets have in common.

Each computes factor · x + shift. The factor is a matrix, a number per feature, or 1; the shift is a
vector or 0. Both passes that multiply weights and passes that move a scale read nodes as such maps,
compose them here, and write the result with passes/weights/folding.py. The two laws:

    F₂ (F₁ x + t₁) + t₂        =  (F₂ F₁) x + (F₂ t₁ + t₂)      `after`
    (F₁ x + t₁) + c (F₂ x + t₂) =  (F₁ + c F₂) x + (t₁ + c t₂)   `plus`

Rounding. Numbers that a law computes are in float64, and are rounded once, to the dtype of the
weight that they become. That is one rounding more than the model has, of half a unit in the last
place of a weight, unless the map is exact: then each new number is one of the model's own, with
another exponent, and every product and sum of the model is computed as before, times a power of
two. Numbers that no law touched stay the constant that held them, unread: it may lie in a mapped
file of many gigabytes, or have no data at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from attngraph.analysis.layout.axes import Atom, Axes, Operand, climb, fresh_axes
from attngraph.analysis.values.matching import only_read_by
from attngraph.analysis.values.weights import is_known, is_power_of_two, wide
from attngraph.ir import Graph, Node, Value
from attngraph.ir.ops import input_of, inputs_of
from attngraph.ir.traits import WEIGHTED

Numbers: TypeAlias = torch.Tensor | Value
"""Computed numbers in float64, or a constant of the graph as it is stored."""


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """factor · x + shift, for x of K features and a result of N.

    `factor` is a matrix (N, K) or a convolution's kernel (N, K, …), a scale (N) for each feature,
    or None for 1. `shift` is (N), or None for 0. `is_exact` as above.
    """

    factor: Numbers | None = None
    shift: Numbers | None = None
    is_exact: bool = True

    def after(self, inner: Affine) -> Affine:
        """The map that applies `inner` first. Constants with other numbers must be known."""
        factor = _times(self.factor, inner.factor)
        moved = _times(self.factor, inner.shift, is_shift=True)
        # A sum of two shifts rounds otherwise than two sums with the product between them do.
        keeps_sums = moved is None or (
            self.shift is None and _moves_exponents(self.factor, inner.shift, moved)
        )
        keeps_factors = _moves_exponents(self.factor, inner.factor, factor) or _moves_exponents(
            inner.factor, self.factor, factor
        )
        is_exact = self.is_exact and inner.is_exact and keeps_sums and keeps_factors
        return Affine(factor, _sum(self.shift, moved), is_exact)

    def plus(self, other: Affine, times: float = 1.0) -> Affine:
        """The sum of two maps of one x, the second one `times` a number. Both have factors."""
        factor = _sum(self.factor, other.factor, times)
        return Affine(factor, _sum(self.shift, other.shift, times), is_exact=False)


def numbers(of: Numbers) -> torch.Tensor:
    """The numbers in float64; those of a constant, which must be known, are read."""
    return wide(of) if isinstance(of, Value) else of


def _times(
    factor: Numbers | None, right: Numbers | None, *, is_shift: bool = False
) -> Numbers | None:
    """A factor times another one, or times a shift, which unlike a scale is a column."""
    if factor is None or (right is None and is_shift):
        return right
    if right is None:
        return factor
    left, other = numbers(factor), numbers(right)
    if left.dim() == 1:
        return left.reshape(-1, *[1] * (other.dim() - 1)) * other
    return left @ other if is_shift or other.dim() > 1 else left * other


def _sum(left: Numbers | None, right: Numbers | None, times: float = 1.0) -> Numbers | None:
    if right is None:
        return left
    if left is None:
        return right if times == 1 else times * numbers(right)
    return numbers(left) + times * numbers(right)


def _moves_exponents(
    scale: Numbers | None, constant: Numbers | None, result: Numbers | None
) -> bool:
    """Whether `result`, a constant scaled, has its numbers with other exponents, all in range."""
    if scale is None or constant is None or result is None:
        return True
    if len(scale.shape) != 1 or not isinstance(constant, Value):
        return False
    scaled = numbers(result)
    is_lossless = bool((scaled.to(constant.dtype).double() == scaled).all())
    return is_lossless and is_power_of_two(numbers(scale))


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear (N, K) or convolution (N, K / groups, …), with a bias (N) that is constant.

    The weight may be computed: ask `is_known` before its numbers are read.
    """

    node: Node
    weight: Value
    bias: Value | None

    @property
    def source(self) -> Value:
        """What the node reads now: it may itself have been merged with others since."""
        return self.node.source

    @property
    def width(self) -> int:
        return int(self.weight.shape[0])

    @property
    def map(self) -> Affine:
        return Affine(self.weight, self.bias)

    @property
    def is_known(self) -> bool:
        """Whether the numbers of weight and bias are at hand."""
        return is_known(self.weight) and (self.bias is None or is_known(self.bias))


def read_linear(node: Node, *, or_convolution: bool = False) -> Linear | None:
    """The node as a product with a weight; None if it is none.

    linearize leaves no other spelling of a linear.
    """
    if node.op not in WEIGHTED or not (or_convolution or node.op == "aten.linear"):
        return None
    source, weight, bias = inputs_of(node, "input", "weight", "bias")
    if weight.dtype != source.dtype or (node.op == "aten.linear" and len(weight.shape) != 2):
        return None
    if bias is not None and (not bias.is_constant or bias.shape != weight.shape[:1]):
        return None
    return Linear(node, weight, bias)


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A value that is a product's result laid out anew, which nobody else reads on the way.

    `operand` is the result with its dims named in the `axes` of the value; `path` are the nodes
    from the product on.
    """

    operand: Operand
    axes: Axes
    path: Sequence[Node]

    @property
    def product(self) -> Node:
        return self.path[0]

    @property
    def features(self) -> tuple[Atom, ...]:
        """The product's features: the last dim of a linear, the channels of a convolution."""
        weight = input_of(self.product, "weight")
        kernel = 0 if self.product.op == "aten.linear" else len(weight.shape) - 2
        return self.operand.dims[len(self.operand.dims) - 1 - kernel]


def product_above(graph: Graph, value: Value, reader: Node) -> LaidOut | None:
    """The linear or convolution whose result the value is, for `reader` alone."""
    axes = fresh_axes(value.shape)
    operand, path = Operand(value, axes), [reader]
    while only_read_by(graph, operand.value, path[0]):
        producer = operand.value.producer
        if producer is None:
            return None
        path.insert(0, producer)
        if producer.op in WEIGHTED:
            return LaidOut(operand, axes, path[:-1])
        above = climb(operand)
        if above is None:
            return None
        operand = above
    return None
