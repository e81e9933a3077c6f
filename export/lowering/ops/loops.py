"""Loops over a sequence: ONNX's Scan."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Graph, Node, Value
from attngraph.ir.ops import attribute


@register_lowering("attn.scan")
def lower_scan(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    """What every step reads as it is comes from the graph around the body."""
    body: Graph = attribute(node, "body")
    carried, scanned = attribute(node, "carried"), attribute(node, "scanned")
    operands: list[Value] = node.operands
    own = carried + scanned
    captured = dict(zip(body.inputs[own:], operands[own:], strict=True))
    return ctx.ops(
        "Scan",
        *(ctx.value(value) for value in operands[:own]),
        outputs=len(node.outputs),
        body=ctx.loop_body(body, captured),
        num_scan_inputs=scanned,
    )
