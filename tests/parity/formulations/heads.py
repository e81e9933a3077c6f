"""Heads: grouped, projected, packed, one by one, mixed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.formulations.kit import SELF, SIZES, formulation

H, D, M = SIZES["h"], SIZES["d"], SIZES["m"]
Q6, K3, V3 = "b 6 s d", "b h t d", "b h t e"  # two query heads per key head
ONE_K, ONE_V = "b t d", "b t e"


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ v


@formulation(Q6, K3, V3, dynamic="b s t")
def grouped_expand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """transformers' repeat_kv: a new axis, expand, reshape."""
    k, v = (
        x[:, :, None].expand(*x.shape[:2], 2, *x.shape[2:]).reshape(x.shape[0], 6, *x.shape[2:])
        for x in (k, v)
    )
    return _attend(q, k, v)


@formulation(Q6, K3, V3, dynamic="b s t")
def grouped_repeat_interleave(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """repeat_interleave."""
    return _attend(q, k.repeat_interleave(2, dim=1), torch.repeat_interleave(v, 2, 1))


@formulation(Q6, K3, V3)
def grouped_repeat_tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """repeat: query head h reads key head h mod G, not h div 2."""
    return _attend(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


@formulation(Q6, K3, V3)
def grouped_concatenated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """cat of the same keys twice: the same tiling."""
    return _attend(q, torch.cat([k, k], 1), torch.cat([v, v], 1))


@formulation(Q6, K3, V3)
def grouped_query_reshaped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The queries get a group axis, K and V are broadcast, five dims."""
    return _attend(q.unflatten(1, (H, 2)), k.unsqueeze(2), v.unsqueeze(2)).flatten(1, 2)


@formulation(Q6, K3, V3, dynamic="b t")
def grouped_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The group joins the rows: (B, G, 2·S, D) @ (B, G, D, T)."""
    rows = q.reshape(q.shape[0], H, 2 * 5, D)
    return _attend(rows, k, v).reshape(q.shape[0], 6, 5, -1)


@formulation("b s 6 d", "b t h d", "b t h e")
def grouped_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """einsum over (group, repeat)."""
    q = q.unflatten(2, (H, 2))
    weights = torch.einsum("bsgrd,btgd->bgrst", q, k).mul(0.4).softmax(-1)
    return torch.einsum("bgrst,btge->bsgre", weights, v).flatten(2, 3)


@formulation("b s 6 d", "b t h d", "b t h e")
def grouped_einsum_minor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The group as the minor part of the heads."""
    q = q.unflatten(2, (2, H))
    weights = torch.einsum("bsrgd,btgd->brgst", q, k).mul(0.4).softmax(-1)
    return torch.einsum("brgst,btge->bsrge", weights, v).flatten(2, 3)


@formulation(Q6, K3, V3, dynamic="b s t")
def grouped_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """enable_gqa."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@formulation("b h s d", ONE_K, ONE_V, dynamic="b s t")
def multi_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One key head, broadcast by matmul."""
    return _attend(q, k[:, None], v[:, None])


@formulation("b h s d", ONE_K, ONE_V, dynamic="b t")
def multi_query_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """GPT-BigCode: heads joined with the queries, (B, S·H, D)."""
    batch, heads, rows, width = q.shape
    flat = q.transpose(1, 2).reshape(batch, rows * heads, width)
    scores = torch.baddbmm(torch.zeros(1, 1, 1), flat, k.transpose(1, 2), beta=0, alpha=0.4)
    context = scores.view(batch, rows, heads, -1).softmax(-1).view(batch, rows * heads, -1) @ v
    return context.view(batch, rows, heads, -1).transpose(1, 2)


@formulation("b s h d", ONE_K, ONE_V)
def multi_query_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Shazeer's einsums."""
    weights = torch.einsum("bnhk,bmk->bhnm", q, k).mul(0.4).softmax(-1)
    return torch.einsum("bhnm,bmv->bnhv", weights, v)


@formulation(Q6, K3, "b t e")
def grouped_keys_one_value(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three key heads and one value head."""
    return _attend(q, k.repeat_interleave(2, 1), v[:, None])


@formulation("b h s d", K3, V3, "h h", fused=0, declined=("",))
def talking_heads_before(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    """Scores are mixed across heads before the softmax."""
    scores = torch.einsum("bhst,hg->bgst", q @ k.mT * 0.4, mix)
    return scores.softmax(-1) @ v


@formulation("b h s d", K3, V3, "h h", fused=0, declined=("",))
def talking_heads_both(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    """Scores mixed before, weights mixed after the softmax."""
    scores = torch.einsum("bhst,hg->bgst", q @ k.mT * 0.4, mix)
    return torch.einsum("bhst,hg->bgst", scores.softmax(-1), mix) @ v


@formulation("b h s d", K3, V3, fused=0, declined=("",))
class TalkingHeadsConvolution(nn.Module):
    """Weights mixed by a 1×1 convolution over heads."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(H, H, 1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mix((q @ k.mT * 0.4).softmax(-1)) @ v


class _Packed(nn.Module):
    """One linear of width 3·M, whose output is taken apart by `split`."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(M, 3 * M, bias=bias)
        self.out = nn.Linear(M, M)

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.qkv(x))
        return self.out(_attend(q, k, v).transpose(1, 2).flatten(2))


@formulation(SELF, dynamic="b s")
class PackedThreeHeads(_Packed):
    """timm: (B, N, 3, H, D) permuted, unbind."""

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        return packed.unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4).unbind(0)


@formulation(SELF, dynamic="b s")
class PackedHeadsThree(_Packed):
    """GPT-NeoX: (B, N, H, 3·D)."""

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        return packed.view(*packed.shape[:2], H, 3 * D).transpose(1, 2).chunk(3, -1)


@formulation(SELF)
class PackedWidthThree(_Packed):
    """einops' "b n (h d qkv)": the three are innermost."""

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        heads = packed.unflatten(-1, (H, D, 3)).transpose(1, 2)
        return heads[..., 0], heads[..., 1], heads[..., 2]


@formulation(SELF)
class PackedWidthThreeFront(_Packed):
    """einops' "b n (d qkv h) -> qkv b h n d"."""

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        return packed.unflatten(-1, (D, 3, H)).permute(3, 0, 4, 1, 2).unbind(0)


@formulation(SELF, dynamic="b s")
class PackedChunk(_Packed):
    """chunk, then view."""

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        parts = packed.chunk(3, dim=-1)
        return tuple(x.view(*x.shape[:2], H, D).transpose(1, 2) for x in parts)


@formulation(SELF)
class PackedSplit(_Packed):
    """GPT-2: split(M), then view and permute."""

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        parts = packed.split(M, dim=2)
        return tuple(x.view(*x.size()[:-1], H, D).permute(0, 2, 1, 3) for x in parts)


@formulation(SELF)
class PackedSlices(_Packed):
    """Slices of the last axis."""

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        parts = packed[..., :M], packed[..., M : 2 * M], packed[..., 2 * M :]
        return tuple(x.reshape(*x.shape[:2], H, D).transpose(1, 2) for x in parts)


@formulation(SELF, dynamic="b")
class PackedGrouped(nn.Module):
    """Falcon: (B, N, G, R + 2, D), grouped keys and values at the end of each group."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(M, H * 4 * D)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x).unflatten(-1, (H, 4, D))
        q = packed[..., :-2, :].flatten(2, 3).transpose(1, 2)
        k, v = (
            packed[..., i, None, :].expand(-1, -1, -1, 2, -1).flatten(2, 3).transpose(1, 2)
            for i in (-2, -1)
        )
        return _attend(q, k, v)


@formulation(SELF, dynamic="b s")
class PackedUnequal(nn.Module):
    """Phi-3: split into widths H·D, G·D, G·D."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(M, 6 * D + 2 * 3 * D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([6 * D, 3 * D, 3 * D], dim=-1)
        q = q.unflatten(-1, (6, D)).transpose(1, 2)
        k, v = (y.unflatten(-1, (3, D)).transpose(1, 2).repeat_interleave(2, 1) for y in (k, v))
        return _attend(q, k, v).transpose(1, 2).flatten(2)


class _Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(M, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * D**-0.5
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ self.value(x)


@formulation(SELF, fused=3, dynamic="b s")
class HeadsListed(nn.Module):
    """Karpathy's lecture: a ModuleList of single heads, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(_Head(D) for _ in range(H))
        self.out = nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))


@formulation(SELF, fused=3)
class HeadsSummed(nn.Module):
    """Each head has its own output projection, and they are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(_Head(D) for _ in range(H))
        self.outs = nn.ModuleList(nn.Linear(D, M) for _ in range(H))

    def forward(self, x: Tensor) -> Tensor:
        return sum(out(head(x)) for head, out in zip(self.heads, self.outs, strict=True))


@formulation("b m 4 5", dynamic="b")
class NonLocalBlock(nn.Module):
    """Non-local block: 1×1 convolutions over (B, C, H, W), no scale, a residual gain."""

    def __init__(self) -> None:
        super().__init__()
        self.theta, self.phi = nn.Conv2d(M, 4, 1), nn.Conv2d(M, 4, 1)
        self.g, self.out = nn.Conv2d(M, 7, 1), nn.Conv2d(7, M, 1)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        batch, _, rows, columns = x.shape
        theta = self.theta(x * 0.2).view(batch, 4, -1).permute(0, 2, 1)
        phi = self.phi(x).view(batch, 4, -1)
        g = self.g(x).view(batch, 7, -1).permute(0, 2, 1)
        context = torch.matmul(F.softmax(torch.matmul(theta, phi), dim=-1), g)
        context = context.permute(0, 2, 1).contiguous().view(batch, 7, rows, columns)
        return self.gamma * self.out(context) + x


@formulation("b m 4 5")
class SaganBlock(nn.Module):
    """SAGAN: the attention map is transposed before the product: bmm(g, βᵀ)."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.h = nn.Conv2d(M, 4, 1), nn.Conv2d(M, 4, 1), nn.Conv2d(M, M, 1)

    def forward(self, x: Tensor) -> Tensor:
        f, g, h = (layer(x * 0.3).flatten(2) for layer in (self.f, self.g, self.h))
        beta = torch.softmax(torch.bmm(f.permute(0, 2, 1), g), dim=1)
        return torch.bmm(h, beta).view(x.shape) + x


@formulation("b m 4 5")
class DiffusionAttentionBlock(nn.Module):
    """A U-Net's block: GroupNorm, one 1×1 convolution, heads, (B, H·W, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(3, M), nn.Conv2d(M, 3 * M, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, rows, columns = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, 3, H, D, rows * columns).transpose(-1, -2)
        q, k, v = qkv.unbind(1)
        context = F.scaled_dot_product_attention(q, k, v)
        return context.transpose(-1, -2).reshape(batch, width, rows, columns) + x


@formulation("b m 4 5", dynamic="b")
class ReducedKeys(nn.Module):
    """PVT: keys and values from a strided convolution, so S ≠ T."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(M, M), nn.Linear(M, 2 * M)
        self.reduce = nn.Conv2d(M, M, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        q = self.q(tokens).unflatten(-1, (H, D)).transpose(1, 2)
        small = self.reduce(x).flatten(2).transpose(1, 2)
        k, v = self.kv(small).unflatten(-1, (2, H, D)).permute(2, 0, 3, 1, 4)
        return _attend(q, k, v).transpose(1, 2).flatten(2)


@formulation(SELF, "b t:padding")
class TorchMultihead(nn.Module):
    """nn.MultiheadAttention with a key padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(M, H, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        y = F.pad(x, (0, 0, 0, 2), value=0.3)
        return self.attention(x, y, y, key_padding_mask=~padding, need_weights=False)[0]


@formulation(SELF)
class TorchEncoderLayer(nn.Module):
    """nn.TransformerEncoderLayer with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(M, H, 11, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, src_mask=mask, is_causal=True)
