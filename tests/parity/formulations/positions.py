"""Positions inside queries and keys, and norms of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.formulations.kit import SIZES, formulation

SQUARE = "b h s d", "b h s d", "b h s e"
D = SIZES["d"]


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v


def _angles(length: int, width: int) -> Tensor:
    frequency = 100.0 ** (-torch.arange(0, width, 2) / width)
    return torch.arange(length)[:, None] * frequency


@formulation(*SQUARE, dynamic="b s")
def rotary_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Llama: rotate_half, cos and sin doubled."""
    angles = _angles(q.shape[2], D)
    table = torch.cat([angles, angles], -1)
    cos, sin = table.cos(), table.sin()

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    return _attend(rotate(q), rotate(k), v)


@formulation(*SQUARE, dynamic="b")
def rotary_half_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two halves rotated and concatenated."""
    angles = _angles(q.shape[2], D)
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return _attend(rotate(q), rotate(k), v)


@formulation(*SQUARE, dynamic="b s")
def rotary_interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """GPT-J: even and odd elements, stack and flatten."""
    table = _angles(q.shape[2], D).repeat_interleave(2, -1)
    cos, sin = table.cos(), table.sin()

    def rotate(x: Tensor) -> Tensor:
        return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin

    return _attend(rotate(q), rotate(k), v)


@formulation(*SQUARE, dynamic="b s")
def rotary_deinterleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DeepSeek: even and odd elements come out as halves."""
    angles = _angles(q.shape[2], D)
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: Tensor) -> Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)

    return _attend(rotate(q), rotate(k), v)


@formulation(*SQUARE, dynamic="b s")
def rotary_deinterleaved_partial(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last four elements only, written as halves before they are turned."""
    angles = _angles(q.shape[2], 4)
    cos, sin = (torch.cat([table, table], -1) for table in (angles.cos(), angles.sin()))

    def rotate(x: Tensor) -> Tensor:
        rest, x = x[..., :-4], x[..., -4:]
        x = x.unflatten(-1, (2, 2)).transpose(-1, -2).flatten(-2)
        x = x * cos + torch.cat([-x[..., 2:], x[..., :2]], -1) * sin
        return torch.cat([rest, x], -1)

    return _attend(rotate(q), rotate(k), v)


@formulation(*SQUARE)
def rotary_partial(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first four elements only."""
    angles = _angles(q.shape[2], 4)
    table = torch.cat([angles, angles], -1)
    cos, sin = table.cos(), table.sin()

    def rotate(x: Tensor) -> Tensor:
        x, rest = x[..., :4], x[..., 4:]
        x = x * cos + torch.cat([-x[..., 2:], x[..., :2]], -1) * sin
        return torch.cat([x, rest], -1)

    return _attend(rotate(q), rotate(k), v)


@formulation(*SQUARE)
def rotary_complex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Llama's original: view_as_complex times polar."""
    angles = _angles(q.shape[2], D)
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(3).type_as(x)

    return _attend(rotate(q), rotate(k), v)


@formulation(*SQUARE, "b s:positions", dynamic="b s")
def rotary_position_ids(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Position ids given, cos and sin per batch element."""
    frequency = 100.0 ** (-torch.arange(0, D, 2) / D)
    angles = positions[..., None].float() * frequency
    table = torch.cat([angles, angles], -1)[:, None]

    def rotate(x: Tensor) -> Tensor:
        return x * table.cos() + torch.cat([-x[..., 3:], x[..., :3]], -1) * table.sin()

    return _attend(rotate(q), rotate(k), v)


@formulation("b s h d", "b s d", "b s e")
def rotary_multi_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rotated before the heads are moved, one key head."""
    angles = _angles(q.shape[1], D)
    table = torch.cat([angles, angles], -1)
    cos, sin = table.cos(), table.sin()

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + torch.cat([-x[..., 3:], x[..., :3]], -1) * sin

    q = rotate(q, cos[:, None], sin[:, None]).transpose(1, 2)
    return _attend(q, rotate(k, cos, sin)[:, None], v[:, None])


@formulation(*SQUARE)
def rotary_by_key_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The rotation as a matrix per position, einsum."""
    angles = _angles(q.shape[2], 2)[:, 0]
    rows = [torch.stack([angles.cos(), -angles.sin()], -1)]
    rows.append(torch.stack([angles.sin(), angles.cos()], -1))
    turn = torch.stack(rows, -2)

    def rotate(x: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (3, 2))
        return torch.einsum("sij,bhspj->bhspi", turn, pairs).flatten(-2)

    return _attend(rotate(q), rotate(k), v)


@formulation(*SQUARE, dynamic="b s")
class NormRms(nn.Module):
    """Qwen 3: RMS norm of queries and keys per head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (
            weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
            for x, weight in ((q, self.q), (k, self.k))
        )
        return _attend(q, k, v)


@formulation(*SQUARE)
class NormLayer(nn.Module):
    """LayerNorm of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(self.q(q), self.k(k), v)


@formulation(*SQUARE, dynamic="s")
def norm_l2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """L2 norms by division, scale 10."""
    q = q / q.norm(dim=-1, keepdim=True)
    k = k / k.norm(dim=-1, keepdim=True)
    return (10 * q @ k.mT).softmax(-1) @ v


@formulation(*SQUARE)
def norm_l2_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Cosine similarity with both norms divided out of the scores."""
    scores = q @ k.mT
    scores = scores / q.norm(dim=-1, keepdim=True) / k.norm(dim=-1)[:, :, None, :]
    return (10 * scores).softmax(-1) @ v


@formulation(*SQUARE, fused=None)
def norm_cosine_similarity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """F.cosine_similarity of all pairs."""
    return (10 * F.cosine_similarity(q[..., None, :], k[..., None, :, :], -1)).softmax(-1) @ v


@formulation(*SQUARE)
def norm_l1_of_query_gain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A gain per query row, of the query itself, on the scores."""
    return (q @ k.mT / (1 + q.abs().mean(-1, keepdim=True))).softmax(-1) @ v
