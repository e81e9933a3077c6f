"""How people write the normalisation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.parity.formulations.kit import K, Q, V, formulation

MASK = "b 1 s t:mask"


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.4


@formulation(Q, K, V, dynamic="b s t")
def exp_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """exp over its sum."""
    e = torch.exp(_scores(q, k))
    return (e / e.sum(-1, keepdim=True)) @ v


@formulation(Q, K, V, dynamic="b s t")
def exp_sum_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """exp over its sum, the maximum subtracted."""
    scores = _scores(q, k)
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


@formulation(Q, K, V, MASK)
def exp_sum_max_values(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """max(…)[0], with a mask."""
    scores = _scores(q, k).masked_fill(mask == 0, -1e9)
    e = (scores - scores.max(dim=-1, keepdim=True)[0]).exp()
    return torch.matmul(e / torch.sum(e, dim=-1, keepdim=True), v)


@formulation(Q, K, V)
def exp_sum_detached_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The maximum is detached."""
    scores = _scores(q, k)
    e = torch.exp(scores - scores.max(-1, True).values.detach())
    return e.div(e.sum(-1).unsqueeze(-1)) @ v


@formulation(Q, K, V)
def exp_sum_reciprocal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Multiplied by the sum's reciprocal."""
    e = torch.exp(_scores(q, k))
    return (e * e.sum(-1, keepdim=True).reciprocal()) @ v


@formulation(Q, K, V, fused=None)
def exp_sum_global_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One maximum of the whole tensor is subtracted."""
    scores = _scores(q, k)
    e = torch.exp(scores - scores.max())
    return (e / e.sum(-1, keepdim=True)) @ v


@formulation(Q, K, V, fused=0, declined=("epsilon-in-softmax",))
def exp_sum_epsilon(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An epsilon that matters in the denominator: no softmax."""
    scores = _scores(q, k)
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (e / (e.sum(-1, keepdim=True) + 0.1)) @ v


@formulation(Q, K, V, dynamic="b s t")
def late_normalisation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(e V) / sum."""
    e = torch.exp(_scores(q, k))
    return (e @ v) / e.sum(-1, keepdim=True)


@formulation(Q, K, V, MASK)
def late_normalisation_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """FlashAttention's plain form: maximum, exp, product, division."""
    scores = _scores(q, k).masked_fill(~mask, float("-inf"))
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return torch.einsum("bhst,bhte->bhse", e, v) / e.sum(-1)[..., None]


@formulation(Q, K, V, dynamic="b")
def log_sum_exp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """exp(x − logsumexp(x))."""
    scores = _scores(q, k)
    return torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True)) @ v


@formulation(Q, K, V, dynamic="b")
def log_softmax_exp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """log_softmax(x).exp()."""
    return F.log_softmax(_scores(q, k), dim=-1).exp() @ v


@formulation(Q, K, V, MASK)
def log_softmax_exp_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same with a mask."""
    scores = _scores(q, k).masked_fill(~mask, float("-inf"))
    return F.log_softmax(scores, dim=-1).exp() @ v


@formulation(Q, K, V, dynamic="b s t")
def softmax_subtracts_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax of scores less their maximum (GPT-NeoX's, ViLBERT's)."""
    scores = _scores(q, k)
    return (scores - scores.amax(dim=-1, keepdim=True).detach()).softmax(-1) @ v


@formulation(Q, K, V)
def softmax_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """exp2 with log2(e) in the scale, as kernels do."""
    scores = q @ k.mT * (0.4 * 1.4426950408889634)
    e = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


@formulation(Q, K, V, MASK, dynamic="b s t")
def upcast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(dtype=float32).to(q.dtype), as in transformers."""
    scores = _scores(q, k).masked_fill(~mask, torch.finfo(q.dtype).min)
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


@formulation(Q, K, V)
def upcast_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """.float() and .type_as."""
    return torch.softmax(_scores(q, k).float(), -1).type_as(v) @ v


@formulation(Q, K, V)
def upcast_double(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax in float64."""
    return _scores(q, k).softmax(-1, dtype=torch.float64).to(q.dtype) @ v


