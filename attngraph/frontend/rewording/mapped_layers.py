"""Layers in a torch.vmap, as of several models at once (`vmap` over `functional_call`).

What torch computes of them there makes constants of sizes; so they are computed as torch documents
them, of operators that don't.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._functorch import get_interpreter_stack


def is_mapped(tensor: Any) -> bool:
    """Whether a call is in a torch.vmap, and of sizes that a trace keeps open."""
    is_tensor = isinstance(tensor, torch.Tensor) and get_interpreter_stack() is not None
    return is_tensor and any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    return None if bias is None else F.linear(input, weight) + bias


def _layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor | None:
    if input.dtype not in (torch.float32, torch.float64):  # others are computed in float32
        return None
    axes = list(range(-len(normalized_shape), 0))
    apart = input - input.mean(axes, keepdim=True)
    y = apart * torch.rsqrt((apart * apart).mean(axes, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor | None:
    return weight[input] if max_norm is None else None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    if dropout_p or enable_gqa or (is_causal and attn_mask is not None):
        return None
    scores = (
        query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    )
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = torch.where(attn_mask, scores, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch._safe_softmax(scores, -1) @ value


LAYERS: dict[Any, Callable[..., torch.Tensor | None]] = {
    F.linear: _linear,
    F.layer_norm: _layer_norm,
    F.embedding: _embedding,
    F.scaled_dot_product_attention: _attention,
}
"""Each gives None for a call that is left to torch."""
