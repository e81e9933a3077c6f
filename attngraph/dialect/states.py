"""Ops over a sequence that hand on a state of one size: short convolutions."""

from __future__ import annotations

import torch

from attngraph.ir.ops import op
from attngraph.ir.traits import CAUSAL_CONVOLUTION


@op("attn.causal_conv", [CAUSAL_CONVOLUTION], outputs=2)
def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    past: torch.Tensor | None = None,
    *,
    dilation: int = 1,
    activation: str = "none",
) -> tuple[torch.Tensor, torch.Tensor]:
    """y[b, c, t] = Σ_j weight[c, 0, j] · x[b, c, t − (k − 1 − j) · dilation] + bias[c].

    x (B, C, T), weight (C, 1, k), bias (C,). `past` (B, C, (k − 1) · dilation) stands before x, and
    is zeros if not given. `activation` is "none" or "silu". Gives y (B, C, T), and what stands
    before the next x: the last (k − 1) · dilation places of past and x.
    """
    reach = (weight.shape[2] - 1) * dilation
    before = x.new_zeros((*x.shape[:2], reach)) if past is None else past
    joined = torch.cat([before, x], -1)
    y = torch.nn.functional.conv1d(joined, weight, bias, dilation=dilation, groups=x.shape[1])
    y = torch.nn.functional.silu(y) if activation == "silu" else y
    return y, joined[..., joined.shape[-1] - reach :]
