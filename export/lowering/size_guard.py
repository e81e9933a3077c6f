"""A check of the sizes in the file itself: outside of what it is right for, a run fails.

torch.export decides `if k.shape[1] > 12` for good, and passes use the ranges of the dims, so
another size would be answered with another model's result. The check is a handful of scalars:

    Shape(x) → Div by (largest + 1) → Gather from one zero → Reshape(x)

An index beyond 0 leaves the constant of one element, which is an error in onnxruntime, whose
message has the node's name: that is the sentence. What else is required is added to the index, as
is the distance of an axis from the size that it should have, such as 8*c. Within the limits every
index is 0, and a Reshape to zeros keeps each dim (`allowzero` = 0) and copies nothing. What reads
the input reads it through the Reshape, so no optimiser may drop the check, and none can fold it: it
depends on the shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir
import sympy
import torch

from attngraph.errors import LoweringError
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.operators import with_branches
from attngraph.ir import Value
from attngraph.ir.conditions import Condition, shown
from attngraph.ir.derived_axes import DerivedAxis
from attngraph.ir.dims import symbols_of
from attngraph.ir.ranges import GUARD_PREFIX, Ranges

_NO_LIMIT = 2**62
"""A divisor that leaves 0 of every size."""


def guard_inputs(ctx: LoweringContext) -> None:
    """Lets the graph read an input only if its sizes are those that it is right for.

    To be called when the inputs are bound, before anything reads them. Raises LoweringError for a
    condition that has no ONNX form.
    """
    limits, axes = limits_of(ctx), axes_of(ctx)
    through = _through(ctx, limits, axes)
    if (limits or axes) and through is not None:
        _guard(ctx, through, limits, axes)


def guard_output(ctx: LoweringContext) -> None:
    """Guards an output, for a graph that reads no more of its inputs than their sizes."""
    for value in ctx.graph.outputs:
        tensor = ctx.value(value)
        if value.shape and tensor.producer() is not None:
            tensor.name = ctx.unique(f"{tensor.name}.unguarded")  # its name is the output's
            _guard(ctx, value, limits_of(ctx), axes_of(ctx))
            return


def is_guarded(nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> bool:
    """Whether an output depends on the check."""
    needed = set(outputs)
    for node in reversed(nodes):
        if any(value in needed for value in node.outputs):
            if (node.name or "").startswith(GUARD_PREFIX):
                return True
            needed.update(_reads(node))
    return False


def _reads(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads, within its graphs and those in these too."""
    for part in with_branches([node]):
        yield from (value for value in part.inputs if value is not None)


def limits_of(ctx: LoweringContext) -> list[Condition]:
    """What the file checks."""
    limits = list(Ranges.of(ctx.graph).limits())
    buffers = ctx.buffers
    is_given = buffers is not None and buffers.length is not None
    if buffers is not None and is_given and ctx.target.provider != "cpu":
        # The number of tokens in the buffers lies on the device, and a step doesn't wait for it.
        limits = [limit for limit in limits if buffers.dim not in symbols_of(limit)]
    return limits


def axes_of(ctx: LoweringContext) -> list[DerivedAxis]:
    """The axes of inputs whose sizes the file compares with what they are made of."""
    buffers = ctx.buffers
    axes = Ranges.of(ctx.graph).axes
    return [axis for axis in axes if buffers is None or axis.dim != buffers.dim]


def _guard(
    ctx: LoweringContext,
    through: Value,
    limits: Sequence[Condition],
    axes: Sequence[DerivedAxis],
) -> None:
    tensor = ctx.value(through)
    largest, others = _by_axis(through, limits)
    index: ir.Value | None = None
    if any(limit != _NO_LIMIT for limit in largest):
        divisors = ctx.constant([limit + 1 for limit in largest], torch.int64, name="limits")
        index = ctx.op("Div", ctx.op("Shape", tensor), divisors)
    for flag in (*_flags(ctx, others), *_distances(ctx, axes)):
        index = flag if index is None else ctx.op("Add", index, flag)
    assert index is not None
    if all(limit == _NO_LIMIT for limit in largest):
        index = ctx.op("Add", index, ctx.constant([0] * len(through.shape), torch.int64))
    zeros = ctx.op("Gather", ctx.constant([0], torch.int64), index)
    told = [*map(shown, limits), *(axis.told for axis in axes)]
    ctx.nodes[-1].name = f"{GUARD_PREFIX}{', '.join(told)}"
    kept = ctx.op("Reshape", tensor, zeros)
    kept.shape = tensor.shape
    if tensor.dtype is not None:
        kept.dtype = tensor.dtype
    ctx.bind(through, kept, own=False)


