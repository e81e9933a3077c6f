"""Linears whose weights are stored in 4 or 8 bits, and whose inputs may be rounded to 8.

A rounded input is a multiple of a step that follows from its own row or block, so a row's result
depends on no other row: padding and neighbours in a batch change nothing.
"""

from __future__ import annotations

import torch

from attngraph.ir.ops import op
from attngraph.ir.traits import LINEAR, QUANTIZED

TINY = 1e-30
"""The least magnitude that a step is taken from: a row of zeros has one too."""
LEVELS = 127


@op("attn.quantized_linear", [LINEAR, QUANTIZED])
def quantized_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    bits: int,
    rounds: bool = False,
) -> torch.Tensor:
    """x Wᵀ + b with W = (code − 2^(bits−1)) · scale, in the layout of MatMulNBits.

    x (…, K); codes (N, K/block, block · bits/8), uint8, two 4-bit codes to a byte, the lower half
    first; scales (N, K/block) in x's dtype; bias (N,). The last block of a row may be padded. With
    `rounds` each block of x is rounded to a multiple of a 127th of its largest magnitude.
    """
    if rounds:
        blocks, step = block_steps(x, codes.shape[2] * 8 // bits)
        x = (blocks.round() * step).flatten(-2)[..., : x.shape[-1]]
    weight = dequantized(codes, scales, bits)[:, : x.shape[-1]]
    return torch.nn.functional.linear(x, weight, bias)


@op("attn.int8_linear", [LINEAR, QUANTIZED])
def int8_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    rounds: bool = True,
) -> torch.Tensor:
    """x̂ Wᵀ + b with W = code · scale, one scale for each row of W, as MatMulIntegerToFloat has it.

    x (…, K); codes (N, K), int8; scales (N,) and bias (N,) in x's dtype. x̂ is x with each row
    rounded to a multiple of a 127th of its largest magnitude; without `rounds` it is x.
    """
    if not rounds:
        weight = codes.to(x.dtype) * scales.unsqueeze(-1)
        return torch.nn.functional.linear(x, weight, bias)
    steps, step = row_steps(x)
    product = torch.nn.functional.linear(steps.round(), codes.to(x.dtype)) * scales * step
    return product if bias is None else product + bias


def row_steps(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (…, K) as multiples, not yet rounded, of the step of each row (…, 1)."""
    step = x.abs().amax(-1, keepdim=True).clamp_min(TINY) / LEVELS
    return x / step, step


def block_steps(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (…, K) as multiples (…, blocks, block) of the step of each block (…, blocks, 1).

    Zeros fill up the last block.
    """
    whole = torch.nn.functional.pad(x, (0, -x.shape[-1] % block))
    return row_steps(whole.reshape(*whole.shape[:-1], -(-x.shape[-1] // block), block))


def dequantized(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """The weight that codes and scales stand for, (N, K), with the padding of its last block."""
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    steps = codes.to(scales.dtype) - (1 << bits - 1)
    return (steps * scales.unsqueeze(-1)).flatten(1)
