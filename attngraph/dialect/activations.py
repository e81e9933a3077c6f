"""Activations that onnxruntime has as one operator and ATen has not."""

from __future__ import annotations

import torch

from attngraph.ir.ops import op
from attngraph.ir.traits import ACTIVATION, GELU, POINTWISE


@op("attn.bias_gelu", [ACTIVATION, GELU, POINTWISE])
def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU(x + bias) by erf (Hendrycks and Gimpel 2016). x (…, H), bias (H,)."""
    return torch.nn.functional.gelu(x + bias)


@op("attn.quick_gelu", [ACTIVATION, POINTWISE])
def quick_gelu(x: torch.Tensor, *, alpha: float = 1.702) -> torch.Tensor:
    """x · sigmoid(alpha · x), CLIP's approximation of GELU. x of any shape."""
    return x * torch.sigmoid(alpha * x)
