"""Normalisations, alone and with a residual: layer norm and RMS norm."""

from __future__ import annotations

import torch

from attngraph.ir.ops import op
from attngraph.ir.traits import CENTRED_NORM, FEATURE_NORM


@op("attn.skip_layer_norm", [CENTRED_NORM, FEATURE_NORM], outputs=2)
def skip_layer_norm(
    x: torch.Tensor,
    skip: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    x_bias: torch.Tensor | None = None,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm(x + x_bias + skip) over the last axis, and that sum itself.

    x and skip (B, S, H), weight, bias and x_bias (H,). Returns two (B, S, H) tensors.
    """
    total = (x if x_bias is None else x + x_bias) + skip
    return torch.nn.functional.layer_norm(total, [total.shape[-1]], weight, bias, eps), total


@op("attn.rms_norm", [FEATURE_NORM])
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang and Sennrich 2019).

    x (…, H), weight (H,). The statistics are taken in float32 or wider.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) if weight is None else scaled.to(x.dtype) * weight


@op("attn.skip_rms_norm", [FEATURE_NORM], outputs=2)
def skip_rms_norm(
    x: torch.Tensor, skip: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm(x + skip) over the last axis, and that sum itself. Shapes as `skip_layer_norm`."""
    total = x + skip
    return rms_norm(total, weight, eps=eps), total
