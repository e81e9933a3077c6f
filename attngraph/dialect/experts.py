"""`attn.moe`: a mixture of experts, of which each row of x takes a few."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from attngraph.dialect.quantized import dequantized
from attngraph.ir.ops import op
from attngraph.ir.traits import EXPERTS

CODE_BITS = 4
"""The bits of the codes that experts' matrices may have."""
GATED = "swiglu"
"""The activation that takes pairs of features."""
_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": torch.clone,
    "relu": torch.relu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}
ACTIVATIONS = (*_PLAIN, GATED)


def activated(
    hidden: torch.Tensor, activation: str, alpha: float, beta: float, limit: float | None
) -> torch.Tensor:
    """One of `ACTIVATIONS` of the features (…, N): (…, I) with N = 2·I for "swiglu", else N = I.

    Of a pair (g, u), at places 2i and 2i + 1, "swiglu" is g · sigmoid(alpha · g) · (u + beta), with
    g cut above `limit`, and u on both sides of it, if there is one.
    """
    if activation != GATED:
        return _PLAIN[activation](hidden)
    gate, linear = hidden[..., ::2], hidden[..., 1::2]
    if limit is not None:
        gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + beta)


def _fake(x: torch.Tensor, *others: torch.Tensor | None, **attrs: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _matrix(
    given: torch.Tensor, scales: torch.Tensor | None, expert: int, x: torch.Tensor
) -> torch.Tensor:
    if scales is None:
        return given[expert].to(x.dtype)
    own = scales[expert].to(x.dtype)
    return dequantized(given[expert].view(*own.shape, -1), own, CODE_BITS)


def _run(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *given: torch.Tensor | None,
    activation: str,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
) -> torch.Tensor:
    """Expert by expert, on the rows that take it; `given` are biases and scales, as of `moe`."""
    up_bias, down_bias, up_scales, down_scales = (*given, *[None] * 4)[:4]
    result = x.new_zeros(x.shape)
    for expert in sorted({*experts.flatten().tolist()}):
        rows, places = torch.where(experts == expert)
        hidden = functional.linear(
            x[rows], _matrix(up, up_scales, expert, x), None if up_bias is None else up_bias[expert]
        )
        hidden = activated(hidden, activation, alpha, beta, limit)
        matrix = _matrix(down, down_scales, expert, x)
        made = functional.linear(hidden, matrix, None if down_bias is None else down_bias[expert])
        result.index_add_(0, rows, made * weights[rows, places, None])
    return result


@op("attn.moe", [EXPERTS])
def moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    up_scales: torch.Tensor | None = None,
    down_scales: torch.Tensor | None = None,
    *,
    activation: str,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
) -> torch.Tensor:
    """y[t] = Σ_j weights[t, j] · f_e(x[t]) with e = experts[t, j] (Shazeer et al., 2017).

    x (T, H); weights (T, k) in x's dtype, at least 0; experts (T, k), int64, below E. An expert is
    f_e(x) = down[e] · act(up[e] · x + up_bias[e]) + down_bias[e], with up (E, N, H), down
    (E, H, I), up_bias (E, N), down_bias (E, H), and act one of `ACTIVATIONS`, as `activated` has
    it. Weights of any sum; an expert that a row names twice counts twice. With `up_scales`
    (E, N, H/block) and `down_scales` (E, H, I/block) the matrices are codes of 4 bits, (E, N, H/2)
    and (E, H, I/2), in the layout of `attn.quantized_linear`.
    """
    given = (up, down, up_bias, down_bias, up_scales, down_scales)
    numbers = {"alpha": alpha, "beta": beta, "limit": limit}
    return _chosen(x, weights, experts, *given, activation=activation, **numbers)


def _chosen(*given: torch.Tensor | None, **attrs: Any) -> torch.Tensor:
    result: torch.Tensor = torch.ops.attn.moe.default(*given, **attrs)
    return result


@op("attn.routed_moe", [EXPERTS])
def routed_moe(
    x: torch.Tensor,
    scores: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    up_scales: torch.Tensor | None = None,
    down_scales: torch.Tensor | None = None,
    *,
    count: int,
    normalized: bool,
    activation: str,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
) -> torch.Tensor:
    """`attn.moe` with the `count` experts whose softmax over the scores (T, E) is largest.

    That is their weight; if `normalized`, divided by the sum of those that were chosen.
    """
    weights, experts = scores.softmax(-1).topk(count, -1)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    given = (up, down, up_bias, down_bias, up_scales, down_scales)
    numbers = {"alpha": alpha, "beta": beta, "limit": limit}
    return _chosen(x, weights, experts, *given, activation=activation, **numbers)


torch.library.define("attn::moe", torch.library.infer_schema(moe, mutates_args=()))
torch.library.register_fake("attn::moe", _fake)
torch.library.impl("attn::moe", "CompositeExplicitAutograd", _run)
