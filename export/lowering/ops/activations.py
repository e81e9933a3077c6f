"""Activations of the `attn` dialect, on onnxruntime's own operators where it has kernels."""

from __future__ import annotations

import onnx_ir as ir
import torch

from attngraph.export.lowering.emission.context import MICROSOFT, LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Node
from attngraph.ir.ops import attribute

_KERNELS = (torch.float32, torch.float16, torch.bfloat16)


@register_lowering("attn.bias_gelu")
def lower_bias_gelu(ctx: LoweringContext, node: Node) -> ir.Value:
    args = ctx.args(node)
    x, bias = args["x"], args["bias"]
    if node.output.dtype in _KERNELS and ctx.has("BiasGelu", MICROSOFT):
        return ctx.op("BiasGelu", x, bias, domain=MICROSOFT)
    return ctx.op("Gelu", ctx.op("Add", x, bias))


@register_lowering("attn.quick_gelu")
def lower_quick_gelu(ctx: LoweringContext, node: Node) -> ir.Value:
    x, alpha = ctx.args(node)["x"], float(attribute(node, "alpha"))
    if node.output.dtype in _KERNELS and ctx.has("QuickGelu", MICROSOFT):
        return ctx.op("QuickGelu", x, domain=MICROSOFT, alpha=alpha)
    scaled = ctx.op("Mul", x, ctx.constant(alpha, node.output.dtype))
    return ctx.op("Mul", x, ctx.op("Sigmoid", scaled))
