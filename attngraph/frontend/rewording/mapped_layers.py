"""Layers in a torch.vmap, as of several models at once (`vmap` over `functional_call`).

What torch computes of them there makes constants of sizes, and is made of smaller parts than what
the passes know; so they are computed as torch documents them, of operators that don't.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch._C._functorch import get_interpreter_stack

_WIDE = (torch.float32, torch.float64)
"""What is computed in its own dtype; others are in float32."""


def is_mapped(tensor: Any) -> bool:
    """Whether a call is in a torch.vmap."""
    return isinstance(tensor, torch.Tensor) and get_interpreter_stack() is not None


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
    if input.dtype not in _WIDE:
        return None
    y = _normal(input, list(range(-len(normalized_shape), 0)), eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _normal(x: torch.Tensor, axes: list[int], eps: float) -> torch.Tensor:
    apart = x - x.mean(axes, keepdim=True)
    return apart * torch.rsqrt((apart * apart).mean(axes, keepdim=True) + eps)


def _group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor | None:
    if input.dtype not in _WIDE:
        return None
    rows, channels, *rest = input.shape
    grouped = input.reshape(rows, num_groups, channels // num_groups, *rest)
    y = _normal(grouped, list(range(2, grouped.dim())), eps).flatten(1, 2)
    y = y if weight is None else y * _of_channels(weight, input)
    return y if bias is None else y + _of_channels(bias, input)


def _of_channels(weight: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A weight of one number, or one for each element of the second axis."""
    return weight.reshape(-1, *[1] * (like.dim() - 2))


def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor | None:
    if not use_input_stats or running_mean is not None or running_var is not None:
        return None
    return _group_norm(input, input.shape[1], weight, bias, eps)


def _bilinear(
    input1: torch.Tensor,
    input2: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | None:
    y = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return y if bias is None else y + bias


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor | None:
    if input.dtype not in _WIDE:
        return None
    axes = list(range(-len(normalized_shape), 0))
    least = torch.finfo(input.dtype).eps if eps is None else eps
    y = input * torch.rsqrt((input * input).mean(axes, keepdim=True) + least)
    return y if weight is None else y * weight


def _prelu(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    return torch.where(input > 0, input, input * _of_channels(weight, input))


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


def _heads(*args: Any, **kwargs: Any) -> Any:
    """torch's own code, which calls functions that stand here by their names."""

    def stood_in(function: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*args: Any, **kwargs: Any) -> Any:
            found = LAYERS[function](*args, **kwargs)
            return function(*args, **kwargs) if found is None else found

        return computed

    with ExitStack() as stack:
        for function in (F.linear, F.scaled_dot_product_attention):
            stack.enter_context(patch.object(F, function.__name__, stood_in(function)))
        return F.multi_head_attention_forward(*args, **kwargs)


LAYERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.instance_norm: _instance_norm,
    F.rms_norm: _rms_norm,
    F.bilinear: _bilinear,
    F.prelu: _prelu,
    F.multi_head_attention_forward: _heads,
    F.embedding: _embedding,
    F.scaled_dot_product_attention: _attention,
}
"""Each gives None for a call that is left to torch."""
