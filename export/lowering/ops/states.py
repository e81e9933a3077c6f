"""Ops with a state: linear attention and short convolutions as what is fastest.

`LinearAttention` is for heads, a Scan for channels that have a state each (`is_by_channel`);
`CausalConvWithState` is for few tokens, `Conv` for many.

Measured on the CPU, 2048 channels, one thread: for one token the operator takes 0.02 ms and `Conv`
0.24; they meet between 8 and 32; for 1024 it takes 33 ms and `Conv` 9.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from attngraph.analysis.recurrence.terms import is_by_channel
from attngraph.analysis.values.intervals import Intervals
from attngraph.analysis.values.matching import producer
from attngraph.analysis.values.scalars import uniform
from attngraph.errors import LoweringError
from attngraph.export.lowering.emission.context import MICROSOFT, LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Builder, Dim, Graph, Node, TensorType, Value
from attngraph.ir.dims import bounds
from attngraph.ir.ops import attribute, input_of, inputs_of
from attngraph.ir.types import dtype_name

_KERNELS = (torch.float32, torch.float16)
_LANES = 32  # features of a value that the kernel of LinearAttention takes at a time
_NARROW = 16  # fewer take no longer than as many as are filled up
_SHORT = 16  # tokens that take no longer than it takes to fill up values
_FEW = 8
"""Places up to which the operator takes less time than `Conv`."""


@register_lowering("attn.causal_conv")
def lower_causal_conv(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    """Where the number of places is dynamic and a state is handed on, a run decides."""
    x, weight = inputs_of(node, "x", "weight")
    has_kernel = ctx.target.provider == "cpu" and x.dtype in _KERNELS
    has_kernel = has_kernel and ctx.has("CausalConvWithState", MICROSOFT)
    low, high = bounds(x.shape[2], ctx.graph.dims)
    if has_kernel and high is not None and high <= _FEW:
        return _operator(ctx, node)
    reach = (int(weight.shape[2]) - 1) * attribute(node, "dilation")
    if input_of(node, "past") is None:
        pads = ctx.constant([0, 0, reach, 0, 0, 0])
        joined = ctx.op("Pad", ctx.value(x), pads, mode="constant")
        return [_convolution(ctx, node, ctx.value(x), reach), _end(ctx, joined, reach)]
    joined = ctx.op("Concat", ctx.args(node)["past"], ctx.value(x), axis=2)
    present = _end(ctx, joined, reach)
    if not has_kernel or low > _FEW:
        return [_convolution(ctx, node, joined, 0), present]
    few = ctx.op("LessOrEqual", ctx.dim(x.shape[2]), ctx.constant(_FEW))
    y = ctx.branch(
        few,
        lambda: _operator(ctx, node)[0],
        lambda: _convolution(ctx, node, joined, 0),
    )
    return [y, present]


def _operator(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    args = ctx.args(node)
    dilation = attribute(node, "dilation")
    return ctx.ops(
        "CausalConvWithState",
        *(args["x"], args["weight"], args["bias"], args["past"]),
        outputs=2,
        domain=MICROSOFT,
        activation=attribute(node, "activation"),
        dilation=None if dilation == 1 else dilation,
    )


def _convolution(ctx: LoweringContext, node: Node, x: ir.Value, before: int) -> ir.Value:
    """`Conv` with `before` zeros on the left, and the activation."""
    args = ctx.args(node)
    y = ctx.op(
        "Conv",
        *(x, args["weight"], args["bias"]),
        pads=[before, 0],
        dilations=[attribute(node, "dilation")],
        group=input_of(node, "weight").shape[0],
    )
    if attribute(node, "activation") == "silu":
        y = ctx.op("Mul", y, ctx.op("Sigmoid", y))
    return y


def _end(ctx: LoweringContext, joined: ir.Value, reach: int) -> ir.Value:
    """The last `reach` places; what nothing reads is left out of the file."""
    last = ctx.constant([torch.iinfo(torch.int64).max])
    return ctx.op("Slice", joined, ctx.constant([-reach]), last, ctx.constant([2]))


@register_lowering("attn.linear_attention")
def lower_linear_attention(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    """`LinearAttention`, whose update rule says which operands there are, or a Scan."""
    if is_by_channel(node):
        return _by_channels(ctx, node)
    args, dtype = ctx.args(node), input_of(node, "value").dtype
    if why := ctx.target.refuses(f"{MICROSOFT}.LinearAttention"):
        raise LoweringError(f"onnxruntime's LinearAttention is no choice, for {why}")
    if ctx.target.provider != "cpu" or dtype not in _KERNELS:
        raise LoweringError(
            f"onnxruntime has a kernel for LinearAttention in float32 and float16 on the CPU, not "
            f"in {dtype_name(dtype)} on {ctx.target}"
        )
    length, features = input_of(node, "value").shape[1], node.outputs[1].shape[3]
    low, high = bounds(length, ctx.graph.dims)

    def plain() -> Sequence[ir.Value]:
        return _one_operator(ctx, node, args["value"], args["past"])

    if features % _LANES == 0 or features < _NARROW or (high is not None and high <= _SHORT):
        return plain()
    if low > _SHORT:
        return _wider(ctx, node)
    few = ctx.op("LessOrEqual", ctx.dim(length), ctx.constant(_SHORT))
    return ctx.branches(few, plain, lambda: _wider(ctx, node))


def _one_operator(
    ctx: LoweringContext, node: Node, value: ir.Value, past: ir.Value | None
) -> Sequence[ir.Value]:
    args = ctx.args(node)
    rule = "delta" if args["beta"] is not None else "linear"
    if args["decay"] is not None:
        rule = "gated_delta" if rule == "delta" else "gated"
    return ctx.ops(
        "LinearAttention",
        *(args["query"], args["key"], value, past, args["decay"], args["beta"]),
        outputs=2,
        domain=MICROSOFT,
        update_rule=rule,
        q_num_heads=args["heads"],
        kv_num_heads=args["kv_heads"],
        scale=float(args["scale"]),
    )


def _wider(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    """With zeros behind each head's value, up to as many features as the kernel takes at a time:
    a rest takes it longer than all of them do. 512 tokens took 1.5 to 4.2 times as long without
    these, of 8 × 48, 32 × 16, 4 × 80, 8 × 68 and 4 × 24 features, and 17 tokens 1.1 to 2 times.
    """
    value, past = inputs_of(node, "value", "past")
    (batch, length, _), (_, count, _, features) = value.shape, node.outputs[1].shape
    width = -(-features // _LANES) * _LANES
    ends = ctx.constant([0] * 7 + [width - features])

    def filled(x: ir.Value) -> ir.Value:
        return ctx.op("Pad", x, ends, mode="constant")

    def cut(x: ir.Value) -> ir.Value:
        return ctx.op("Slice", x, *(ctx.constant([at]) for at in (0, features, 3)))

    split = ctx.reshape(ctx.value(value), value.shape, [batch, length, count, features])
    rows = ctx.reshape(filled(split), [batch, length, count, width], [batch, length, count * width])
    before = None if past is None else filled(ctx.value(past))
    seen, last = _one_operator(ctx, node, rows, before)
    shape = node.outputs[0].shape
    heads = shape[2] // features
    seen = cut(ctx.reshape(seen, [batch, length, heads * width], [batch, length, heads, width]))
    return [ctx.reshape(seen, [batch, length, heads, features], shape), cut(last)]


def _by_channels(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    """A Scan whose state is (B, Hq, C, dk), C channels of each query; what a token brings, k v, and
    what it leaves, e^g, are computed for all tokens before it.
    """
    query, key, value = inputs_of(node, "query", "key", "value")
    past, decay = inputs_of(node, "past", "decay")
    batch, length, width = query.shape
    heads, count = attribute(node, "heads"), attribute(node, "kv_heads")
    keys = width // heads
    rows, state = [batch, length, count], [batch, heads, count // heads, keys]

    def split(x: Value, features: Dim) -> ir.Value:
        return ctx.reshape(ctx.value(x), x.shape, [*rows, features])

    def by_token(x: ir.Value, features: Dim) -> ir.Value:
        shaped = ctx.reshape(x, [*rows, features], [*rows[:2], *state[1:3], features])
        return ctx.op("Transpose", shaped, perm=[1, 0, 2, 3, 4])

    added = split(key, keys)
    if uniform(value) != 1:
        added = ctx.op("Mul", added, split(value, 1))
    given = [by_token(added, keys)]
    kinds: list[list[Dim]] = [state]
    if decay is not None:
        features = decay.shape[2] // count
        log = producer(decay, "aten.log")
        if log is not None and Intervals().of(input_of(log, "self"))[0] < 0:
            log = None  # below 0 the logarithm is NaN
        left = split(decay if log is None else input_of(log, "self"), features)
        kinds.append([*state[:3], features])
        given.append(by_token(left if log is not None else ctx.op("Exp", left), features))
    kinds.append([batch, heads, *((1, keys) if heads == count else (keys, 1))])
    asked = ctx.reshape(ctx.value(query), query.shape, [batch, length, *kinds[-1][1:]])
    given.append(ctx.op("Transpose", asked, perm=[1, 0, 2, 3, 4]))
    if past is None:
        zero = ctx.constant(0.0, query.dtype)
        first = ctx.expand(zero, [], state)
    else:
        first = ctx.reshape(ctx.value(past), past.shape, state)
    last, seen = ctx.ops(
        "Scan",
        *(first, *given),
        outputs=2,
        body=ctx.loop_body(_step(ctx.graph, state, kinds), {}),
        num_scan_inputs=len(given),
    )
    y = ctx.op("Transpose", seen, perm=[1, 0, 2, 3, 4])
    y = ctx.reshape(y, [batch, length, heads, count // heads, 1], [*rows])
    if attribute(node, "scale") != 1:
        y = ctx.op("Mul", y, ctx.constant(float(attribute(node, "scale")), query.dtype))
    return [y, ctx.reshape(last, state, [batch, count, keys, 1])]


def _step(graph: Graph, state: Sequence[Dim], kinds: Sequence[Sequence[Dim]]) -> Graph:
    """S' = a S + u and S' q, of the state, u, a where there is a decay, and q, of these shapes.

    q is (B, Hq, dk, 1), or (B, Hq, 1, dk) where each channel has its own.
    """
    body = Graph("channels")
    body.dims = graph.dims
    shapes = [state, *kinds]
    kept, added, *decay, query = (
        body.add_input("given", TensorType(torch.float32, tuple(shape))) for shape in shapes
    )
    build = Builder(body)
    for each in decay:
        kept = build("aten.mul.Tensor", each, kept)
    after = build("aten.add.Tensor", kept, added)
    if query.shape[3] == 1:
        seen = build("aten.matmul", after, query)
    else:  # a row for each query, which is slower as a product of matrices
        both = build("aten.mul.Tensor", after, query)
        seen = build("aten.sum.dim_IntList", both, dim=[-1], keepdim=True)
    body.set_outputs([after, seen])
    return body
