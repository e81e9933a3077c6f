"""Normalisations and softmax."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from attngraph.export.lowering.emission.context import MICROSOFT, LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Node, Value
from attngraph.ir.dims import Dim
from attngraph.ir.ops import attribute, input_of, inputs_of


def _weight(ctx: LoweringContext, weight: Value | None, x: Value, shape: Sequence[Dim]) -> ir.Value:
    """The weight in x's dtype; ones where there is none, of sizes that the run may choose."""
    if weight is not None:
        return ctx.cast(ctx.value(weight), x.dtype)
    known = [size for size in shape if isinstance(size, int)]
    if len(known) == len(shape):
        return ctx.constant(torch.ones(known, dtype=x.dtype), name="ones")
    return ctx.op("Expand", ctx.constant(1.0, x.dtype), ctx.shape(shape))


@register_lowering("aten.layer_norm")
def lower_layer_norm(ctx: LoweringContext, node: Node) -> ir.Value:
    x, weight, bias = inputs_of(node, "input", "weight", "bias")
    shape = attribute(node, "normalized_shape")
    scale = _weight(ctx, weight, x, shape)
    shift = None if bias is None else ctx.cast(ctx.value(bias), x.dtype)
    epsilon = float(attribute(node, "eps"))
    return ctx.op(
        "LayerNormalization", ctx.value(x), scale, shift, axis=-len(shape), epsilon=epsilon
    )


@register_lowering("aten.rms_norm")
def lower_aten_rms_norm(ctx: LoweringContext, node: Node) -> ir.Value:
    x, weight = inputs_of(node, "input", "weight")
    shape, epsilon = attribute(node, "normalized_shape"), attribute(node, "eps")
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    epsilon = torch.finfo(wide).eps if epsilon is None else float(epsilon)
    scale = _weight(ctx, weight, x, shape)
    return _rms_norm(ctx, ctx.value(x), scale, -len(shape), epsilon)


def _rms_norm(
    ctx: LoweringContext, x: ir.Value, scale: ir.Value, axis: int, epsilon: float
) -> ir.Value:
    """`RMSNormalization`, whose statistics are those of float32 or wider; else its parts, in the
    order in which runtimes that have a kernel of their own know them."""
    if ctx.has("RMSNormalization"):
        return ctx.op("RMSNormalization", x, scale, axis=axis, epsilon=epsilon)
    dtype = torch.float64 if x.dtype == ir.DataType.DOUBLE else torch.float32
    wide, axes = ctx.cast(x, dtype), ctx.constant(list(range(axis, 0)))
    square = ctx.op("Pow", wide, ctx.constant(2.0, dtype))
    mean = ctx.op("ReduceMean", square, axes, keepdims=1)
    root = ctx.op("Sqrt", ctx.op("Add", mean, ctx.constant(epsilon, dtype)))
    normal = ctx.op("Div", wide, root)
    assert scale.dtype is not None
    return ctx.op("Mul", ctx.cast(normal, ir.tensor_adapters.to_torch_dtype(scale.dtype)), scale)


@register_lowering("attn.rms_norm")
def lower_rms_norm(ctx: LoweringContext, node: Node) -> ir.Value:
    """A weight wider than x multiplies afterwards, as in the reference."""
    x, weight = inputs_of(node, "x", "weight")
    epsilon = float(attribute(node, "eps"))
    mixed = weight is not None and weight.dtype != x.dtype
    scale = _weight(ctx, None if mixed else weight, x, [x.shape[-1]])
    result = _rms_norm(ctx, ctx.value(x), scale, -1, epsilon)
    if not mixed:
        return result
    dtype = node.output.dtype
    return ctx.op("Mul", ctx.cast(result, dtype), ctx.cast(ctx.value(weight), dtype))


