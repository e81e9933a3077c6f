"""Rotary position embeddings as ai.onnx `RotaryEmbedding`-23."""

from __future__ import annotations

import onnx_ir as ir
import torch

from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Node
from attngraph.ir.ops import attribute, inputs_of

_KERNELS = {
    "cpu": (torch.float32, torch.float16),
    "cuda": (torch.float32, torch.float16, torch.bfloat16),
}


@register_lowering("attn.rotary")
def lower_rotary(ctx: LoweringContext, node: Node) -> ir.Value | None:
    """The 3-D form with a cosine and a sine per position of each batch element.

    In dtypes without a kernel, and before opset 23, it stays the products that it stands for.
    """
    x, cos, sin = inputs_of(node, "x", "cos", "sin")
    if x.dtype not in _KERNELS[ctx.target.provider] or not ctx.has("RotaryEmbedding"):
        return None
    heads, width = attribute(node, "heads"), 2 * cos.shape[2]
    partial = width != x.shape[2] // heads
    return ctx.op(
        "RotaryEmbedding",
        ctx.value(x),
        *(ctx.expand(ctx.value(t), t.shape, [*x.shape[:2], t.shape[2]]) for t in (cos, sin)),
        num_heads=heads,
        interleaved=int(attribute(node, "interleaved")) or None,
        rotary_embedding_dim=width if partial else None,
    )
