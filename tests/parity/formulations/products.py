"""How people write the two products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.parity.formulations.kit import K, Q, V, formulation


@formulation(Q, K, V, dynamic="b s t")
def einsum_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two einsums."""
    weights = torch.einsum("bhqd,bhkd->bhqk", q * 0.4, k).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@formulation("b s h d", "b t h d", "b t h e", dynamic="b s t")
def einsum_heads_inner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, S, H, D) as in JAX, the context in that layout too."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.4
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)


@formulation("s b h d", "t b h d", "t b h e", dynamic="s")
def einsum_odd_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(S, B, H, D) and scores as (B, S, H, T)."""
    weights = torch.softmax(torch.einsum("ibnd,jbnd->binj", q, k) * 0.4, dim=3)
    return torch.einsum("binj,jbnd->ibnd", weights, v)


@formulation("s b h d", "t b h d", "t b h e")
def einsum_transformer_xl_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores as (S, T, B, H), softmax over dim 1."""
    weights = torch.softmax(torch.einsum("ibnd,jbnd->ijbn", q, k) * 0.4, dim=1)
    return torch.einsum("ijbn,jbnd->ibnd", weights, v)


@formulation(Q, K, V)
def einsum_implicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without an arrow the output's axes are alphabetical, so the keys come first."""
    weights = torch.einsum("...qd,...kd", q, k).mul(0.4).softmax(-2)
    return torch.einsum("...kq,...ke", weights, v).mT


@formulation(Q, K, V)
def einsum_dots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Leading axes as dots."""
    weights = torch.einsum("...id,...jd->...ij", q, k).mul(0.4).softmax(-1)
    return torch.einsum("...ij,...je->...ie", weights, v)


@formulation("b s h d", "b t h d", "b t h e", "h d 9")
def einsum_with_output_projection(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The output projection sums over heads and width at once."""
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.4).softmax(-1)
    return torch.einsum("bqhd,hdm->bqm", torch.einsum("bhqk,bkhe->bqhe", weights, v)[..., :6], w)


