"""Reads attention logits upwards: φ(s · ⟨Q, K⟩) and the ordered biases and masks applied to it.

The reading is exact algebra. A term that isn't understood stays a bias; an operation that can't be
carried through ends the reading with a `Declined`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from attngraph.analysis.attention.refusals import Declined, Refusal
from attngraph.analysis.layout.axes import (
    Atom,
    Axes,
    Operand,
    climb,
    resolve,
    sides_of,
    spread,
    top,
)
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
    shift_of,
    uniform,
    widens,
)
from attngraph.ir import Dim, Node
from attngraph.ir.ops import attribute
from attngraph.ir.slices import depends_on
from attngraph.ir.traits import (
    ADDITIVE,
    CHOICE,
    CLAMP,
    LOG_SUM,
    MAXIMUM,
    MAXIMUM_ALONG,
    MULTIPLICATIVE,
    SCALE,
    SHIFT,
    TRIANGLE,
)

_MODERATE = 1e3
_COARSE = 0.5  # a softmax of logits without a fractional part is another function
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Bias:
    """`factor` times a tensor that is added to the logits.

    `floor` bounds the sum of this step and those before it from below.
    """

    operand: Operand
    factor: float
    floor: float | None = None


@dataclass(frozen=True, slots=True)
class Mask:
    """The logits become `fill` wherever the predicate is not `keep`.

    `was` is the fill that the graph has, where another takes its place. `times` says that it takes
    the logits times 0 there, which of infinite ones is NaN.
    """

    operand: Operand
    keep: bool
    fill: float
    was: float | None = None
    times: bool = False


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
        return any(top(side).value.is_constant for side in self.contraction.sides)

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
    return Refusal.NARROWED.at(node, before=before, after=after)


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
            return Refusal.SCORES_GIVEN.at()
        found = self._at(node, operand)
        return replace(found, nodes=(*found.nodes, node)) if isinstance(found, Logits) else found

    def _at(self, node: Node, operand: Operand) -> Logits | Declined:
        if is_cast(node) and node.inputs[0] is not None:
            inner = self.read(Operand(node.inputs[0], operand.axes))
            if isinstance(inner, Logits) and self._narrows(node):
                return narrowed(node, node.inputs[0].dtype)
            return inner
        if (above := climb(operand)) is not None:
            return self.read(above)
        if (scaling := scale_of(node)) is not None:
            inner = self.read(Operand(scaling[0], operand.axes))
            if isinstance(inner, Declined):
                return inner
            return inner.scaled(scaling[1]) or Refusal.MASK_NEGATED.at(node)
        if (filling := fill_of(node)) is not None:
            return self._fill(node, operand, filling)
        if (blended := blend_of(node)) is not None:
            return self._fill(node, operand, blended)
        if node.op in ADDITIVE:
            return self._sum(node, operand)
        if node.op in SHIFT:
            return self._same(node, operand)
        if node.op in MULTIPLICATIVE:
            return self._factor(node, operand)
        if node.op in SCALE:
            return self._number(node, operand)
        if node.op == "aten.tanh":
            return self._tanh(node, operand)
        if node.op in TRIANGLE:
            return Refusal.WEAK_FILL.at(node, fill=0.0)
        if node.op in CLAMP | MAXIMUM or node.op == "aten.nan_to_num":
            return self._floor(node, operand)
        if node.op in CHOICE:
            scores = sum(isinstance(self.read(s), Logits) for s in sides_of(node, operand.axes))
            if scores:
                why = Refusal.FILL_UNKNOWN if scores == 1 else Refusal.FILL_OF_SCORES
                return why.at(node)
        return self._product(node, operand.axes)

    def _narrows(self, node: Node) -> bool:
        """Whether a cast overflows where its input doesn't, or rounds more than the result does."""
        source = node.source
        if widens(node):
            return False
        target = node.output.dtype
        reaches = source.dtype.is_floating_point and _range(target) >= _range(source.dtype)
        return not (reaches and narrows_no_more(node, self.result))

    def _same(self, node: Node, operand: Operand) -> Logits | Declined:
        """The same number on every logit, next to which these keep their digits."""
        source, shift = node.inputs[0], shift_of(node)
        if source is None or shift is None or not self.shifts:
            return Refusal.NOT_UNDERSTOOD.at(node, op=node.op)
        inner = self.read(Operand(source, operand.axes))
        if isinstance(inner, Logits) and any(isinstance(step, Mask) for step in inner.steps):
            return Refusal.MASK_SHIFTED.at(node)
        dtype = node.output.dtype
        if dtype.is_floating_point and abs(shift) * torch.finfo(dtype).eps > _COARSE:
            return Refusal.COARSE.at(node, number=shift)
        return inner

    def _product(self, node: Node, axes: Axes) -> Logits | Declined:
        product = read_contraction(node, axes)
        if product is None:
            return Refusal.NOT_A_PRODUCT.at(node, op=node.op)
        if self.prefer(product) is None:
            return Refusal.NOT_OF_PAIRS.at(node)
        steps = tuple(
            Bias(operand, factor)
            for operand, factor in product.addends
            if not self._shifts_all(operand, factor)
        )
        return Logits(product, node, product.factor, steps=steps)

    def _shifts_all(self, operand: Operand, factor: float) -> bool:
        """Whether a bias is one number for all logits, as that of a linear to one feature is.

        A large one would round them.
        """
        number = uniform(operand.value)
        return self.shifts and number is not None and abs(number * factor) < _MODERATE

    def _fill(self, node: Node, operand: Operand, filling: Filling) -> Logits | Declined:
        source, predicate, keep, fill = filling
        shape = node.output.shape
        inner = self.read(spread(source, operand.axes, shape))
        if isinstance(inner, Declined):
            return inner
        if math.isnan(fill) or fill > WEAKEST_FILL:
            return Refusal.WEAK_FILL.at(node, fill=fill)
        where = spread(predicate, operand.axes, shape)
        step = Mask(where, keep, fill, times=node.op in ADDITIVE)
        return replace(inner, steps=(*inner.steps, step))

    def _sum(self, node: Node, operand: Operand) -> Logits | Declined:
        sides = sides_of(node, operand.axes)
        sign = -1.0 if node.op.startswith("aten.sub") else 1.0
        alpha = number(attribute(node, "alpha"))
        if alpha is None:
            return Refusal.ALPHA_SYMBOLIC.at(node)
        factors = [1.0, sign * alpha]
        best: Logits | Declined | None = None
        barred: Declined | None = None
        for index, side in enumerate(sides):
            found = self.read(side)
            if isinstance(found, Declined) and found.code != Refusal.NOT_A_PRODUCT.code:
                barred = found
            if isinstance(found, Logits) and factors[index] != 1.0:
                found = found.scaled(factors[index]) or Refusal.MASK_NEGATED.at(node)
            if isinstance(found, Logits):
                other = 1 - index
                if not self._is_row_maximum(sides[other]):
                    found = _with_bias(node, found, Bias(sides[other], factors[other]))
            if isinstance(found, Logits):
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
        """max over the keys, or over all scores, subtracted to keep exp in range: softmax doesn't
        see it.
        """
        operand = top(operand)
        node = operand.value.producer
        keys = set(resolve(self.keys))
        return (
            self.shifts
            and node is not None
            and (node.op in MAXIMUM_ALONG | LOG_SUM or node.op == "aten.max")
            and not keys & set(operand.atoms)
        )

    def _factor(self, node: Node, operand: Operand) -> Logits | Declined:
        sides = sides_of(node, operand.axes)
        order = (0, 1) if node.op == "aten.mul.Tensor" else (0,)
        declined: Declined | None = None
        for index in order:
            inner = self.read(sides[index])
            if isinstance(inner, Declined):
                declined = declined or inner
                continue
            if inner.steps or inner.outer is not None:
                if index == 0 and len(order) == 2 and isinstance(self.read(sides[1]), Logits):
                    return Refusal.TWO_PRODUCTS.at(node)
                return Refusal.SCALED_LATE.at(node, what="a tensor")
            factor = Factor(sides[1 - index], divides=node.op == "aten.div.Tensor")
            return replace(inner, factors=(*inner.factors, factor))
        assert declined is not None
        return declined

    def _number(self, node: Node, operand: Operand) -> Logits | Declined:
        """A scale that depends on a length."""
        source, other = node.inputs[0], attribute(node, "other")
        if source is None or number(other) is not None:
            return Refusal.SCALE_UNKNOWN.at(node, scale=other)
        inner = self.read(Operand(source, operand.axes))
        if isinstance(inner, Declined):
            return inner
        if inner.steps or inner.outer is not None:
            return Refusal.SCALED_LATE.at(node, what="a length")
        factor = Factor(None, divides=node.op == "aten.div.Scalar", number=other)
        return replace(inner, factors=(*inner.factors, factor))

    def _tanh(self, node: Node, operand: Operand) -> Logits | Declined:
        source = node.source
        inner = self.read(Operand(source, operand.axes))
        if isinstance(inner, Declined):
            return inner
        if inner.steps or inner.outer is not None:
            return Refusal.CAPPED_LATE.at(node)
        return replace(inner, outer=1.0)

    def _floor(self, node: Node, operand: Operand) -> Logits | Declined:
        """A lower bound that no score of finite queries and keys reaches, but a masked one does.

        nan_to_num is one: without a mask, float32 and bfloat16 scores are finite as they are.
        """
        source = node.inputs[0]
        if node.op == "aten.nan_to_num":
            low, high = attribute(node, "neginf"), attribute(node, "posinf")
            low = torch.finfo(node.output.dtype).min if low is None else low
        elif node.op in MAXIMUM:
            low, high = uniform(node.inputs[1]), None
        else:
            low, high = number(node.attrs.get("min")), node.attrs.get("max")
        if source is None or low is None or high is not None or low > ABSORBING_FILL:
            return Refusal.CLAMPED.at(node)
        inner = self.read(Operand(source, operand.axes))
        if isinstance(inner, Declined):
            return inner
        return replace(inner, steps=tuple(_floored(inner.steps, low)))


def _floored(steps: Sequence[Bias | Mask], low: float) -> Iterator[Bias | Mask]:
    """The steps when a floor is put under all of them: two that hide a score hide it once."""
    for step, following in zip_longest(steps, steps[1:]):
        if isinstance(step, Mask):
            yield replace(step, fill=max(step.fill, low))
        else:
            floor = low if step.floor is None else max(step.floor, low)
            yield step if isinstance(following, Bias) else replace(step, floor=floor)


def _with_bias(node: Node, logits: Logits, bias: Bias) -> Logits | Declined:
    """The logits with a bias that `node` adds.

    What is made of the scores themselves takes most of them away, as their mean does. In half
    precision what is left would be the rounding of one of both sides.
    """
    dtype = logits.node.output.dtype
    if dtype in _HALVES and depends_on([bias.operand.value], [logits.node]):
        return Refusal.ROUNDED.at(node, dtype=str(dtype).removeprefix("torch."))
    return replace(logits, steps=(*logits.steps, bias))


def _range(dtype: torch.dtype) -> int:
    """The binary exponent at which a float dtype ends; float32 and bfloat16 share it."""
    return math.frexp(torch.finfo(dtype).max)[1] if dtype.is_floating_point else 0
