"""Ops over a sequence that hand on a state of one size: convolutions and linear attention."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from attngraph.ir.ops import op
from attngraph.ir.traits import CAUSAL_CONVOLUTION, RECURRENCE


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


@op("attn.linear_attention", [RECURRENCE], outputs=2)
def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past: torch.Tensor | None = None,
    decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o_t = scale · q_tᵀ S_t in each head, of a state S (dk, dv) that each token changes.

    S_t = e^{g_t} S_{t−1} + k_t ⊗ v_t without `beta` (Katharopoulos et al. 2020; with a decay, Sun
    et al. 2023), and with it S_t = A + β_t k_t ⊗ (v_t − Aᵀ k_t), A = e^{g_t} S_{t−1}: the delta
    rule (Yang et al. 2024).

    query (B, T, Hq·dk) with Hq = `heads`, key (B, T, H·dk) and value (B, T, H·dv) with H =
    `kv_heads`; one of the two is a multiple of the other, and a head of the smaller serves as many
    of the larger. `past` (B, H, dk, dv) is zeros if not given. `decay` g is (B, T, H), or
    (B, T, H·dk) for each feature of a key, in log space; β (B, T, H). Gives o (B, T, N·dv), N the
    larger of Hq and H, and the last state (B, H, dk, dv).
    """
    batch, length, width = query.shape
    keys, features = width // heads, value.shape[2] // kv_heads
    most = max(heads, kv_heads)
    if isinstance(query, FakeTensor):  # of any length
        state = value.new_empty((batch, kv_heads, keys, features))
        return value.new_empty((batch, length, most * features)), state
    q = query.reshape(batch, length, heads, keys).repeat_interleave(most // heads, 2)
    k = key.reshape(batch, length, kv_heads, keys)
    v = value.reshape(batch, length, kv_heads, features)
    gain = None if decay is None else decay.reshape(batch, length, kv_heads, -1).exp()
    state = v.new_zeros((batch, kv_heads, keys, features)) if past is None else past
    given = []
    for t in range(length):
        state = state if gain is None else state * gain[:, t, ..., None]
        update = v[:, t]
        if beta is not None:
            known = (k[:, t, ..., None] * state).sum(-2)
            update = (update - known) * beta[:, t, ..., None]
        state = state + k[:, t, ..., None] * update[..., None, :]
        seen = state.repeat_interleave(most // kv_heads, 1)
        given.append((q[:, t, ..., None] * seen).sum(-2) * scale)
    return torch.stack(given, 1).reshape(batch, length, most * features), state


@op("attn.generalized_delta_rule", [RECURRENCE], outputs=2)
def generalized_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    past: torch.Tensor | None = None,
    decay: torch.Tensor | None = None,
    *,
    heads: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o_t = scale · q_tᵀ S_t in each head, S_t = e^{g_t} S_{t−1} + b_t ⊗ S_{t−1}ᵀ a_t + k_t ⊗ v_t.

    The state (dk, dv) is read by another key than it is written by: that of RWKV-7 (Peng et al.
    2025), of Comba (Hu et al. 2025), and of what others call DPLR and, without a decay, IPLR.

    query, key, a, b (B, T, H·dk) and value (B, T, H·dv) with H = `heads`. `past` (B, H, dk, dv) is
    zeros if not given. `decay` g is (B, T, H), or (B, T, H·dk) for each feature of a key, in log
    space. Gives o (B, T, H·dv) and the last state (B, H, dk, dv).
    """
    batch, length, width = query.shape
    keys, features = width // heads, value.shape[2] // heads
    if isinstance(query, FakeTensor):  # of any length
        state = value.new_empty((batch, heads, keys, features))
        return value.new_empty(value.shape), state
    rows = [x.reshape(batch, length, heads, -1, 1) for x in (query, key, a, b)]
    v = value.reshape(batch, length, heads, 1, features)
    gain = None if decay is None else decay.reshape(batch, length, heads, -1, 1).exp()
    state = v.new_zeros((batch, heads, keys, features)) if past is None else past
    given = []
    for t in range(length):
        q, k, own_a, own_b = (x[:, t] for x in rows)
        kept = state if gain is None else state * gain[:, t]
        state = kept + own_b * (own_a * state).sum(-2, keepdim=True) + k * v[:, t]
        given.append((q * state).sum(-2) * scale)
    return torch.stack(given, 1).reshape(value.shape), state
