"""Linears whose weights are codes of few bits, or whose products are of int8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import onnx_ir as ir
import torch

from attngraph.dialect.quantized import CODES, FINER, LEVELS, TINY, in_bytes
from attngraph.export.lowering.emission.context import MICROSOFT, LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Node, Value
from attngraph.ir.dims import Dim, as_dim
from attngraph.ir.ops import attribute, input_of, inputs_of
from attngraph.ir.traits import CENTRED_NORM, GELU


@register_lowering("attn.quantized_linear")
def lower_quantized_linear(ctx: LoweringContext, node: Node) -> ir.Value:
    """MatMulNBits, at accuracy level 4 where it is to round activations, else in float32.

    A portable file has DequantizeLinear, whose result is transposed: without that, sessions of
    onnxruntime make of it the operator that rounds activations.
    """
    x, codes, bias = inputs_of(node, "x", "codes", "bias")
    args, bits = ctx.args(node), int(attribute(node, "bits"))
    rounds = bool(attribute(node, "rounds"))
    if ctx.target.portable and not rounds:
        weight = ctx.once(
            ("dequantized", args["codes"]),
            lambda: ctx.op("Transpose", _dequantized(ctx, node, x.shape[-1]), perm=[1, 0]),
        )
        product = ctx.op("MatMul", args["x"], weight)
        return product if bias is None else ctx.op("Add", product, args["bias"])
    inside = ctx.target.provider == "cpu"  # CUDA's takes one in some versions only
    block = codes.shape[2] * 8 // bits
    if inside and bits == 8 and x.dtype is torch.float32 and not rounds:
        return _in_two_halves(ctx, node, args, block)
    product = _matmul_nbits(
        ctx,
        (
            args["x"],
            args["codes"],
            args["scales"],
            _zero_points(ctx, input_of(node, "zeros"), bits),
            args["bias"] if inside else None,
        ),
        (x.shape[-1], codes.shape[0]),
        (bits, block),
        accuracy_level=4 if rounds else 1 if x.dtype is torch.float32 else None,
    )
    return product if inside or bias is None else ctx.op("Add", product, args["bias"])


@register_lowering("attn.dequantize")
def lower_dequantize(ctx: LoweringContext, node: Node) -> ir.Value:
    return _dequantized(ctx, node, int(attribute(node, "width")))


def _dequantized(ctx: LoweringContext, node: Node, width: Dim) -> ir.Value:
    """DequantizeLinear of a weight (N, width). Without zeros its codes are signed ones."""
    codes, zeros = inputs_of(node, "codes", "zeros")
    bits, (rows, blocks, size) = int(attribute(node, "bits")), codes.shape
    block = size * 8 // bits
    signed = {4: ir.DataType.INT4, 8: ir.DataType.INT8}[bits]
    kind = signed if zeros is None else {4: ir.DataType.UINT4, 8: ir.DataType.UINT8}[bits]
    shift = 0 if zeros is not None else 0x88 if bits == 4 else 0x80

    def stored() -> torch.Tensor:
        assert codes.data is not None
        found: torch.Tensor = codes.data ^ shift
        return found

    def points() -> torch.Tensor:
        assert zeros is not None
        assert zeros.data is not None
        return in_bytes(zeros.data.flatten(), bits)

    zero = None if zeros is None else ctx.derived(zeros, "points", points, (rows, blocks), kind)
    whole = ctx.op(
        "DequantizeLinear",
        ctx.derived(codes, "whole", stored, (rows, blocks * block), kind),
        ctx.args(node)["scales"],
        zero,
        axis=1,
        block_size=block,
    )
    if as_dim(blocks * block) == width:
        return whole
    return ctx.op("Slice", whole, ctx.constant([0]), ctx.constant([width]), ctx.constant([1]))


def _zero_points(
    ctx: LoweringContext, zeros: Value | None, bits: int, part: str = ""
) -> ir.Value | None:
    """As MatMulNBits takes them; with a `part` those of a product in two halves."""
    if zeros is None:
        return None
    data, (rows, blocks) = zeros.data, zeros.shape
    assert data is not None

    def made() -> torch.Tensor:
        return in_bytes({"": data, "upper": data >> 4, "lower": data & 15}[part], bits)

    return ctx.derived(zeros, part or "points", made, (rows, -(-blocks * bits // 8)))


@register_lowering("attn.int8_linear")
def lower_int8_linear(ctx: LoweringContext, node: Node) -> ir.Value:
    """MatMulIntegerToFloat of rows that were divided by their largest magnitude.

    The input's zero point is 128: the kernel for signed inputs is several times slower. Linears of
    one input share its codes. Of a `fine` input there are two, and two products are added up.
    """
    if attribute(node, "one_sided"):
        return _of_one_side(ctx, node)
    args = ctx.args(node)
    x = args["x"]
    unit = ctx.constant(1 / LEVELS, torch.float32)
    middle = ctx.constant(128, torch.uint8)

    def rounded() -> tuple[ir.Value, ir.Value, ir.Value]:
        peak = _peaks(ctx, x, whole=_is_nan_as_a_whole(input_of(node, "x")))
        within = ctx.op("Div", x, peak)
        return coded(within, unit), peak, within

    def coded(numbers: ir.Value, step: ir.Value) -> ir.Value:
        return ctx.op("QuantizeLinear", numbers, step, middle, dtype=ir.DataType.UINT8)

    def product_of(taken: ir.Value, step: ir.Value) -> ir.Value:
        return ctx.op(
            "MatMulIntegerToFloat",
            *(taken, ctx.transposed(input_of(node, "codes")), step, args["scales"], middle),
            domain=MICROSOFT,
            dtype=ir.DataType.FLOAT,
        )

    steps, peak, within = ctx.once(("int8 rows", x), rounded)
    product = product_of(steps, unit)
    if attribute(node, "fine"):
        finer = ctx.constant(1 / (LEVELS * FINER), torch.float32)

        def left() -> ir.Value:
            held = ctx.op("DequantizeLinear", steps, unit, middle)
            return coded(ctx.op("Sub", within, held), finer)

        second = ctx.once(("int8 rows, what is left", x), left)
        product = ctx.op("Add", product, product_of(second, finer))
    scaled = ctx.op("Mul", product, peak)
    return scaled if args["bias"] is None else ctx.op("Add", scaled, args["bias"])


def _peaks(ctx: LoweringContext, x: ir.Value, *, whole: bool = False) -> ir.Value:
    """The largest magnitude of each row (…, 1); NaN where the row has NaN.

    The extremes pass over NaN, which only a sum hands on; of rows that are NaN as a `whole` any
    element does. Where there are no rows, onnxruntime leaves the axis as long as it is.
    """
    most, least, nothing = _extremes(ctx, x, whole=whole)
    peak = ctx.op("Max", most, ctx.op("Neg", least), ctx.constant(TINY, torch.float32))
    return _of_rows(ctx, ctx.op("Add", peak, nothing))


def _extremes(
    ctx: LoweringContext, x: ir.Value, *, whole: bool
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The greatest and the least of each row, and 0, or NaN if it has NaN."""
    kinds = ("ReduceMax", "ReduceMin") if whole else ("ReduceMax", "ReduceMin", "ReduceSum")
    found = [ctx.op(kind, x, ctx.constant([-1]), keepdims=1) for kind in kinds]
    any_nan = _of_rows(ctx, x) if whole else found[2]
    return found[0], found[1], ctx.op("Mul", any_nan, ctx.constant(0.0, torch.float32))


