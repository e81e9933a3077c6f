"""Interval analysis: between which numbers the elements of a value lie, by the ops that make it.

Weights are looked at, and a norm bounds what it gives out: so the scores of most attentions are
bounded, whatever the inputs are. An interval that nothing is known of is (−inf, inf); it may hold
infinities. NaN is in none: a bound holds for the elements that are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from attngraph.analysis.values.norms import divided_by_norm
from attngraph.analysis.values.scalars import (
    fill_of,
    is_binary,
    number,
    scale_of,
    shift_of,
    uniform,
)
from attngraph.ir import Dim, Graph, Node, TensorType, Value
from attngraph.ir.ops import attribute, input_of, inputs_of
from attngraph.ir.traits import (
    CAST,
    COPY,
    EXPAND,
    GATHER,
    JOIN,
    LAYOUT,
    ONE_HOT,
    PAD,
    RESHAPE,
    SELECT,
    SLICE,
    SOFTMAX,
    TRIANGLE,
)
from attngraph.mapped import release_read

Interval: TypeAlias = tuple[float, float]

EVERYTHING: Interval = (-math.inf, math.inf)
_LONGEST = 2.0**40  # of what an arange counts
_LARGEST_TABLE = 1 << 26
_STRIP = 16 << 20  # bytes of a weight that are in memory at once while it is read
_DEPTH = 64
_LOOP = "attn.scan"
_GREATEST_EXPONENT = 709.0


class Intervals:
    """Intervals of values, each found once; with `weights`, those of linears too.

    Without `vanishing`, rows that are divided by their norm are taken for such whose squares don't
    all vanish: of x / |x| nothing is known otherwise. `given` are values by what has their
    numbers, as the items of a loop's step have those of the tensors that it goes along.
    """

    def __init__(
        self,
        *,
        weights: bool = False,
        vanishing: bool = True,
        given: Mapping[Value, Value] | None = None,
    ) -> None:
        self._weights, self._vanishing, self._given = weights, vanishing, given or {}
        self._known: dict[Value, Interval] = {}
        self._lengths: dict[tuple[Value, int], float] = {}

    def of(self, value: Value | None, depth: int = _DEPTH) -> Interval:
        """The least and the greatest number that an element may be."""
        if value is None or not isinstance(value.type, TensorType):
            return EVERYTHING
        value = self._given.get(value, value)
        if value not in self._known:
            found = self._find(value, depth)
            self._known[value] = _within(value.dtype, found)
        return self._known[value]

    def largest(self, value: Value | None) -> float:
        """A bound of |x|; inf where there is none."""
        low, high = self.of(value)
        return max(abs(low), abs(high))

    def length(self, value: Value, size: int | None = None, depth: int = _DEPTH) -> float:
        """A bound of the Euclidean norm along the last axis, or of as many numbers in a row as
        `size` says, which the axis is a multiple of; inf where there is none.
        """
        width = value.shape[-1] if value.shape else 1
        count = width if size is None else size
        if not isinstance(count, int) or count < 1:
            return math.inf
        key = value, count
        if key not in self._lengths:
            self._lengths[key] = math.sqrt(count) * self.largest(value)
            if value.producer is not None and depth > 0:
                found = self._length(value.producer, value, count, depth - 1)
                self._lengths[key] = min(self._lengths[key], found)
        return self._lengths[key]

    def _length(self, node: Node, value: Value, size: int, depth: int) -> float:
        width = value.shape[-1] if value.shape else 1
        if node.op == "aten.layer_norm" and attribute(node, "normalized_shape") == [size]:
            # |x - mean| / sqrt(variance + ε) has a norm of at most sqrt(width).
            gain, shift = inputs_of(node, "weight", "bias")
            scale = 1.0 if gain is None else self.largest(gain)
            offset = 0.0 if shift is None else self.length(shift, size, depth)
            return math.sqrt(size) * scale + offset
        if (scaling := scale_of(node)) is not None:
            return abs(scaling[1]) * self.length(scaling[0], size, depth)
        if width == size and math.isfinite(long := self._divided(node, size)):
            return long
        if (filling := fill_of(node)) is not None:
            return self._scaled(filling[0], None, value, size) if filling[3] == 0 else math.inf
        if node.op == "aten.mul.Tensor":
            x, y = node.inputs
            return min(self._scaled(x, y, value, size), self._scaled(y, x, value, size))
        parts = input_of(node, "tensors") if node.op in JOIN else node.inputs[:1]
        kept = [part for part in parts if part is not None and _keeps_rows(node, part, value, size)]
        if not kept or len(kept) < len(parts):
            return math.inf
        return max(self.length(part, size, depth) for part in kept)

    def _scaled(self, x: Value | None, y: Value | None, product: Value, size: int) -> float:
        """The bound on x times y, or on x alone, by the length of x."""
        if x is None or not x.shape or x.shape[-1] != product.shape[-1]:
            return math.inf
        long, far = self.length(x, size), 1.0 if y is None else self.largest(y)
        return long * far if math.isfinite(long) and math.isfinite(far) else math.inf

    def _divided(self, node: Node, width: Dim) -> float:
        """A bound of the norm of rows that a node divides by theirs; inf of other nodes."""
        found = divided_by_norm(node)
        if found is None or not isinstance(width, int) or (found.vanishes and self._vanishing):
            return math.inf
        return math.sqrt(width) if found.by_mean else 1.0

    def _find(self, value: Value, depth: int) -> Interval:
        if value.data is not None:
            return _range_of(value.data)
        if (same := uniform(value)) is not None:
            return same, same
        if is_binary(value):
            return 0.0, 1.0
        if value.producer is None or depth == 0 or len(value.producer.outputs) == 0:
            return EVERYTHING
        return self._from_op(value.producer, value, depth - 1)

    def _of_step(self, loop: Node, value: Value, depth: int) -> Interval:
        """What a step gives, whatever its states are; nothing is known of the last ones."""
        body: Graph = attribute(loop, "body")
        at, carried = loop.outputs.index(value), attribute(loop, "carried")
        if at < carried:
            return EVERYTHING
        inside = Intervals(weights=self._weights)
        pairs = zip(body.inputs[carried:], loop.inputs[carried:], strict=True)
        inside._known.update((own, self.of(given, depth)) for own, given in pairs)
        return inside.of(body.outputs[at], depth)

    def _from_op(self, node: Node, value: Value, depth: int) -> Interval:
        if (scaling := scale_of(node)) is not None:
            return _times(self.of(scaling[0], depth), (scaling[1], scaling[1]))
        if (filling := fill_of(node)) is not None:
            fill = filling[3]
            return _joined([self.of(filling[0], depth), (fill, fill)])
        if node.op in LAYOUT | GATHER | CAST:
            return self.of(node.inputs[0], depth)
        if value.shape and math.isfinite(far := self._divided(node, value.shape[-1])):
            return -far, far
        if node.op in SOFTMAX:
            return 0.0, 1.0
        if node.op in JOIN:
            return _joined([self.of(part, depth) for part in input_of(node, "tensors")])
        if node.op in PAD:
            pad = number(node.attrs.get("value") or 0.0)
            parts = [self.of(node.inputs[0], depth)]
            return EVERYTHING if pad is None else _joined([*parts, (pad, pad)])
        if node.op in TRIANGLE:
            return _joined([self.of(node.inputs[0], depth), (0.0, 0.0)])
        if node.op in ONE_HOT:
            return 0.0, 1.0
        if node.op == _LOOP:
            return self._of_step(node, value, depth)
        sides = [self.of(side, depth) for side in node.inputs]
        other = number(node.attrs.get("other"))
        match node.op.removeprefix("aten."):
            case "add.Tensor" if attribute(node, "alpha") == 1:
                return _plus(*sides)
            case "sub.Tensor" if attribute(node, "alpha") == 1:
                return _plus(sides[0], _times(sides[1], (-1.0, -1.0)))
            case "add.Scalar" | "sub.Scalar" if (shift := shift_of(node)) is not None:
                return _plus(sides[0], (shift, shift))
            case "rsub.Scalar" if other is not None and attribute(node, "alpha") == 1:
                return _plus((other, other), _times(sides[0], (-1.0, -1.0)))
            case "mul.Tensor":
                return _times(*sides)
            case "scatter.src":
                return _joined([sides[0], sides[2]])
            case "scatter.value" if (written := number(attribute(node, "value"))) is not None:
                return _joined([sides[0], (written, written)])
            case "where.self":
                return _joined(sides[1:])
            case "sin" | "cos" | "tanh":
                return -1.0, 1.0
            case "sigmoid" | "hardsigmoid":
                return 0.0, 1.0
            case "hardtanh":
                return _cut(sides[0], attribute(node, "min_val"), attribute(node, "max_val"))
            case "relu6":
                return _cut(sides[0], 0.0, 6.0)
            case "reciprocal" if sides[0][0] >= 0:
                return 0.0, math.inf
            case "linalg_vector_norm" | "abs" | "exp2" | "sqrt" | "square":
                return 0.0, math.inf
            case "exp":
                return _exp(sides[0][0]), _exp(sides[0][1])
            case "log_sigmoid":
                return -math.inf, 0.0
            case "softplus" if (number(attribute(node, "beta")) or 0.0) > 0:
                return 0.0, math.inf
            case "pow.Tensor_Scalar" | "pow.Tensor_Tensor" | "cumprod" if sides[0][0] >= 0:
                return 0.0, math.inf
            case "pow.Scalar" if (number(attribute(node, "self")) or -1.0) > 0:
                return 0.0, math.inf
            case "relu":
                return max(sides[0][0], 0.0), max(sides[0][1], 0.0)
            case "gelu":  # −0.16997 with erf, −0.17004 with tanh
                return -0.1701, max(sides[0][1], 0.0)
            case "attn.bias_gelu":
                return -0.1701, math.inf
            case "attn.quick_gelu" if (alpha := float(attribute(node, "alpha"))) > 0:
                return -0.2785 / alpha, max(sides[0][1], 0.0)
            case "silu":  # −0.27846
                return -0.2785, max(sides[0][1], 0.0)
            case "hardswish":  # −3/8
                return -0.376, max(sides[0][1], 0.0)
            case "clamp" | "clamp_min" | "clamp_max" if len(sides) == 1:
                return _cut(sides[0], node.attrs.get("min"), node.attrs.get("max"))
            case "maximum":
                return max(sides[0][0], sides[1][0]), max(sides[0][1], sides[1][1])
            case "minimum":
                return min(sides[0][0], sides[1][0]), min(sides[0][1], sides[1][1])
            case "log":
                low, high = (math.log(end) if end > 0 else -math.inf for end in sides[0])
                return low, high
            case "arange" | "arange.start" | "arange.start_step":
                start, step = (number(node.attrs.get(name, 1)) for name in ("start", "step"))
                if start is None or step is None:
                    return EVERYTHING
                far = abs(start) + abs(step) * _LONGEST
                return -far, far
            case "mean.dim" | "amax" | "amin":
                return sides[0]
            case "topk":
                return sides[0] if value is node.outputs[0] else EVERYTHING
            case "sum.dim_IntList" if sides[0][0] >= 0:
                return 0.0, math.inf
            case "div.Tensor" if sides[0][0] >= 0 and sides[1][0] >= 0:
                return 0.0, math.inf
            case "layer_norm":
                return self._normed(node)
            case "linear":
                return self._linear(node, depth)
            case _:
                return self._turned(node, depth) if node.op == "attn.rotary" else EVERYTHING

    def _normed(self, node: Node) -> Interval:
        """|x − mean| / sqrt(variance + ε) is below sqrt(n) for each of n elements."""
        count = attribute(node, "normalized_shape")
        if not all(isinstance(size, int) for size in count):
            return EVERYTHING
        gain, shift = inputs_of(node, "weight", "bias")
        scale = 1.0 if gain is None else self.largest(gain)
        far = math.sqrt(math.prod(count)) * scale
        return _plus((-far, far), (0.0, 0.0) if shift is None else self.of(shift))

    def _linear(self, node: Node, depth: int) -> Interval:
        """|w · x| is at most |w| |x|, and at most Σ |w_i| max |x_i|."""
        source, weight, shift = inputs_of(node, "input", "weight", "bias")
        data = weight.data
        if (
            not self._weights
            or data is None
            or data.is_meta
            or not 0 < data.numel() <= _LARGEST_TABLE
        ):
            return EVERYTHING
        rows = data.detach().double().reshape(-1, data.shape[-1])
        long = self.length(source, depth=depth)
        wide = self.largest(source)
        by_length = float(rows.norm(dim=1).max()) * long if math.isfinite(long) else math.inf
        by_size = float(rows.abs().sum(1).max()) * wide if math.isfinite(wide) else math.inf
        far = min(by_length, by_size)
        if not math.isfinite(far):
            return EVERYTHING
        return _plus((-far, far), (0.0, 0.0) if shift is None else self.of(shift))

    def _turned(self, node: Node, depth: int) -> Interval:
        """A rotation of pairs, by tables that may scale."""
        x, *tables = node.inputs[:3]
        far = self.of(x, depth)
        scale = max(self.largest(table) for table in tables)
        bound = 2 * max(abs(far[0]), abs(far[1])) * scale
        return (-bound, bound) if math.isfinite(bound) else EVERYTHING


def _keeps_rows(node: Node, source: Value, value: Value, size: int) -> bool:
    """Whether numbers that are `size` in a row come from as many in a row of the source."""
    if not source.shape or not value.shape:
        return False
    width, own, rank = source.shape[-1], value.shape[-1], len(source.shape)
    if not isinstance(width, int) or not isinstance(own, int) or width % size or own % size:
        return False
    if node.op in RESHAPE | CAST | COPY | JOIN:
        return True
    if node.op in EXPAND:
        return width == own
    if node.op in PAD:
        is_apart = list(attribute(node, "pad")[:2]) == [0, 0]
        return is_apart and number(node.attrs.get("value") or 0.0) == 0
    if node.op in SELECT | SLICE:
        return int(attribute(node, "dim")) % rank != rank - 1
    return node.op == "aten.permute" and int(attribute(node, "dims")[-1]) % rank == rank - 1


def _cut(interval: Interval, low: object, high: object) -> Interval:
    """Clamped: first from below, then from above."""
    least, most = number(low), number(high)
    if (low is not None and least is None) or (high is not None and most is None):
        return EVERYTHING
    below = -math.inf if least is None else least
    above = math.inf if most is None else most
    start, end = (min(max(side, below), above) for side in interval)
    return start, end


def _range_of(data: torch.Tensor) -> Interval:
    if data.is_meta or data.is_complex() or not 0 < data.numel() <= _LARGEST_TABLE:
        return EVERYTHING
    rows = data.detach().reshape(-1) if data.dim() == 0 else data.detach()
    ends = []
    for strip in torch.split(rows, max(1, _STRIP * len(rows) // data.nbytes)):
        ends.append(torch.stack(strip.aminmax()))
        release_read(strip)
    low, high = (float(each.aminmax()[side]) for side, each in enumerate(torch.stack(ends, 1)))
    return EVERYTHING if math.isnan(low) or math.isnan(high) else (low, high)


def _within(dtype: torch.dtype, found: Interval) -> Interval:
    """What a dtype holds of an interval: beyond its range a float is infinite."""
    low, high = found
    if math.isnan(low) or math.isnan(high) or dtype.is_complex:
        return EVERYTHING
    if dtype == torch.bool:
        return max(low, 0.0), min(high, 1.0)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        low, high = (math.trunc(end) if math.isfinite(end) else end for end in found)
        # An integer beyond the range wraps around.
        return (low, high) if info.min <= low and high <= info.max else (info.min, info.max)
    end = torch.finfo(dtype).max
    return (low if low >= -end else -math.inf), (high if high <= end else math.inf)


def _plus(a: Interval, b: Interval) -> Interval:
    low, high = a[0] + b[0], a[1] + b[1]
    return EVERYTHING if math.isnan(low) or math.isnan(high) else (low, high)


def _times(a: Interval, b: Interval) -> Interval:
    if min(a[0], b[0]) >= 0 and math.inf in (a[1], b[1]):
        return 0.0, math.inf
    products = [x * y for x in a for y in b]
    return EVERYTHING if any(map(math.isnan, products)) else (min(products), max(products))


def _exp(end: float) -> float:
    return math.exp(end) if end < _GREATEST_EXPONENT else math.inf


def _joined(parts: Sequence[Interval]) -> Interval:
    return min(low for low, _ in parts), max(high for _, high in parts)
