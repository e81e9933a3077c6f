"""Reads attention logits upwards: φ(s · ⟨Q, K⟩) and the ordered biases and masks applied to it.

The reading is exact algebra. A term that isn't understood stays a bias; an operation that can't be
carried through ends the reading with a `Declined`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attngraph.analysis.layout.axes import Atom, Axes, Operand, broadcast_axes, climb, resolve, top
from attngraph.analysis.layout.contraction import Contraction, read_contraction
from attngraph.analysis.masks.row_policy import ABSORBING_FILL, WEAKEST_FILL
from attngraph.analysis.values.scalars import (
    Filling,
    blend_of,
    fill_of,
    is_cast,
    narrows_no_more,
    number,
    scale_of,
    uniform,
    widens,
)
from attngraph.ir import Dim, Node
from attngraph.ir.ops import attribute


@dataclass(frozen=True, slots=True)
class Declined:
    """Why a site stays as it is: a code of docs/remarks.md, a sentence, the blamed node, a hint."""

    code: str
    reason: str
    node: Node | None = None
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Bias:
    """`factor` times a tensor, and no less than `floor`, that is added to the logits."""

    operand: Operand
    factor: float
    floor: float | None = None


@dataclass(frozen=True, slots=True)
class Mask:
    """The logits become `fill` wherever the predicate is not `keep`."""

    operand: Operand
    keep: bool
    fill: float


@dataclass(frozen=True, slots=True)
class Factor:
    """A tensor, or a number known at run time, that multiplies or divides."""

    operand: Operand | None
    divides: bool = False
    number: Dim | None = None

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """The axes along which it differs."""
        return () if self.operand is None else self.operand.atoms


@dataclass(frozen=True, slots=True)
class Logits:
    """outer · tanh(scale · ⟨Q, K⟩) if `outer`, else scale · ⟨Q, K⟩; then `steps` in order.

    `factors` multiply or divide ⟨Q, K⟩ elementwise (a learned temperature). `nodes` were read on
    the way.
    """

    contraction: Contraction
    node: Node
    scale: float
    outer: float | None = None
    factors: tuple[Factor, ...] = ()
    steps: tuple[Bias | Mask, ...] = ()
    nodes: tuple[Node, ...] = ()

    @property
    def is_projection(self) -> bool:
        """Whether a constant, and not queries or keys, is a side of the product."""
        product = self.contraction
        return any(top(side).value.is_constant for side in (product.left, product.right))

    def scaled(self, factor: float) -> Logits | None:
        """factor · these logits; None where a mask would turn into the opposite."""
        steps: list[Bias | Mask] = []
        for step in self.steps:
            if isinstance(step, Bias):
                if step.floor is not None and factor <= 0:
                    return None
                floor = None if step.floor is None else step.floor * factor
                steps.append(replace(step, factor=step.factor * factor, floor=floor))
            elif factor <= 0:
                return None
            else:
                steps.append(replace(step, fill=step.fill * factor))
        if self.outer is not None:
            return replace(self, outer=self.outer * factor, steps=tuple(steps))
        return replace(self, scale=self.scale * factor, steps=tuple(steps))


def narrowed(node: Node, source: torch.dtype) -> Declined:
    """Why scores that `node` casts from `source` to fewer bits stay as they are."""
    before, after = (str(dtype).removeprefix("torch.") for dtype in (source, node.output.dtype))
    return Declined(
        "scores-narrowed",
        f"The scores are rounded from {before} to {after}, in which they may overflow.",
        node,
        "Compute the scores, the softmax and the values in one dtype.",
    )


Preference = Callable[[Contraction], int | None]


def read_logits(
    operand: Operand,
    keys: tuple[Atom, ...],
    prefer: Preference,
    *,
    shifts: bool = True,
    result: torch.dtype | None = None,
) -> Logits | Declined:
    """Reads the logits that `operand` holds, whose key axis is `keys`.

    With `shifts`, what is the same for all keys of a row is dropped: a softmax doesn't see it.
    `result` is the dtype in which the attention is returned, by default that of the logits.

    `prefer` ranks contractions (lower is better, None is impossible) where a sum holds several.
    """
    return _Reader(keys, prefer, shifts, result or operand.value.dtype).read(operand)


class _Reader:
    def __init__(
        self, keys: tuple[Atom, ...], prefer: Preference, shifts: bool, result: torch.dtype
    ) -> None:
        self.keys = keys
        self.prefer = prefer
        self.shifts = shifts
        self.result = result

    def read(self, operand: Operand) -> Logits | Declined:
        node = operand.value.producer
        if node is None:
            return Declined(
                "logits-not-a-product", "The logits are an input or a constant, not a product."
            )
        found = self._at(node, operand)
        return replace(found, nodes=(*found.nodes, node)) if isinstance(found, Logits) else found

    def _at(self, node: Node, operand: Operand) -> Logits | Declined:
        if is_cast(node) and node.inputs[0] is not None:
            if self._narrows(node):
                return narrowed(node, node.inputs[0].dtype)
            return self.read(Operand(node.inputs[0], operand.axes))
        if (above := climb(operand)) is not None:
            return self.read(above)
        if (scaling := scale_of(node)) is not None:
            inner = self.read(Operand(scaling[0], operand.axes))
            if isinstance(inner, Declined):
                return inner
            return inner.scaled(scaling[1]) or Declined(
                "mask-negated", "A masked score is multiplied by a negative number.", node
            )
        if (filling := fill_of(node)) is not None:
            return self._fill(node, operand, filling)
        if (blended := blend_of(node)) is not None:
            return self._fill(node, operand, blended)
        if node.op in ("aten.add.Tensor", "aten.sub.Tensor"):
            return self._sum(node, operand)
        if node.op in ("aten.add.Scalar", "aten.sub.Scalar"):
            return self._same(node, operand)
        if node.op in ("aten.mul.Tensor", "aten.div.Tensor"):
            return self._factor(node, operand)
        if node.op in ("aten.mul.Scalar", "aten.div.Scalar"):
            return self._number(node, operand)
        if node.op == "aten.tanh":
            return self._tanh(node, operand)
        if node.op in ("aten.tril", "aten.triu"):
            return Declined(
                "fill-not-a-mask",
                "Scores outside of a triangle are replaced by 0, which is not low enough to mask.",
                node,
                "Fill masked scores with -inf or torch.finfo(dtype).min.",
            )
        if node.op in (
            "aten.clamp",
            "aten.clamp_min",
            "aten.maximum",
            "aten.max.other",
            "aten.nan_to_num",
        ):
            return self._floor(node, operand)
        return self._product(node, operand.axes)

    def _narrows(self, node: Node) -> bool:
        """Whether a cast overflows where its input doesn't, or rounds more than the result does."""
        source = node.inputs[0]
        assert source is not None
        if widens(node):
            return False
        target = node.output.dtype
        reaches = source.dtype.is_floating_point and _range(target) >= _range(source.dtype)
        return not (reaches and narrows_no_more(node, self.result))

    def _same(self, node: Node, operand: Operand) -> Logits | Declined:
        """The same number on every logit."""
        source = node.inputs[0]
        if source is None or number(attribute(node, "other")) is None or not self.shifts:
            return Declined("logits-not-a-product", f"{node.op} is not understood here.", node)
        inner = self.read(Operand(source, operand.axes))
        if isinstance(inner, Logits) and any(isinstance(step, Mask) for step in inner.steps):
            return Declined("mask-shifted", "A number is added to masked scores.", node)
        return inner

    def _product(self, node: Node, axes: Axes) -> Logits | Declined:
        product = read_contraction(node, axes)
        if product is None:
            return Declined(
                "logits-not-a-product",
                f"The logits come from {node.op}, which is not read as a product of Q and K.",
                node,
                "Write the scores as a matrix product of queries and keys.",
            )
        if self.prefer(product) is None:
            return Declined(
                "logits-not-a-product",
                "The product behind the logits doesn't pair queries with keys.",
                node,
            )
        steps = tuple(Bias(operand, factor) for operand, factor in product.addends)
        return Logits(product, node, product.factor, steps=steps)

    def _fill(self, node: Node, operand: Operand, filling: Filling) -> Logits | Declined:
        source, predicate, keep, fill = filling
        shape = node.output.shape
        inner = self.read(Operand(source, broadcast_axes(operand.axes, source.shape, shape)))
        if isinstance(inner, Declined):
            return inner
        if math.isnan(fill) or fill > WEAKEST_FILL:
            return Declined(
                "fill-not-a-mask",
                f"Scores are replaced by {fill:g}, which is not low enough to mask them.",
                node,
                "Fill masked scores with -inf or torch.finfo(dtype).min.",
            )
        axes = broadcast_axes(operand.axes, predicate.shape, shape)
        step = Mask(Operand(predicate, axes), keep, fill)
        return replace(inner, steps=(*inner.steps, step))

    def _sum(self, node: Node, operand: Operand) -> Logits | Declined:
        left, right = node.inputs[:2]
        if left is None or right is None:
            return Declined("logits-not-a-product", "A sum lacks an operand.", node)
        shape = node.output.shape
        sides = [
            Operand(value, broadcast_axes(operand.axes, value.shape, shape))
            for value in (left, right)
        ]
        sign = -1.0 if node.op.startswith("aten.sub") else 1.0
        alpha = number(attribute(node, "alpha"))
        if alpha is None:
            return Declined("logits-not-a-product", "The alpha of a sum is symbolic.", node)
        factors = [1.0, sign * alpha]
        best: Logits | Declined | None = None
        barred: Declined | None = None
        for index, side in enumerate(sides):
            found = self.read(side)
            if isinstance(found, Declined) and found.code != "logits-not-a-product":
                barred = found
            if isinstance(found, Logits) and factors[index] != 1.0:
                found = found.scaled(factors[index]) or Declined(
                    "mask-negated", "A masked score is multiplied by a negative number.", node
                )
            if isinstance(found, Logits):
                other = 1 - index
                if not self._is_row_maximum(sides[other]):
                    bias = Bias(sides[other], factors[other])
                    found = replace(found, steps=(*found.steps, bias))
                if isinstance(best, Logits) and self._rank(best) <= self._rank(found):
                    continue
            elif best is not None:
                continue
            best = found
        assert best is not None
        if barred is not None and isinstance(best, Logits) and best.is_projection:
            return barred  # the product is there, and the projection is a bias of it
        return best

    def _rank(self, logits: Logits) -> int:
        rank = self.prefer(logits.contraction)
        return 1 << 30 if rank is None else rank

    def _is_row_maximum(self, operand: Operand) -> bool:
        """max over the keys, subtracted to keep exp in range: softmax doesn't see it."""
        node = operand.value.producer
        keys = set(resolve(self.keys))
        return (
            self.shifts
            and node is not None
            and node.op in ("aten.amax", "aten.max.dim", "aten.logsumexp")
            and not keys & set(operand.atoms)
        )

    def _factor(self, node: Node, operand: Operand) -> Logits | Declined:
        left, right = node.inputs
        if left is None or right is None:
            return Declined("logits-not-a-product", "A product lacks an operand.", node)
        shape = node.output.shape
        sides = [
            Operand(value, broadcast_axes(operand.axes, value.shape, shape))
            for value in (left, right)
        ]
        order = (0, 1) if node.op == "aten.mul.Tensor" else (0,)
        declined: Declined | None = None
        for index in order:
            inner = self.read(sides[index])
            if isinstance(inner, Declined):
                declined = declined or inner
                continue
            if inner.steps or inner.outer is not None:
                if index == 0 and len(order) == 2 and isinstance(self.read(sides[1]), Logits):
                    what = "The logits are two products that are multiplied element by element."
                    return Declined("logits-not-a-product", what, node)
                return Declined(
                    "scores-times-tensor",
                    "Scores that already hold a bias or mask are multiplied by a tensor.",
                    node,
                    "Multiply the queries by it instead, before the scores are computed.",
                )
            factor = Factor(sides[1 - index], divides=node.op == "aten.div.Tensor")
            return replace(inner, factors=(*inner.factors, factor))
        assert declined is not None
        return declined

    def _number(self, node: Node, operand: Operand) -> Logits | Declined:
        """A scale that depends on a length."""
        source, other = node.inputs[0], attribute(node, "other")
        if source is None or number(other) is not None:
            return Declined("scale-unknown", f"The scores are scaled by {other}.", node)
        inner = self.read(Operand(source, operand.axes))
        if isinstance(inner, Declined):
            return inner
        if inner.steps or inner.outer is not None:
            return Declined(
                "scores-times-tensor",
                "Scores that already hold a bias or mask are scaled by a length.",
                node,
                "Scale the queries by it instead, before the scores are computed.",
            )
        factor = Factor(None, divides=node.op == "aten.div.Scalar", number=other)
        return replace(inner, factors=(*inner.factors, factor))

    def _tanh(self, node: Node, operand: Operand) -> Logits | Declined:
        source = node.inputs[0]
        assert source is not None
        inner = self.read(Operand(source, operand.axes))
        if isinstance(inner, Declined):
            return inner
        if inner.steps or inner.outer is not None:
            return Declined(
                "softcap-after-mask",
                "The scores are capped by tanh after a bias or mask was applied.",
                node,
                "Cap the scores first, then add the bias and the mask.",
            )
        return replace(inner, outer=1.0)

    def _floor(self, node: Node, operand: Operand) -> Logits | Declined:
        """A lower bound that no score of finite queries and keys reaches, but a masked one does.

        nan_to_num is one: without a mask, float32 and bfloat16 scores are finite as they are.
        """
        source = node.inputs[0]
        if node.op == "aten.nan_to_num":
            low, high = attribute(node, "neginf"), attribute(node, "posinf")
            low = torch.finfo(node.output.dtype).min if low is None else low
        elif node.op in ("aten.maximum", "aten.max.other"):
            low, high = uniform(node.inputs[1]), None
        else:
            low = number(attribute(node, "min"))
            high = attribute(node, "max") if node.op == "aten.clamp" else None
        if source is None or low is None or high is not None or low > ABSORBING_FILL:
            return Declined(
                "logits-clamped",
                "The scores are clamped, which no attention op does.",
                node,
                "Drop the clamp, or cap the scores smoothly: c * tanh(scores / c) fuses.",
            )
        inner = self.read(Operand(source, operand.axes))
        if isinstance(inner, Declined):
            return inner
        steps = tuple(
            replace(step, fill=max(step.fill, low))
            if isinstance(step, Mask)
            else replace(step, floor=low)
            for step in inner.steps
        )
        return replace(inner, steps=steps)


def _range(dtype: torch.dtype) -> int:
    """The binary exponent at which a float dtype ends; float32 and bfloat16 share it."""
    return math.frexp(torch.finfo(dtype).max)[1] if dtype.is_floating_point else 0