def _is_nan_as_a_whole(x: Value) -> bool:
    """Whether a row (last axis) with NaN holds nothing else, as its mean or its step is NaN."""
    node = x.producer
    if node is not None and node.op in GELU:
        # It makes NaN of −∞ as well, which no linear has on rows that a norm bounds.
        node = node.inputs[0].producer if node.inputs[0] is not None else None
        if not _is_int8(node) or not _is_normed(input_of(node, "x")):
            return False
    return _is_int8(node) or _is_normed(x)


def _is_int8(node: Node | None) -> TypeGuard[Node]:
    return node is not None and node.op == "attn.int8_linear"


def _is_normed(x: Value) -> bool:
    node = x.producer
    return node is not None and node.op in CENTRED_NORM and x is node.outputs[0]


def _of_rows(ctx: LoweringContext, figures: ir.Value) -> ir.Value:
    """What reductions of rows gave, (…, 1) where there are no rows too."""
    return ctx.op("Slice", figures, ctx.constant([0]), ctx.constant([1]), ctx.constant([-1]))


def _of_one_side(ctx: LoweringContext, node: Node) -> ir.Value:
    """MatMulIntegerToFloat of rows with a zero point z each, of which the kernel takes only one.

    With codes c = round(x / step) + z and weights q · s, the product step · Σ (c − z) q s is the
    kernel's, step · Σ c q s, and (z · step) (−Σ q s), whose last factor is a constant.
    """
    args, codes, scales = ctx.args(node), input_of(node, "codes"), input_of(node, "scales")
    x, single, last = args["x"], torch.float32, ctx.constant([-1])

    def rounded() -> tuple[ir.Value, ...]:
        flat = ctx.op("Reshape", x, ctx.constant([-1, codes.shape[1]]))
        whole = _is_nan_as_a_whole(input_of(node, "x"))
        most, least, nothing = _extremes(ctx, flat, whole=whole)
        unit, zero = ctx.constant(1 / CODES, single), ctx.constant(0.0, single)
        above = ctx.op("Mul", ctx.op("Max", most, ctx.constant(TINY, single)), unit)
        below = ctx.op("Mul", ctx.op("Min", least, zero), unit)
        step = _of_rows(ctx, ctx.op("Add", ctx.op("Sub", above, below), nothing))
        under = ctx.op("Mul", _of_rows(ctx, below), ctx.constant(-float(CODES), single))
        points = ctx.op("Round", ctx.op("Div", under, step))
        taken = ctx.op(
            "QuantizeLinear",
            flat,
            ctx.op("Squeeze", step, last),
            ctx.op("Cast", ctx.op("Squeeze", points, last), to=ir.DataType.UINT8),
            axis=0,
            dtype=ir.DataType.UINT8,
        )
        found, shape = [taken, step, ctx.op("Mul", points, step)], input_of(node, "x").shape
        if len(shape) == 2:
            return tuple(found)
        shapes = [ctx.shape([*shape[:-1], width]) for width in (shape[-1], 1, 1)]
        return tuple(
            ctx.op("Reshape", each, like, allowzero=1)
            for each, like in zip(found, shapes, strict=True)
        )

    def sums() -> torch.Tensor:
        assert codes.data is not None
        assert scales.data is not None
        found: torch.Tensor = codes.data.sum(-1, dtype=torch.int64) * -scales.data.double()
        return found.float()

    taken, step, moved = ctx.once(("int8 rows of their range", x), rounded)
    product = ctx.op(
        "MatMulIntegerToFloat",
        *(taken, ctx.transposed(codes), ctx.constant(1.0, single), args["scales"]),
        domain=MICROSOFT,
        dtype=ir.DataType.FLOAT,
    )
    held = ctx.derived(codes, "sums", sums, (codes.shape[0],), kind=ir.DataType.FLOAT)
    shift = ctx.op("Mul", moved, held)
    if args["bias"] is not None:
        shift = ctx.op("Add", args["bias"], shift)
    return ctx.op("Add", ctx.op("Mul", product, step), shift)