@formulation(Q, K, V, MASK, dynamic="b s t")
def guard_nan_to_num(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Rows without a key become zero by nan_to_num."""
    weights = _scores(q, k).masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.nan_to_num(weights, nan=0.0) @ v


@formulation(Q, K, V, MASK)
def guard_where_isnan(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """where(isnan(p), 0, p)."""
    weights = _scores(q, k).masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.where(torch.isnan(weights), torch.zeros_like(weights), weights) @ v


@formulation(Q, K, V, MASK)
def guard_masked_fill_isnan(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """p.masked_fill(isnan(p), 0)."""
    weights = _scores(q, k).masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.masked_fill(weights.isnan(), 0.0) @ v


@formulation(Q, K, V, MASK)
def guard_all_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """ATen's safe softmax: zero where every score of a row is -inf."""
    scores = _scores(q, k).masked_fill(~mask, float("-inf"))
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.where(empty, torch.zeros_like(scores), scores.softmax(-1)) @ v


@formulation(Q, K, V, MASK)
def guard_fill_again(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """ESPnet: filled before the softmax, zeroed after it."""
    hidden = mask.eq(0)
    scores = _scores(q, k).masked_fill(hidden, torch.finfo(torch.float32).min)
    return scores.softmax(-1).masked_fill(hidden, 0.0) @ v


@formulation(Q, K, V, MASK)
def guard_fill_again_infinite(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same with -inf: NaN rows become zero."""
    scores = _scores(q, k).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).masked_fill(~mask, 0.0) @ v


@formulation(Q, K, V, MASK)
def guard_on_context(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """nan_to_num on the context."""
    return (_scores(q, k).masked_fill(~mask, float("-inf")).softmax(-1) @ v).nan_to_num(0.0)


@formulation(Q, K, V, MASK)
def masked_softmax_by_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """AllenNLP: exp · mask over its sum."""
    scores = _scores(q, k)
    e = torch.exp(scores - scores.amax(-1, keepdim=True)) * mask.to(q.dtype)
    return (e / e.sum(-1, keepdim=True)) @ v


@formulation(Q, K, V)
def dropout_and_contiguous(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dropout in eval mode and copies between."""
    weights = F.dropout(_scores(q, k).softmax(-1).contiguous(), 0.1, training=False)
    return torch.matmul(weights.clone(), v.contiguous())


@formulation(Q, K, V, dynamic="b s t")
def softmax_flattened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax sees (B·H, S, T)."""
    scores = _scores(q, k)
    weights = scores.flatten(0, 1).softmax(-1).view_as(scores)
    return weights @ v


@formulation(Q, K, V)
def softmax_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """float16 products, float32 softmax."""
    scores = (q.half() @ k.half().mT).float() * 0.4
    return (scores.softmax(-1).half() @ v.half()).float()


@formulation(Q, K, V)
def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gemma's cap: c · tanh(x / c)."""
    return (torch.tanh(_scores(q, k) / 5.0) * 5.0).softmax(-1) @ v


@formulation(Q, K, V, "b 1 s t:lowest", dynamic="b s t")
def softcap_then_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Capped, then masked."""
    scores = _scores(q, k) / 5.0
    return (torch.tanh(scores) * 5.0 + mask).softmax(-1) @ v


@formulation(Q, K, V, "b 1 s t:lowest", fused=0, declined=("softcap",))
def softcap_after_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked, then capped: the mask only lowers."""
    return (torch.tanh((_scores(q, k) + mask) / 5.0) * 5.0).softmax(-1) @ v


@formulation(Q, K, V, fused=None)
def softcap_scaled_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Cap inside, and the capped value scaled by another number: 3 · tanh(x / 5)."""
    return (torch.tanh(_scores(q, k) / 5.0) * 3.0).softmax(-1) @ v


@formulation(Q, K, V, "h:positive", dynamic="b s t")
def sink_column(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """gpt-oss: a sink logit per head is concatenated and its column dropped."""
    scores = _scores(q, k)
    sink = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)
    return weights[..., :-1] @ v


@formulation("b h s d", "b h t d", "b h t e", "h", dynamic="b t")
def sink_narrowed(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The column of the sink is cut off by narrow."""
    scores = q @ k.mT * 0.4
    sink = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1).narrow(-1, 0, k.shape[2]) @ v


@formulation(Q, K, V, "b h s 1", "b 1 1 t:mask", fused=0, declined=("joined",))
def joined_column_capped(q: Tensor, k: Tensor, v: Tensor, extra: Tensor, mask: Tensor) -> Tensor:
    """A column is joined to capped and masked scores, and another one is cut off."""
    scores = torch.where(mask, 3.0 * torch.tanh(q @ k.mT / 3.0), -torch.inf)
    return torch.cat([scores, extra], -1).softmax(-1)[..., 1:] @ v


@formulation(Q, K, V, "h:positive", MASK)
def sink_column_max(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    """The same as transformers writes it: a mask, and the maximum subtracted."""
    scores = _scores(q, k).masked_fill(~mask, torch.finfo(torch.float32).min)
    sink = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    combined = torch.cat([scores, sink], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    weights = F.softmax(combined, dim=-1, dtype=combined.dtype)
    return torch.matmul(weights[..., :-1], v)


@formulation(Q, K, V)
def sink_plus_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax-plus-one: exp(x) / (1 + Σ exp(x))."""
    e = torch.exp(_scores(q, k))
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


@formulation(Q, K, V)
def sink_plus_one_stable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with the maximum subtracted."""
    scores = _scores(q, k)
    top = scores.amax(-1, keepdim=True)
    e = torch.exp(scores - top)
    return (e / (torch.exp(-top) + e.sum(-1, keepdim=True))) @ v


@formulation(Q, K, V)
def sink_zero_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """nn.MultiheadAttention's add_zero_attn: a zero key and a zero value are appended."""
    zero = torch.zeros(2, 3, 1, 1)
    k = torch.cat([k, zero.expand(-1, -1, -1, 6)], 2)
    v = torch.cat([v, zero.expand(-1, -1, -1, 10)], 2)
    return _scores(q, k).softmax(-1) @ v


@formulation("b h s d", "b h s d", "b h s e", dynamic="b s")
def masked_weights_by_triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The weights times a triangle of ones, normalised again."""
    weights = _scores(q, k).softmax(-1) * torch.ones(q.shape[2], q.shape[2]).tril()
    return (weights / weights.sum(-1, keepdim=True)) @ v