@register_lowering("attn.skip_layer_norm")
def lower_skip_layer_norm(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    args, x = ctx.args(node), input_of(node, "x")
    # The CPU's SkipLayerNormalization takes twice as long as its parts (bench/kernels.py).
    slow = ctx.target.provider == "cpu" and x.dtype == torch.float32
    if _fused(ctx, node, "SkipLayerNormalization") and not slow:
        normal, _, _, total = ctx.ops(
            "SkipLayerNormalization",
            args["x"],
            args["skip"],
            _weight(ctx, input_of(node, "weight"), x, [x.shape[-1]]),
            args["bias"],
            args["x_bias"],
            outputs=(True, False, False, True),
            domain=MICROSOFT,
            epsilon=float(args["eps"]),
        )
        return normal, total
    added = "Sum" if slow and _would_be_fused(node) else "Add"
    total = ctx.op(added, args["x"], args["skip"])
    if args["x_bias"] is not None:
        total = ctx.op("Add", total, args["x_bias"])
    scale, shift = _weight(ctx, input_of(node, "weight"), x, [x.shape[-1]]), args["bias"]
    epsilon = float(args["eps"])
    return ctx.op("LayerNormalization", total, scale, shift, axis=-1, epsilon=epsilon), total


def _would_be_fused(node: Node) -> bool:
    """Whether onnxruntime's own optimiser makes SkipLayerNormalization of an Add before the norm.

    It doesn't where the bias is added last, or where something else reads the sum.
    """
    total = node.outputs[1]
    read = bool(total.uses) or (node.graph is not None and total in node.graph.outputs)
    return input_of(node, "x_bias") is None and not read


@register_lowering("attn.skip_rms_norm")
def lower_skip_rms_norm(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    args, x = ctx.args(node), input_of(node, "x")
    scale = _weight(ctx, input_of(node, "weight"), x, [x.shape[-1]])
    epsilon = float(args["eps"])
    if _fused(ctx, node, "SkipSimplifiedLayerNormalization"):
        normal, _, _, total = ctx.ops(
            "SkipSimplifiedLayerNormalization",
            args["x"],
            args["skip"],
            scale,
            outputs=(True, False, False, True),
            domain=MICROSOFT,
            epsilon=epsilon,
        )
        return normal, total
    total = ctx.op("Add", args["x"], args["skip"])
    return _rms_norm(ctx, total, scale, -1, epsilon), total


def _fused(ctx: LoweringContext, node: Node, op_type: str) -> bool:
    """Whether onnxruntime's fused kernel takes these operands: one dtype, (B, S, H) or (S, H)."""
    if not ctx.has(op_type, MICROSOFT):
        return False
    operands = node.operands
    dtypes = {value.dtype for value in operands}
    supported = {torch.float32, torch.float16, torch.bfloat16}
    x = operands[0]
    return len(dtypes) == 1 and dtypes <= supported and len(x.shape) in (2, 3)


@register_lowering("aten.softmax.int", "aten._softmax", "aten.log_softmax.int", "aten._log_softmax")
def lower_softmax(ctx: LoweringContext, node: Node) -> ir.Value:
    x = ctx.cast(ctx.args(node)["self"], node.output.dtype)
    op_type = "LogSoftmax" if "log" in node.op else "Softmax"
    return ctx.op(op_type, x, axis=attribute(node, "dim"))


@register_lowering("aten.cosine_similarity")
def lower_cosine_similarity(ctx: LoweringContext, node: Node) -> ir.Value:
    """x · y / (max(‖x‖, ε) max(‖y‖, ε)) along one axis."""
    x, y = inputs_of(node, "x1", "x2")
    rank = max(len(x.shape), len(y.shape))
    if not rank:
        return _sign_of_product(ctx, node)
    axis = ctx.constant([attribute(node, "dim") % rank - rank])
    epsilon = ctx.constant(float(attribute(node, "eps")), x.dtype)
    sides = [ctx.value(x), ctx.value(y)]
    dot = ctx.op("ReduceSum", ctx.op("Mul", *sides), axis, keepdims=1)
    norms = [ctx.op("Max", ctx.op("ReduceL2", s, axis, keepdims=1), epsilon) for s in sides]
    return ctx.op("Squeeze", ctx.op("Div", dot, ctx.op("Mul", *norms)), axis)


def _sign_of_product(ctx: LoweringContext, node: Node) -> ir.Value:
    """The cosine similarity of two numbers."""
    args = ctx.args(node)
    epsilon = ctx.constant(float(args["eps"]), node.output.dtype)
    parts = [
        ctx.op("Div", args[side], ctx.op("Max", ctx.op("Abs", args[side]), epsilon))
        for side in ("x1", "x2")
    ]
    return ctx.op("Mul", *parts)


@register_lowering("attn.sink_softmax")
def lower_sink_softmax(ctx: LoweringContext, node: Node) -> ir.Value:
    """Softmax over one more column, which is then cut off."""
    x, sink = inputs_of(node, "x", "sink")
    dim = attribute(node, "dim") % len(x.shape)
    column: list[Dim] = [1 if axis == dim else size for axis, size in enumerate(x.shape)]
    wide = ctx.expand(ctx.value(sink), sink.shape, column)
    logits = ctx.op("Concat", ctx.value(x), wide, axis=dim)
    probabilities = ctx.op("Softmax", logits, axis=dim)
    ends = ctx.shape([x.shape[dim]])
    return ctx.op("Slice", probabilities, ctx.constant([0]), ends, ctx.constant([dim]))