def _through(
    ctx: LoweringContext, limits: Sequence[Condition], axes: Sequence[DerivedAxis]
) -> Value | None:
    """The input that is read through the check: the one that has most of the limits itself.

    Rather one whose axes are made of dims: what reads it may fail at any other size before the
    check does. Not one that is a buffer, or returned as it is: either would be copied.
    """
    outputs = set(ctx.graph.outputs)
    return max(
        (
            value
            for value in ctx.graph.inputs
            if value.uses and value.shape and value not in outputs
            if ctx.buffers is None or not ctx.buffers.holds(value)
        ),
        key=lambda value: (
            value.dtype != torch.bfloat16,  # which the CPU reshapes as float32
            sum(axis.name == value.name for axis in axes),
            len(limits) - len(_by_axis(value, limits)[1]),
            not value.dtype.is_floating_point,
        ),
        default=None,
    )


def _by_axis(value: Value, limits: Sequence[Condition]) -> tuple[list[int], list[Condition]]:
    """The largest size of each axis of the input, and the conditions that these don't say."""
    largest, others = [_NO_LIMIT] * len(value.shape), []
    for limit in limits:
        axis = next((a for a, dim in enumerate(value.shape) if limit.args[0] == dim), None)
        if isinstance(limit, sympy.LessThan) and limit.args[1].is_Integer and axis is not None:
            largest[axis] = min(largest[axis], int(limit.args[1]))
        else:
            others.append(limit)
    return largest, others


def _flags(ctx: LoweringContext, limits: Sequence[Condition]) -> Iterator[ir.Value]:
    """For each condition a vector (1,) i64 that is 0 where it holds, and positive elsewhere."""
    for limit in limits:
        sides = limit.args if isinstance(limit, (sympy.Le, sympy.Eq)) else (limit, limit)
        left, right = sides
        is_plain = bool(getattr(left, "is_nonnegative", False) and left.is_integer)
        if isinstance(limit, sympy.Le) and is_plain and right.is_Integer:
            divisor = ctx.constant([int(right) + 1], torch.int64)
            yield ctx.op("Div", ctx.shape([left]), divisor)
        elif isinstance(limit, sympy.Eq) and is_plain and right == 0:
            yield ctx.shape([left])
        else:
            yield ctx.op("Cast", _fails(ctx, limit), to=ir.DataType.INT64)


def _distances(ctx: LoweringContext, axes: Sequence[DerivedAxis]) -> Iterator[ir.Value]:
    """For each axis a vector (1,) i64: how far its size is from what its dim makes of it."""
    inputs = {value.name: value for value in ctx.graph.inputs}
    for each in axes:
        tensor = ctx.value(inputs[each.name])
        size = ctx.op("Shape", tensor, start=each.axis, end=each.axis + 1)
        yield ctx.op("Abs", ctx.op("Sub", size, ctx.shape([each.size])))


_OPPOSITE = {
    sympy.LessThan: ("Greater", False),
    sympy.StrictLessThan: ("Less", True),
    sympy.GreaterThan: ("Less", False),
    sympy.StrictGreaterThan: ("Greater", True),
    sympy.Equality: ("Equal", True),
    sympy.Unequality: ("Equal", False),
}
"""The comparison that tells whether a relation fails, or whether it holds (True)."""


def _fails(ctx: LoweringContext, condition: Condition) -> ir.Value:
    """Whether a condition fails, (1,) bool."""
    if isinstance(condition, (sympy.And, sympy.Or)):
        op_type = "Or" if isinstance(condition, sympy.And) else "And"
        first, *rest = sorted(condition.args, key=shown)
        result = _fails(ctx, first)
        for part in rest:
            result = ctx.op(op_type, result, _fails(ctx, part))
        return result
    if isinstance(condition, sympy.Not):
        return ctx.op("Not", _fails(ctx, condition.args[0]))
    kind = next((kind for kind in _OPPOSITE if isinstance(condition, kind)), None)
    if kind is None:
        raise LoweringError(f"The condition {condition} on the sizes has no ONNX form.")
    op_type, holds = _OPPOSITE[kind]
    if all(side.is_integer for side in condition.args):
        sides = [ctx.shape([side]) for side in condition.args]
    else:
        reals = [ctx.number(side, torch.float64) for side in condition.args]
        sides = [ctx.op("Unsqueeze", real, ctx.constant([0], torch.int64)) for real in reals]
    compared = ctx.op(op_type, *sides)
    return ctx.op("Not", compared) if holds else compared
