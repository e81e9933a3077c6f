"""Mixtures of experts: onnxruntime's `MoE`, and rows sorted by expert with a matrix for each."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from attngraph.dialect.experts import CODE_BITS, GATED
from attngraph.errors import LoweringError
from attngraph.export.lowering.emission.context import MICROSOFT, LoweringContext
from attngraph.export.lowering.emission.products import matmul
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Dim, Node, Value
from attngraph.ir.ops import attribute, inputs_of

_ACTIVATIONS = {
    "identity": "identity",
    "relu": "relu",
    "gelu_tanh": "gelu",  # onnxruntime's is the tanh form
    "silu": "silu",
    GATED: "swiglu",
}
_LEAST = -1e30  # the logit of an expert that isn't chosen


@register_lowering("attn.routed_moe")
def lower_routed_moe(ctx: LoweringContext, node: Node) -> ir.Value:
    """`MoE` takes the softmax of what its schema calls probabilities, and then the largest.

    Not normalised (`normalize_routing_weights` = 0), its CPU kernel gives zeros where it is handed
    its input's buffer for the output, as it is between two nodes. So it always normalises, and the
    sum that it divides by is computed beside it. That is 1 where the weights are normalised, or NaN
    where the row's scores have no softmax, for which the kernel gives numbers.
    """
    scores, count = ctx.args(node)["scores"], attribute(node, "count")
    weights = ctx.op("Softmax", scores, axis=-1)
    if not attribute(node, "normalized"):
        weights, _ = ctx.ops("TopK", weights, ctx.constant([count]), outputs=2)
    total = ctx.op("ReduceSum", weights, ctx.constant([1]), keepdims=1)
    return ctx.op("Mul", _mixture(ctx, node, scores, count), total)


@register_lowering("attn.moe")
def lower_moe(ctx: LoweringContext, node: Node) -> ir.Value:
    """Σ w · `MoE` of log w: the softmax inside of it gives w / Σ w.

    A row whose weights are all 0 has equal logits, so it is finite, and 0 times its sum.
    """
    args = ctx.args(node)
    weights, up = inputs_of(node, "weights", "up")
    zeros = ctx.op(
        "Expand", ctx.constant(0.0, weights.dtype), ctx.shape([weights.shape[0], up.shape[0]])
    )
    dense = ctx.op(
        "ScatterElements", zeros, args["experts"], args["weights"], axis=1, reduction="add"
    )
    logits = ctx.op("Max", ctx.op("Log", dense), ctx.constant(_LEAST, weights.dtype))
    made = _mixture(ctx, node, logits, weights.shape[1])
    total = ctx.op("ReduceSum", args["weights"], ctx.constant([1]), keepdims=1)
    return ctx.op("Mul", made, total)


def _mixture(ctx: LoweringContext, node: Node, logits: ir.Value, count: int) -> ir.Value:
    args = ctx.args(node)
    activation = attribute(node, "activation")
    limit = attribute(node, "limit")
    gated: dict[str, Any] = {
        "swiglu_fusion": 1,
        "activation_alpha": float(attribute(node, "alpha")),
        "activation_beta": float(attribute(node, "beta")),
        "swiglu_limit": None if limit is None else float(limit),
    }
    sides: dict[str, list[ir.Value | None]] = {"up": [], "down": []}
    coded: dict[str, Any] = {}
    for side, inputs in sides.items():
        inputs.append(args[side])
        if (scales := args[f"{side}_scales"]) is not None:
            inputs.append(scales)
            coded = {"expert_weight_bits": CODE_BITS, "block_size": _block(node)}
        inputs.append(args[f"{side}_bias"])
    return ctx.op(
        "QMoE" if coded else "MoE",
        *(args["x"], logits, *sides["up"], *sides["down"]),
        domain=MICROSOFT,
        k=count,
        normalize_routing_weights=1,
        activation_type=_ACTIVATIONS[activation],
        **(gated if activation == GATED else {}),
        **coded,
    )


def _block(node: Node) -> Dim:
    """How many features share a scale."""
    codes, scales = inputs_of(node, "up", "up_scales")
    return codes.shape[-1] * 8 // CODE_BITS // scales.shape[-1]


@register_lowering("aten._grouped_mm")
def lower_grouped_mm(ctx: LoweringContext, node: Node) -> ir.Value:
    args = ctx.args(node)
    left, right = inputs_of(node, "self", "mat2")
    if args["bias"] is not None:
        raise LoweringError("a bias of _grouped_mm has no meaning in torch yet")
    if len(left.shape) == 3 and len(right.shape) == 3 and args["offs"] is None:
        return matmul(ctx, left, right)
    if len(left.shape) != 2 or len(right.shape) != 3:
        raise LoweringError("_grouped_mm has an ONNX form only where offsets split the rows")
    return _by_rows(ctx, left, right, args["offs"])


@register_lowering("transformers.grouped_mm_fallback")
def lower_grouped_mm_fallback(ctx: LoweringContext, node: Node) -> ir.Value:
    left, right = inputs_of(node, "input", "weight")
    return _by_rows(ctx, left, right, ctx.args(node)["offs"])


def _by_rows(ctx: LoweringContext, left: Value, right: Value, offsets: ir.Value) -> ir.Value:
    """(S, K) × (G, K, N) → (S, N), where rows offsets[g-1] to offsets[g] take matrix g.

    The rows are split at run time into one part per group, some of them empty, and a rest that no
    group has, which gives zeros. So each row is multiplied once and no weight is copied per row.
    """
    groups = right.shape[0]
    if not isinstance(groups, int):
        raise LoweringError("its number of groups is dynamic; make it a constant of the model")
    (_, inner, width), rows = right.shape, left.shape[0]
    ends = ctx.op("Concat", ctx.cast(offsets, torch.int64), ctx.shape([rows]), axis=0)
    starts = ctx.op("Pad", ends, ctx.constant([1, -1]), mode="constant")
    counts = ctx.op("Sub", ends, starts)
    parts = ctx.ops("Split", ctx.value(left), counts, outputs=groups + 1, axis=0)
    beneath = ctx.op("Reshape", ctx.value(right), ctx.shape([groups * inner, width]))
    matrices = ctx.ops("Split", beneath, outputs=groups, axis=0, num_outputs=groups)
    done = [ctx.op("MatMul", part, matrix) for part, matrix in zip(parts, matrices, strict=False)]
    rest = ctx.op("Slice", counts, ctx.constant([groups]), ctx.constant([groups + 1]))
    size = ctx.op("Concat", rest, ctx.shape([width]), axis=0)
    done.append(ctx.op("Expand", ctx.constant(0.0, left.dtype), size))
    return ctx.op("Concat", *done, axis=0)