def _in_two_halves(
    ctx: LoweringContext, node: Node, args: Mapping[str, Any], block: int
) -> ir.Value:
    """A product of 8 bits as two of 4, which have the fast kernel: c − z = 16 (h − h_z) + l − l_z.

    Without zeros z is 128, so h_z is 8 and l_z is 0.
    """
    codes, zeros = inputs_of(node, "codes", "zeros")
    rows, blocks, _ = codes.shape

    def half(name: str, take: Callable[[torch.Tensor], torch.Tensor]) -> ir.Value:
        def made() -> torch.Tensor:
            assert codes.data is not None
            return in_bytes(take(codes.data), 4)

        return ctx.derived(codes, name, made, (rows, blocks, block // 2))

    scaled = ctx.once(
        ("16 x", args["x"]), lambda: ctx.op("Mul", args["x"], ctx.constant(16.0, torch.float32))
    )
    points = [_zero_points(ctx, zeros, 4, part) for part in ("upper", "lower")]
    if zeros is None:
        none = torch.zeros(rows, -(-blocks // 2), dtype=torch.uint8)
        points[1] = ctx.constant(none, name="zero_points")
    sizes, bits = (input_of(node, "x").shape[-1], rows), (4, block)
    upper, lower = half("upper", lambda part: part >> 4), half("lower", lambda part: part & 15)
    high = scaled, upper, args["scales"], points[0], None
    low = args["x"], lower, args["scales"], points[1], args["bias"]
    products = [_matmul_nbits(ctx, each, sizes, bits, accuracy_level=1) for each in (high, low)]
    return ctx.op("Add", *products)


def _matmul_nbits(
    ctx: LoweringContext,
    operands: tuple[ir.Value | None, ...],
    sizes: tuple[Dim, Dim],
    bits: tuple[int, int],
    *,
    accuracy_level: int | None,
) -> ir.Value:
    """The product of x, codes, scales, zero points and bias; `bits` are those of a code."""
    x, codes, scales, zero, bias = operands
    return ctx.op(
        "MatMulNBits",
        *(x, codes, scales, zero, None, bias),
        domain=MICROSOFT,
        K=sizes[0],
        N=sizes[1],
        bits=bits[0],
        block_size=bits[1],
        accuracy_level=accuracy_level,
    )
