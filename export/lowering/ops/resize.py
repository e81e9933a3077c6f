"""Images and signals in other sizes: `F.interpolate`, to sizes that a run may tell."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.export.lowering.fallback.torchlib import torchlib_lowering
from attngraph.ir import Dim, Node
from attngraph.ir.ops import input_of


@register_lowering(
    "aten.upsample_linear1d.vec",
    "aten.upsample_bilinear2d.vec",
    "aten.upsample_trilinear3d.vec",
    "aten.upsample_bicubic2d.vec",
    "aten._upsample_bilinear2d_aa.vec",
    "aten._upsample_bicubic2d_aa.vec",
)
def lower_interpolation(ctx: LoweringContext, node: Node) -> ir.Value | Sequence[ir.Value] | None:
    """`Resize` to the sizes of the result; torchlib's form where scales are given, by which torch
    then places what it reads, and not by the quotient of the sizes, and where corners are aligned
    and antialiased, which the two do differently.
    """
    aligned = "align_corners" if node.attrs.get("align_corners") else "half_pixel"
    smooth = node.op.endswith("_aa.vec")  # as Pillow does it: another cubic, and no edge repeated
    if node.attrs.get("output_size") is None or (smooth and aligned == "align_corners"):
        return _fallback(ctx, node)
    x = ctx.value(input_of(node, "input"))
    return ctx.op(
        "Resize",
        *(x, None, None, ctx.shape(node.output.shape)),
        mode="cubic" if "cubic" in node.op else "linear",
        cubic_coeff_a=-0.5 if smooth else -0.75,
        antialias=int(smooth),
        exclude_outside=int(smooth),
        coordinate_transformation_mode=aligned,
    )


@register_lowering(
    "aten.upsample_nearest1d.vec",
    "aten.upsample_nearest2d.vec",
    "aten.upsample_nearest3d.vec",
    "aten._upsample_nearest_exact1d.vec",
    "aten._upsample_nearest_exact2d.vec",
    "aten._upsample_nearest_exact3d.vec",
)
def lower_nearest(ctx: LoweringContext, node: Node) -> ir.Value | Sequence[ir.Value] | None:
    """A Gather along each axis, at the places that torch computes in float32: ⌊place · in / out⌋,
    or ⌊(place + ½) · in / out⌋ where it is called exact.

    `Resize` divides by out / in instead, which is 6.9999995 for the second of 2 places of 14, and
    reads another element. It is taken where the scale is a power of two, which rounds nothing.
    """
    source = input_of(node, "input")
    factors = node.attrs.get("scale_factors")
    if factors is not None and all(math.frexp(factor)[0] == 0.5 for factor in factors):
        return _fallback(ctx, node)
    result = ctx.value(source)
    is_exact = "exact" in node.op
    for at, (size, wanted) in enumerate(zip(source.shape[2:], node.output.shape[2:], strict=True)):
        factor = None if factors is None else factors[at]
        places = _places(ctx, size, wanted, factor, is_exact)
        result = ctx.op("Gather", result, places, axis=at + 2)
    return result


def _places(
    ctx: LoweringContext, size: Dim, wanted: Dim, factor: float | None, is_exact: bool
) -> ir.Value:
    """Which of `size` elements each of the `wanted` ones is."""
    if isinstance(size, int) and isinstance(wanted, int):
        step = torch.tensor(size / wanted if factor is None else 1 / factor)
        known = torch.arange(wanted)
        found = _centred(known, step) if is_exact else known * step
        return ctx.constant(found.floor().long().clamp(max=size - 1), name="places")
    count = [ctx.cast(ctx.dim(dim), torch.float32) for dim in (size, wanted)]
    scale = ctx.op("Div", *count) if factor is None else ctx.number(1 / factor, torch.float32)
    line = ctx.op("Range", ctx.constant(0), ctx.dim(wanted), ctx.constant(1))
    if is_exact:
        half = ctx.number(0.5, torch.float64)
        centre = ctx.op("Add", ctx.cast(line, torch.float64), half)
        place = ctx.op("Sub", ctx.op("Mul", centre, ctx.cast(scale, torch.float64)), half)
        place = ctx.op("Add", ctx.cast(ctx.cast(place, torch.float32), torch.float64), half)
        place = ctx.cast(place, torch.float32)
    else:
        place = ctx.op("Mul", ctx.cast(line, torch.float32), scale)
    place = ctx.cast(ctx.op("Floor", place), torch.int64)
    return ctx.op("Min", place, ctx.op("Sub", ctx.dim(size), ctx.constant(1)))


def _centred(line: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(place + ½) · scale as torch rounds it: less ½ in one step in float32, then ½ in double."""
    less = ((line + 0.5).double() * scale.double() - 0.5).float()
    return (less.double() + 0.5).float()


def _fallback(ctx: LoweringContext, node: Node) -> ir.Value | Sequence[ir.Value] | None:
    fallback = torchlib_lowering(node.op)
    return None if fallback is None else fallback(ctx, node)


@register_lowering("aten.grid_sampler_3d")
def lower_volume_sampler(ctx: LoweringContext, node: Node) -> ir.Value:
    args = ctx.args(node)
    return ctx.op(
        "GridSample",
        args["input"],
        args["grid"],
        mode=("linear", "nearest")[args["interpolation_mode"]],
        padding_mode=("zeros", "border", "reflection")[args["padding_mode"]],
        align_corners=int(args["align_corners"]),
    )
