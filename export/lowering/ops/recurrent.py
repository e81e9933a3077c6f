"""Recurrent layers: ONNX's RNN, GRU and LSTM, over any length of sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from attngraph.analysis.masks.nans import may_be_nan
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Node
from attngraph.ir.ops import attribute, input_of, inputs_of

_OPERATORS = {
    "rnn_tanh": "RNN",
    "rnn_relu": "RNN",
    "gru": "GRU",
    "gru_reset_first": "GRU",
    "lstm": "LSTM",
}


@register_lowering("attn.recurrent")
def lower_recurrent(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    """ONNX's y is (T, D, B, H); ours joins the directions on the features, as torch does."""
    args = ctx.args(node)
    cell = attribute(node, "cell")
    operator = _OPERATORS[cell]
    directions, _, hidden = input_of(node, "recurrence").shape
    lengths = args["lengths"]
    if lengths is not None:
        lengths = ctx.op("Cast", lengths, to=ir.DataType.INT32)
    states = [args["h0"], args["c0"]] if cell == "lstm" else [args["h0"]]
    y, *finals = ctx.ops(
        operator,
        *(args["x"], args["weight"], args["recurrence"], args["bias"], lengths),
        *states,
        outputs=1 + len(states),
        hidden_size=hidden,
        direction="bidirectional" if directions == 2 else "forward",
        activations=["Relu"] * directions if cell == "rnn_relu" else None,
        linear_before_reset={"gru": 1, "gru_reset_first": 0}.get(cell),
    )
    x = input_of(node, "x")
    given = inputs_of(node, "x", "h0", "c0")
    if may_be_nan(given):
        y, *finals = _with_nan(ctx, node, (args["x"], *states), lengths, (y, *finals))
    if directions == 1:
        return [ctx.op("Squeeze", y, ctx.constant([1])), *finals]
    steps, batch = x.shape[0], x.shape[1]
    by_batch = ctx.op("Transpose", y, perm=[0, 2, 1, 3])
    packed = [steps, batch, directions * hidden]
    return [ctx.reshape(by_batch, [steps, batch, directions, hidden], packed), *finals]


def _with_nan(
    ctx: LoweringContext,
    node: Node,
    given: Sequence[ir.Value | None],
    lengths: ir.Value | None,
    made: Sequence[ir.Value],
) -> list[ir.Value]:
    """NaN from the first step that is given NaN on, as in torch: onnxruntime's kernels clip their
    gates, and so make numbers of it. `given` are x and the states, `made` the results with y first.
    """
    x, *states = given
    directions = input_of(node, "recurrence").shape[0]
    features, first, none = ctx.constant([-1]), ctx.constant([0]), ctx.constant(0, torch.float32)

    def marked(value: ir.Value) -> ir.Value:
        """1 for a row of features with NaN in it, else 0."""
        flags = ctx.op("Cast", ctx.op("IsNaN", value), to=ir.DataType.FLOAT)
        return ctx.op("ReduceMax", flags, features, keepdims=1)

    assert x is not None
    steps = marked(x)  # (T, B, 1)
    within = None
    if lengths is not None:
        ones = ctx.op("Add", ctx.op("Mul", steps, none), ctx.constant(1, torch.float32))
        place = ctx.op("CumSum", ones, ctx.constant(0))
        count = ctx.op("Cast", lengths, to=ir.DataType.FLOAT)
        inside = ctx.op("LessOrEqual", place, ctx.op("Unsqueeze", count, features))
        within = ctx.op("Cast", inside, to=ir.DataType.FLOAT)
        steps = ctx.op("Mul", steps, within)
    so_far = [ctx.op("CumSum", steps, ctx.constant(0), reverse=at) for at in range(directions)]
    if within is not None:
        so_far = [ctx.op("Mul", flags, within) for flags in so_far]
    by_direction = ctx.op(
        "Concat", *(ctx.op("Unsqueeze", f, ctx.constant([1])) for f in so_far), axis=1
    )
    at_end = ctx.op("ReduceMax", steps, first, keepdims=1)  # (1, B, 1)
    for state in states:
        if state is not None:  # (D, B, 1)
            begin = marked(state)
            by_direction, at_end = (ctx.op("Add", each, begin) for each in (by_direction, at_end))
    nan = ctx.constant(math.nan, node.outputs[0].dtype)
    flags = [by_direction, *[at_end] * (len(made) - 1)]
    return [
        ctx.op("Where", ctx.op("Greater", each, none), nan, value)
        for each, value in zip(flags, made, strict=True)
    ]
