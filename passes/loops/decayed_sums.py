"""States that each step multiplies by one number of each head and adds something to: normalisers.

S' = a ∘ S + u, element by element, is read off the nodes, with a and u built beside them, so it
holds for all numbers. a has a number for each head, the first axes of a state, and none for the
features behind them: this is the operator's state of one key, which every token writes and reads as
it is. What reads the state then has it in all steps, however it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attngraph.analysis.recurrence.kept import MOST_DECAYS
from attngraph.analysis.walks import stripped
from attngraph.ir import Builder, Dim, Node, Value
from attngraph.ir.dims import product, same_shape
from attngraph.ir.slices import backward_slice, forward_slice
from attngraph.ir.traits import ADDITIVE, COPY, MULTIPLICATIVE, NEGATION, RESHAPE, SCALE

Part = Value | None
"""A value of a step; None for 0."""


@dataclass(frozen=True)
class DecayedSum:
    """S' = decay ∘ S + added, of a state (B, …).

    `decay` has B·H elements, of the state's first axes, and is None for 1; it is in log space if
    `is_log`, else at least 0. `added` may have to be expanded to the state.
    """

    added: Value
    decay: Value | None
    is_log: bool
    heads: int


def read_decayed_sum(
    inner: Builder, state: Value, after: Value, least: Callable[[Value], float]
) -> DecayedSum | None:
    """How a step makes the next state; None where it isn't such a sum. Nodes may be built into the
    step. `least` gives what no number of a value is below."""
    shape = state.shape
    if len(shape) < 2 or not all(isinstance(size, int) for size in shape[1:]):
        return None
    affine = _Affine(inner, state)
    slope, added = affine.of(after)
    if slope is None or added is None:
        return None
    if slope is affine.one:
        return DecayedSum(added, None, False, 1)
    own: list[Dim] = [*[1] * (len(shape) - len(slope.shape)), *slope.shape]
    count = max((at + 1 for at, size in enumerate(own) if size != 1), default=1)
    heads = product(shape[1:count])
    if not isinstance(heads, int) or heads > MOST_DECAYS:
        return None
    whole = [*shape[:count], *[1] * (len(shape) - count)]
    base = stripped(slope, RESHAPE)
    node = base.producer
    if node is not None and node.op == "aten.exp" and (log := node.inputs[0]) is not None:
        log = inner("aten.reshape", log, shape=list(slope.shape))
        return DecayedSum(added, inner("aten.expand", log, size=whole), True, heads)
    if least(base) < 0:
        return None
    return DecayedSum(added, inner("aten.expand", slope, size=whole), False, heads)


class _Affine:
    """Values of a step as slope ∘ state + offset."""

    def __init__(self, inner: Builder, state: Value) -> None:
        self.inner, self.state = inner, state
        self.one = self._number(1.0)
        self.known: dict[Value, tuple[Part, Part]] = {state: (self.one, None)}

    def of(self, root: Value) -> tuple[Part, Part]:
        """Nothing of both for what isn't known to be such a function."""
        _, nodes = backward_slice([root], lambda each: each is self.state)
        reached = forward_slice([self.state], nodes)
        for node in nodes:
            if node.outputs[0] in reached:
                parts = self._of_node(node, reached)
                if parts is None:
                    return None, None
                self.known[node.outputs[0]] = parts
        return self.known.get(root, (None, None))

    def _of_node(self, node: Node, reached: set[Value]) -> tuple[Part, Part] | None:
        inputs = node.operands
        if len(node.outputs) > 1 or not same_shape(node.output.shape, self.state.shape):
            return None
        if any(each not in self.known for each in inputs if each in reached):
            return None
        parts = [self.known.get(each, (None, each)) for each in inputs]
        slopes, offsets = [part[0] for part in parts], [part[1] for part in parts]
        if node.op in COPY:
            return parts[0]
        if node.op in NEGATION:
            return self._scaled(slopes[0], -1.0), self._scaled(offsets[0], -1.0)
        if node.op in ADDITIVE and node.attrs.get("alpha", 1) == 1:
            sign = -1.0 if "sub" in node.op else 1.0
            return self._sum(slopes, sign), self._sum(offsets, sign)
        if node.op in SCALE and "mul" in node.op:
            by = float(node.attrs["other"])
            return self._scaled(slopes[0], by), self._scaled(offsets[0], by)
        if node.op in MULTIPLICATIVE and "mul" in node.op:
            at = 0 if slopes[1] is None else 1
            by_value = offsets[1 - at]
            if slopes[1 - at] is not None or by_value is None:
                return None
            return self._times(slopes[at], by_value), self._times(offsets[at], by_value)
        if node.op == "aten.where.self" and inputs[0] not in reached:
            return self._chosen(inputs[0], slopes[1:]), self._chosen(inputs[0], offsets[1:])
        return None

    def _number(self, number: float) -> Value:
        return self.inner("aten.full", size=[], fill_value=number, dtype=self.state.dtype)

    def _scaled(self, part: Part, by: float) -> Part:
        return None if part is None else self.inner("aten.mul.Scalar", part, other=by)

    def _times(self, part: Part, by: Value) -> Part:
        if part is None:
            return None
        return by if part is self.one else self.inner("aten.mul.Tensor", part, by)

    def _sum(self, parts: list[Part], sign: float) -> Part:
        one, other = parts
        if one is None or other is None:
            return self._scaled(other, sign) if one is None and sign < 0 else one or other
        return self.inner("aten.sub.Tensor" if sign < 0 else "aten.add.Tensor", one, other)

    def _chosen(self, condition: Value, parts: list[Part]) -> Part:
        if parts == [None, None]:
            return None
        one, other = (self._number(0.0) if part is None else part for part in parts)
        return self.inner("aten.where.self", condition, one, other)


@dataclass(frozen=True)
class Summed:
    """A sum over all steps: the state behind each one, before each one (T, B, …), the last."""

    after: Value
    before: Value
    last: Value

    @classmethod
    def of(
        cls, build: Builder, found: DecayedSum, added: Value, decay: Value | None, initial: Value
    ) -> Summed:
        """From what is added and what remains in each step, (T, B, …)."""
        steps, shape = added.shape[0], list(initial.shape)
        features = product(shape[1:]) // found.heads
        tokens = [shape[0], steps, found.heads]
        ones = build("aten.full", size=tokens, fill_value=1.0, dtype=initial.dtype)

        def by_row(x: Value, width: Dim) -> Value:
            x = build("aten.reshape", x, shape=[steps, shape[0], width])
            return build("aten.permute", x, dims=[1, 0, 2])

        if decay is not None:
            decay = by_row(decay, found.heads)
            decay = decay if found.is_log else build("aten.log", decay)
        past = build("aten.reshape", initial, shape=[shape[0], found.heads, 1, features])
        value = by_row(added, found.heads * features)
        given, last = build.node(
            "attn.linear_attention",
            *(ones, ones, value, past, decay),
            heads=found.heads,
            kv_heads=found.heads,
            scale=1.0,
        ).outputs
        after = build("aten.permute", given, dims=[1, 0, 2])
        after = build("aten.reshape", after, shape=[steps, *shape])
        first = build("aten.reshape", initial, shape=[1, *shape])
        rest = build("aten.slice.Tensor", after, dim=0, start=0, end=-1)
        before = build("aten.cat", first, rest, dim=0)
        return cls(after, before, build("aten.reshape", last, shape=shape))
