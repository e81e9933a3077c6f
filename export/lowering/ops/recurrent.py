"""Recurrent layers: ONNX's RNN, GRU and LSTM, over any length of sequence."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Node
from attngraph.ir.ops import attribute, input_of

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
    if directions == 1:
        return [ctx.op("Squeeze", y, ctx.constant([1])), *finals]
    steps, batch = x.shape[0], x.shape[1]
    by_batch = ctx.op("Transpose", y, perm=[0, 2, 1, 3])
    packed = [steps, batch, directions * hidden]
    return [ctx.reshape(by_batch, [steps, batch, directions, hidden], packed), *finals]
