"""Terms added to the scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.formulations.kit import BUFFER, SIZES, K, Q, V, formulation

SQUARE = "b h s d", "b h s d", "b h s e"
H, S, D = SIZES["h"], SIZES["s"], SIZES["d"]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.4


@formulation(*SQUARE, dynamic="b s")
def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slopes times distance, causal."""
    length = q.shape[2]
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / H) for h in range(H)])
    position = torch.arange(length)
    distance = (position[None, :] - position[:, None]).to(q.dtype)
    scores = _scores(q, k) + slopes[:, None, None] * distance
    hidden = position[None, :] > position[:, None]
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


@formulation(*SQUARE, "b s:int_padding")
def alibi_bloom(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Bloom: (B·H, 1, T) from the padding's cumulative sum, in baddbmm."""
    slopes = torch.tensor([0.5, 0.25, 0.125])
    positions = ((padding.cumsum(-1) - 1) * padding)[:, None, :]
    bias = (slopes[..., None] * positions).reshape(2 * H, 1, -1).to(q.dtype)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = bias.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=0.4)
    scores = scores.view(2, H, S, S) + (1.0 - padding[:, None, None].float()) * -1e9
    return (scores.softmax(-1).view(2 * H, S, S) @ v).view(2, H, S, -1)


@formulation(*SQUARE, "b s:int_padding")
def alibi_falcon(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Falcon: whole positions times slopes, added before the scores are scaled."""
    slopes = torch.tensor([0.5, 0.25, 0.125])
    positions = ((padding.cumsum(-1) - 1) * padding)[:, None, :]
    bias = (slopes[..., None].bfloat16() * positions).reshape(2 * H, 1, S).to(q.dtype)
    scores = (q @ k.mT + bias.view(2, H, 1, S)) * 0.4
    scores = scores + (1.0 - padding[:, None, None].float()) * torch.finfo(q.dtype).min
    return scores.softmax(-1) @ v


@formulation(*SQUARE)
class T5Buckets(nn.Module):
    """T5's logarithmic buckets through an embedding, no scale."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, H)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(q.shape[2])
        relative = position[None, :] - position[:, None]
        bucket = (relative > 0).long() * 4
        distance = relative.abs()
        large = 2 + (torch.log(distance.float().clamp(min=1) / 2) / math.log(4) * 2).long()
        bucket = bucket + torch.where(distance < 2, distance, large.clamp(max=3))
        return (q @ k.mT + self.table(bucket).permute(2, 0, 1)[None]).softmax(-1) @ v


@formulation("8 9 18")
class SwinWindow(nn.Module):
    """Swin: 3×3 windows, relative bias by an index buffer, a mask per window by a 5-D view."""

    index: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(18, 54)
        self.table = nn.Parameter(torch.zeros(25, H))
        grid = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij"))
        grid = grid.flatten(1)
        relative = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + 2
        self.register_buffer("index", relative[..., 0] * 5 + relative[..., 1])
        region = torch.randint(0, 2, (4, 9), generator=torch.Generator().manual_seed(0))
        self.register_buffer("mask", (region[:, :, None] != region[:, None]).float() * -100.0)

    def forward(self, x: Tensor) -> Tensor:
        windows, area, width = x.shape
        q, k, v = self.qkv(x).reshape(windows, area, 3, H, D).permute(2, 0, 3, 1, 4)
        scores = (q * D**-0.5) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(area, area, -1).permute(2, 0, 1).contiguous()
        scores = scores + bias.unsqueeze(0)
        scores = scores.view(windows // 4, 4, H, area, area) + self.mask[:, None][None]
        weights = scores.view(-1, H, area, area).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(windows, area, width)


@formulation(*SQUARE)
class ShawKeys(nn.Module):
    """Shaw: relative keys, q · R added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2 * BUFFER - 1, D))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(q.shape[2])
        relative = self.table[position[None, :] - position[:, None] + BUFFER - 1]
        scores = q @ k.mT + torch.einsum("bhqd,qkd->bhqk", q, relative)
        return (scores * 0.4).softmax(-1) @ v


@formulation(*SQUARE, fused=None)
class ShawKeysAndValues(nn.Module):
    """Shaw: relative values too, read from the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.zeros(2 * S - 1, D))
        self.values = nn.Parameter(torch.zeros(2 * S - 1, SIZES["e"]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(q.shape[2])
        index = position[None, :] - position[:, None] + S - 1
        scores = q @ k.mT + torch.einsum("bhqd,qkd->bhqk", q, self.keys[index])
        weights = (scores * 0.4).softmax(-1)
        return weights @ v + torch.einsum("bhqk,qkd->bhqd", weights, self.values[index])


@formulation(*SQUARE)
class MusicTransformerSkew(nn.Module):
    """Music Transformer: q · Eᵀ skewed by padding and reshaping."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(S, D))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        relative = q @ self.table.mT
        batch, heads, rows, columns = relative.shape
        skewed = F.pad(relative, (1, 0)).reshape(batch, heads, columns + 1, rows)[:, :, 1:, :]
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = (q @ k.mT + skewed) * 0.4
        return scores.masked_fill(hidden, -1e9).softmax(-1) @ v


@formulation("s b h d", "s b h d", "s b h d", "5 h d")
class TransformerXl(nn.Module):
    """Transformer-XL: two query biases, AC + BD with rel-shift."""

    def __init__(self) -> None:
        super().__init__()
        self.content = nn.Parameter(torch.zeros(H, D))
        self.place = nn.Parameter(torch.zeros(H, D))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
        ac = torch.einsum("ibnd,jbnd->ijbn", q + self.content, k)
        bd = torch.einsum("ibnd,jnd->ijbn", q + self.place, r)
        rows, columns = bd.shape[:2]
        padded = torch.cat([torch.zeros(rows, 1, *bd.shape[2:]), bd], dim=1)
        bd = padded.view(columns + 1, rows, *bd.shape[2:])[1:].view_as(bd)
        weights = ((ac + bd) * 0.4).softmax(dim=1)
        return torch.einsum("ijbn,jbnd->ibnd", weights, v)


@formulation(Q, K, V, "h 1 1")
def bias_over_heads_only(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """One number per head, which softmax doesn't see."""
    return (_scores(q, k) + bias).softmax(-1) @ v


@formulation(Q, K, V, "h t", dynamic="b s t")
def bias_per_head_and_key(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """(H, T)."""
    return (_scores(q, k) + bias[:, None, :]).softmax(-1) @ v


@formulation(Q, K, V, "b 1 s 1")
def bias_per_query(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A bias that doesn't depend on the key."""
    return (_scores(q, k) + bias).softmax(-1) @ v


@formulation(Q, K, V, "b 1 s t", "h s t", "1 1 1 t:minus_inf", dynamic="b")
def bias_three(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Three terms in another order."""
    return (c + (a + (b + _scores(q, k)) * 0.5)).softmax(-1) @ v


@formulation("b s m", "b s s 4", dynamic="b")
class PairBiasGated(nn.Module):
    """AlphaFold: a pair representation projected to a bias, a sigmoid gate on the context."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(18, 18, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.pair = nn.Linear(4, H, bias=False)
        self.gate = nn.Linear(18, 18)
        self.out = nn.Linear(18, 18)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (self.q, self.k, self.v))
        bias = self.pair(self.norm(z)).permute(0, 3, 1, 2)
        weights = (torch.einsum("bhqd,bhkd->bhqk", q * D**-0.5, k) + bias).softmax(-1)
        context = torch.einsum("bhqk,bhkd->bqhd", weights, v).flatten(-2)
        return self.out(torch.sigmoid(self.gate(x)) * context)


@formulation("b 5 5 m", "b 5 5:float_mask")
class TriangleAttention(nn.Module):
    """AlphaFold: along rows of the pair matrix, the bias shared by all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(18, 18, bias=False) for _ in range(3))
        self.pair = nn.Linear(18, H, bias=False)
        self.gate = nn.Linear(18, 18)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (p(z).unflatten(-1, (H, D)).transpose(-2, -3) for p in (self.q, self.k, self.v))
        scores = torch.matmul(q * D**-0.5, k.transpose(-1, -2))
        scores = scores + (1e9 * (mask - 1))[..., :, None, None, :]
        scores = scores + self.pair(z).permute(0, 3, 1, 2).unsqueeze(-4)
        context = torch.matmul(scores.softmax(-1), v).transpose(-2, -3)
        return torch.sigmoid(self.gate(z)) * context.flatten(-2)


@formulation(*SQUARE)
class DebertaDisentangled(nn.Module):
    """DeBERTa: content-to-position and position-to-content terms by gather."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(H, 8, D))
        self.key = nn.Parameter(torch.zeros(H, 8, D))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = 1 / math.sqrt(3 * D)
        position = torch.arange(q.shape[2])
        index = (position[:, None] - position[None, :]).clamp(-4, 3) + 4
        index = index.expand(q.shape[0], H, -1, -1)
        scores = torch.matmul(q, k.mT * scale)
        c2p = torch.gather(torch.matmul(q, self.key.mT), -1, index) * scale
        p2c = torch.gather(torch.matmul(k, self.query.mT), -1, index).mT * scale
        return (scores + c2p + p2c).softmax(-1) @ v


@formulation("b s m", dynamic="b")
class DecomposedRelative(nn.Module):
    """SAM and MViT: q · R over rows and columns of the key grid, through a 5-D view (1×5 grid)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(18, 54)
        self.columns = nn.Parameter(torch.zeros(5, 5, D))
        self.rows = nn.Parameter(torch.zeros(1, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        qkv = self.qkv(x).reshape(batch, 5, 3, H, D).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, batch * H, 5, D).unbind(0)
        scores = (q * D**-0.5) @ k.transpose(-2, -1)
        grid = q.reshape(batch * H, 1, 5, D)
        tall = torch.einsum("bhwc,hkc->bhwk", grid, self.rows)
        wide = torch.einsum("bhwc,wkc->bhwk", grid, self.columns)
        scores = scores.view(-1, 1, 5, 1, 5) + tall[:, :, :, :, None] + wide[:, :, :, None, :]
        context = scores.view(-1, 5, 5).softmax(-1) @ v
        return context.view(batch, H, 5, D).transpose(1, 2).reshape(batch, 5, -1)


@formulation(*SQUARE)
class ContinuousPositionBias(nn.Module):
    """Swin v2: the bias is 16 · sigmoid of an MLP over relative coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, 7), nn.ReLU(), nn.Linear(7, H, bias=False))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(S, dtype=q.dtype)
        bias = self.mlp((position[None] - position[:, None])[..., None]).permute(2, 0, 1)
        return (_scores(q, k) + 16 * torch.sigmoid(bias)).softmax(-1) @ v


@formulation(*SQUARE, "b s 3")
def gaussian_distances(q: Tensor, k: Tensor, v: Tensor, points: Tensor) -> Tensor:
    """Point clouds: squared distances are subtracted."""
    distance = (points[:, :, None] - points[:, None]).square().sum(-1)
    return (_scores(q, k) - 0.3 * distance[:, None]).softmax(-1) @ v


@formulation(*SQUARE)
def negative_squared_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """L2 attention: −‖q − k‖² written as a product, whose query term softmax doesn't see."""
    distance = (q**2).sum(-1, keepdim=True) + (k**2).sum(-1)[:, :, None] - 2 * q @ k.mT
    return (-0.2 * distance).softmax(-1) @ v


@formulation(Q, K, V, "b h 4 6", dynamic="b")
def bias_of_a_part(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Relative scores for all tokens but the class token, which stands first."""
    scores = _scores(q, k)
    rows = q[:, :, 1:].reshape(q.shape[0], H, 2, 2, -1).mean(-1)
    part = scores[:, :, 1:, 1:].view(*scores.shape[:2], 2, 2, 2, 3) + rows[..., None, None]
    scores[:, :, 1:, 1:] = part.view(*scores.shape[:2], 4, 6)
    scores[:, :, 1:, 1:] += bias
    return scores.softmax(-1) @ v


@formulation(*SQUARE, fused=0, declined=("logits-not-a-product",))
def part_of_scores_swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores of all but the class token, to which those of the opposite pairs are added."""
    scores = _scores(q, k)
    scores[:, :, 1:, 1:] = scores[:, :, 1:, 1:].mT * 2 + scores[:, :, :-1, :-1]
    return scores.softmax(-1) @ v


@formulation(Q, K, V, "b h 4 6", "h 1 t")
def bias_of_joined_parts(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, first: Tensor) -> Tensor:
    """The same, with the class token's row and column joined again to the rest."""
    scores = _scores(q, k)
    rest = torch.cat([scores[..., 1:, :1], scores[..., 1:, 1:] + bias], -1)
    return torch.cat([scores[..., :1, :] + first, rest], -2).softmax(-1) @ v


@formulation(Q, K, V, "b h 4 t", dynamic="b t")
def bias_of_later_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """All queries but the first have a bias."""
    scores = _scores(q, k)
    return torch.cat([scores[:, :, :1], scores[:, :, 1:] + bias], 2).softmax(-1) @ v
