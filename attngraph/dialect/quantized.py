"""`attn.quantized_linear`: a linear whose weight is stored in 4 or 8 bits."""

from __future__ import annotations

import torch

from attngraph.ir.ops import op
from attngraph.ir.traits import LINEAR


@op("attn.quantized_linear", [LINEAR])
def quantized_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    bits: int,
) -> torch.Tensor:
    """x Wᵀ + b with W = (code − 2^(bits−1)) · scale, in the layout of MatMulNBits.

    x (…, K); codes (N, K/block, block · bits/8), uint8, two 4-bit codes to a byte, the lower half
    first; scales (N, K/block) in x's dtype; bias (N,). The last block of a row may be padded.
    """
    weight = dequantized(codes, scales, bits)[:, : x.shape[-1]]
    return torch.nn.functional.linear(x, weight, bias)


def dequantized(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """The weight that codes and scales stand for, (N, K), with the padding of its last block."""
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    steps = codes.to(scales.dtype) - (1 << bits - 1)
    return (steps * scales.unsqueeze(-1)).flatten(1)
