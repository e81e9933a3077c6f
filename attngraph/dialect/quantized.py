"""Linears whose weights are stored in 4 or 8 bits, and whose inputs may be rounded to 8.

A rounded input is a multiple of a step that follows from its own row or block, so a row's result
depends on no other row: padding and neighbours in a batch change nothing.
"""

from __future__ import annotations

import torch

from attngraph.ir.ops import op
from attngraph.ir.traits import DEQUANTIZED, LINEAR, QUANTIZED

BLOCK = 32
"""The features of a row that share a scale where a compile quantizes weights in blocks."""
TINY = 1e-30
"""The least magnitude that a step is taken from: a row of zeros has one too."""
LEVELS = 127
CODES = 255
"""The steps between the least and the largest code of 8 bits."""
FINER = 254
"""Steps of a second code in one of the first, which leaves at most half a step to either side."""


@op("attn.quantized_linear", [LINEAR, QUANTIZED])
def quantized_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    *,
    bits: int,
    rounds: bool = False,
) -> torch.Tensor:
    """x Wᵀ + b with W = (code − zero) · scale, in the layout of MatMulNBits.

    x (…, K); codes (N, K/block, block · bits/8), uint8, two 4-bit codes to a byte, the lower half
    first; scales (N, K/block) in x's dtype; bias (N,); zeros (N, K/block), uint8, 2^(bits−1) where
    absent. The last block of a row may be padded. With `rounds` each block of x is rounded to a
    multiple of a 127th of its largest magnitude.
    """
    if rounds:
        blocks, step = block_steps(x, codes.shape[2] * 8 // bits)
        x = (blocks.round() * step).flatten(-2)[..., : x.shape[-1]]
    weight = dequantized(codes, scales, bits, zeros)[:, : x.shape[-1]]
    return torch.nn.functional.linear(x, weight, bias)


@op("attn.dequantize", [DEQUANTIZED])
def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    bits: int,
    width: int,
) -> torch.Tensor:
    """The weight (N, width) of `attn.quantized_linear`, whose codes, scales and zeros these are.

    It is an operator of torch as well (`torch.ops.attn.dequantize`), so that a module whose weights
    are codes keeps them in the graph.
    """
    found: torch.Tensor = torch.ops.attn.dequantize.default(
        codes, scales, zeros, bits=bits, width=width
    )
    return found


torch.library.define("attn::dequantize", torch.library.infer_schema(dequantize, mutates_args=()))
torch.library.impl(
    "attn::dequantize",
    "CompositeExplicitAutograd",
    lambda codes, scales, zeros=None, *, bits, width: dequantized(codes, scales, bits, zeros)[
        :, :width
    ].contiguous(),
)
torch.library.register_fake(
    "attn::dequantize",
    lambda codes, scales, zeros=None, *, bits, width: scales.new_empty(scales.shape[0], width),
)


@op("attn.int8_linear", [LINEAR, QUANTIZED])
def int8_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    rounds: bool = True,
    one_sided: bool = False,
    fine: bool = False,
) -> torch.Tensor:
    """x̂ Wᵀ + b with W = code · scale, one scale for each row of W, as MatMulIntegerToFloat has it.

    x (…, K); codes (N, K), int8; scales (N,) and bias (N,) in x's dtype. x̂ is x with each row
    rounded to a multiple of a 127th of its largest magnitude, or if `one_sided` of a 255th of the
    range that its elements and 0 take; without `rounds` it is x. If `fine` a second code is added,
    of what the first leaves, so that x̂ has 16 bits for the price of two products.
    """
    if not rounds:
        weight = codes.to(x.dtype) * scales.unsqueeze(-1)
        return torch.nn.functional.linear(x, weight, bias)
    steps, step = row_steps(x, one_sided=one_sided)
    rounded = (steps * FINER).round() / FINER if fine else steps.round()
    product = torch.nn.functional.linear(rounded, codes.to(x.dtype)) * scales * step
    return product if bias is None else product + bias


def row_steps(x: torch.Tensor, *, one_sided: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """x (…, K) as multiples, not yet rounded, of the step of each row (…, 1).

    `one_sided` takes all 255 steps between the least and the greatest element: most of a ReLU's or
    a GELU's lie on one side of 0. Multiples are of 0, so codes differ from them by a zero point.
    """
    if one_sided:
        most, least = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
        step = most.clamp_min(TINY) / CODES - least.clamp_max(0.0) / CODES
    else:
        step = x.abs().amax(-1, keepdim=True).clamp_min(TINY) / LEVELS
    return x / step, step


def block_steps(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (…, K) as multiples (…, blocks, block) of the step of each block (…, blocks, 1).

    Zeros fill up the last block.
    """
    whole = torch.nn.functional.pad(x, (0, -x.shape[-1] % block))
    return row_steps(whole.reshape(*whole.shape[:-1], -(-x.shape[-1] // block), block))


def dequantized(
    codes: torch.Tensor, scales: torch.Tensor, bits: int, zeros: torch.Tensor | None = None
) -> torch.Tensor:
    """The weight that codes and scales stand for, (N, K), with the padding of its last block."""
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    middle = 1 << bits - 1 if zeros is None else zeros.to(scales.dtype).unsqueeze(-1)
    steps = codes.to(scales.dtype) - middle
    return (steps * scales.unsqueeze(-1)).flatten(1)


def in_bytes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (…, K), one to a byte, as they are stored: two of 4 bits in one, the first lower."""
    if bits == 8:
        return codes
    even = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
    return even[..., ::2] | even[..., 1::2] << 4