@formulation("b s m", "b t m", "m h d", "m h d", "m h e")
def einsum_projections(x: Tensor, y: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """Projections as einsums with three-dimensional weights."""
    q = torch.einsum("bsm,mhd->bhsd", x * 0.1, wq)
    k = torch.einsum("btm,mhd->bhtd", y * 0.1, wk)
    v = torch.einsum("btm,mhe->bhte", y, wv)
    weights = torch.einsum("bhsd,bhtd->bhst", q, k).softmax(-1)
    return torch.einsum("bhst,bhte->bshe", weights, v)


@formulation(Q, K, V, fused=None)
def einsum_three_operands(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The scale enters as a third operand."""
    scale = torch.full((3,), 0.4)
    weights = torch.einsum("bhqd,bhkd,h->bhqk", q, k, scale).softmax(-1)
    return weights @ v


@formulation("6 s d", "6 t d", "6 t e", dynamic="s t")
def batch_times_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """bmm over batch · heads."""
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).mul(0.4).softmax(-1), v)


@formulation("s b m", "t b m", "t b m", dynamic="s t")
def batch_times_heads_flattened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """fairseq: (S, B, M) viewed as (S, B·H, D), transposed, multiplied by bmm."""
    length, batch, width = q.shape
    q, k, v = (x.contiguous().view(-1, batch * 3, 6).transpose(0, 1) for x in (q * 0.4, k, v))
    weights = F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1)
    return torch.bmm(weights, v).transpose(0, 1).contiguous().view(length, batch, width)


@formulation("s d", "t d", "t e", dynamic="s t")
def two_dimensional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain matrices."""
    return torch.mm(torch.mm(q, k.t()).div(2.5).softmax(1), v)


@formulation("b s d", "b t d", "b t e", dynamic="b s t")
def single_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three-dimensional, without heads."""
    return (0.4 * q @ k.transpose(-1, -2)).softmax(-1) @ v


@formulation("d", "t d", "t e")
def single_vector(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query vector, torch.mv."""
    return torch.mv(v.t(), torch.mv(k, q).mul(0.4).softmax(0))


@formulation("s d", "t d", "t e")
def linear_with_activations(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """F.linear whose weight is an activation."""
    return F.linear(F.linear(q * 0.4, k).softmax(-1), v.t())


@formulation("b s d", "b t d", "b t e", dynamic="b t")
def multiply_and_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Both products by broadcasting."""
    weights = (q[:, :, None] * k[:, None]).sum(-1).mul(0.4).softmax(-1)
    return (weights[..., None] * v[:, None]).sum(2)


@formulation("b s d", "b t d", "b t e", "b t:padding", dynamic="b s t")
def multiply_and_sum_masked(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Hierarchical attention networks' code: what was weighed is multiplied with the mask, last."""
    scores = (q @ k.mT * 0.4).masked_fill(~padding[:, None], -1e9)
    return (scores.softmax(-1)[..., None] * v[:, None] * padding[:, None, :, None]).sum(2)


@formulation("b d", "b t d", "b t e", dynamic="b t")
def multiply_and_sum_pooling(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query per batch element, both products by broadcasting."""
    weights = torch.softmax(torch.sum(q.unsqueeze(1) * k, dim=2, keepdim=True) * 0.4, dim=1)
    return torch.sum(weights * v, dim=1)


@formulation(Q, K, V, dynamic="b s t")
def column_form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """K Qᵀ, softmax over the keys on the last axis but one."""
    return ((k @ q.mT) * 0.4).softmax(dim=-2).mT @ v


@formulation(Q, K, V)
def column_form_throughout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Features before positions on every operand: Vᵀ softmax(K Qᵀ)."""
    q, k, v = q.mT, k.mT, v.mT
    return v @ ((k.mT @ q) * 0.4).softmax(-2)


@formulation(Q, K, V)
def scores_transposed_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(K Qᵀ)ᵀ, normalised over the last axis."""
    return (k @ (q * 0.4).mT).mT.softmax(-1) @ v


@formulation("b m s", "b m s", "b m s", dynamic="b")
def channels_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, C, N) throughout: softmax(Qᵀ K), V Aᵀ."""
    weights = torch.bmm(q.transpose(1, 2), k).mul(0.2).softmax(-1)
    return torch.bmm(v, weights.transpose(1, 2))


@formulation("b m s", "b m s", "b m s")
def channels_first_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Diffusion's QKVAttentionLegacy: heads in the batch, channels first, einsum."""
    batch, _, length = q.shape
    q, k, v = (x.reshape(batch * 3, 6, length) for x in (q, k, v))
    scale = 6**-0.25
    weights = torch.einsum("bct,bcs->bts", q * scale, k * scale).softmax(-1)
    return torch.einsum("bts,bcs->bct", weights, v).reshape(batch, -1, length)


@formulation("b m 4 5", "b m 4 5", "b m 4 5", dynamic="b")
def channels_first_image(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, C, H, W) flattened to positions."""
    batch, width, rows, columns = q.shape
    q = q.reshape(batch, width, rows * columns).permute(0, 2, 1)
    k = k.reshape(batch, width, rows * columns)
    v = v.reshape(batch, width, rows * columns)
    weights = F.softmax(torch.bmm(q, k) * width**-0.5, dim=2)
    return torch.bmm(v, weights.permute(0, 2, 1)).reshape(batch, width, rows, columns)


@formulation("b 4 5 h d", "b 4 5 h d", "b 4 5 h e")
def axial_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention along one axis of a grid: the other one is batch."""
    weights = torch.einsum("bxihd,bxjhd->bxhij", q, k).mul(0.4).softmax(-1)
    return torch.einsum("bxhij,bxjhd->bxihd", weights, v)


@formulation("b 4 5 h d", "b 4 5 h d", "b 4 5 h e")
def axial_columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same along the outer axis."""
    weights = torch.einsum("bixhd,bjxhd->bhxij", q, k).mul(0.4).softmax(-1)
    return torch.einsum("bhxij,bjxhd->bixhd", weights, v)


@formulation("b h 4 5 d", "b h 4 5 d", "b h 4 5 e")
def two_dimensional_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax over a flattened pair of key axes, einsum over both."""
    scores = torch.einsum("bhxyd,bhuvd->bhxyuv", q, k) * 0.4
    weights = scores.flatten(-2).softmax(-1).view(scores.shape)
    return torch.einsum("bhxyuv,bhuvd->bhxyd", weights, v)


@formulation(Q, K, V)
def addmm_like_bias_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two products summed: width split into two halves."""
    q1, q2 = q.chunk(2, -1)
    k1, k2 = k.chunk(2, -1)
    return ((q1 @ k1.mT + q2 @ k2.mT) * 0.4).softmax(-1) @ v


@formulation("s d", "t d", "t e", "s t")
def addmm_scores(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """addmm adds the bias."""
    return torch.addmm(bias, q, k.t(), alpha=0.4).softmax(-1) @ v


@formulation(Q, K, V, fused=3)
def loop_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A Python loop over heads, stacked."""
    heads = [(q[:, h] @ k[:, h].mT * 0.4).softmax(-1) @ v[:, h] for h in range(3)]
    return torch.stack(heads, 1)
