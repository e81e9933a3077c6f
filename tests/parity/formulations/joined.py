"""Keys in several places under one softmax: memories, prefixes, global tokens, sinks, rows and
columns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.parity.formulations.kit import K, Q, V, formulation

MEMORY = ("b h 4 d", "b h 4 e")


def _both(weights: Tensor, v: Tensor, memory: Tensor) -> Tensor:
    return weights[..., : v.shape[-2]] @ v + weights[..., v.shape[-2] :] @ memory


@formulation(Q, K, V, *MEMORY, "b 1 s t:mask", "h s t")
def joined_one_masked(
    q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor, mask: Tensor, bias: Tensor
) -> Tensor:
    """A bias and a mask of one part alone."""
    own = (q @ k.mT * 0.4 + bias).masked_fill(~mask, -torch.inf)
    return _both(torch.cat([own, q @ mk.mT * 0.4], -1).softmax(-1), v, mv)


@formulation(Q, K, V, *MEMORY, "b t:padding", "b 4:padding")
def joined_both_masked(
    q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor, one: Tensor, two: Tensor
) -> Tensor:
    """Padding in both parts, filled with different numbers."""
    own = (q @ k.mT * 0.4).masked_fill(~one[:, None, None], -torch.inf)
    others = (q @ mk.mT * 0.4).masked_fill(~two[:, None, None], torch.finfo(torch.float32).min)
    return _both(torch.cat([own, others], -1).softmax(-1), v, mv)


@formulation(Q, K, V, *MEMORY, "b t:padding", "b 4:padding")
def joined_rows_without_keys(
    q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor, one: Tensor, two: Tensor
) -> Tensor:
    """A row that sees nothing in either part is NaN in eager, and zeros after it."""
    own = (q @ k.mT * 0.4).masked_fill(~one[:, None, None], -torch.inf)
    others = (q @ mk.mT * 0.4).masked_fill(~two[:, None, None], -torch.inf)
    return _both(torch.cat([own, others], -1).softmax(-1).nan_to_num(), v, mv)


@formulation(Q, K, V, *MEMORY, "h")
def joined_scales(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor, gate: Tensor) -> Tensor:
    """Each part has a scale, and one has a factor per head."""
    own = (0.3 * q) @ k.mT
    others = q @ (mk * 0.5).mT * gate[:, None, None]
    return _both(torch.cat([own, others], -1).softmax(-1), v, mv)


@formulation(Q, "b 1 t d", "b 1 t e", "h 4 d", "h 4 e")
def joined_shared_prefix(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Tensor:
    """A prefix that all sequences share, beside keys that all heads share."""
    prefix = torch.einsum("bhsd,hpd->bhsp", q, pk)
    weights = torch.cat([prefix, q @ k.mT], -1).mul(0.4).softmax(-1)
    first, rest = weights.split([4, k.shape[-2]], -1)
    return torch.einsum("bhsp,hpe->bhse", first, pv) + rest @ v


@formulation(Q, K, V, "b h 4 d", "b h 4 e", "b h 1 d", "b h 1 e", dynamic="b s t")
def joined_three(
    q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor, ok: Tensor, ov: Tensor
) -> Tensor:
    """Three parts, of which one is a single key, whose scores are a sum and whose values a
    multiple."""
    single = (q * ok).sum(-1, keepdim=True)
    weights = (torch.cat([single, q @ k.mT, q @ mk.mT], -1) * 0.4).softmax(-1)
    last = weights[..., -4:] @ mv
    return weights[..., 1:-4] @ v + weights[..., :1] * ov + last


@formulation(Q, K, "b h 11 e", "b h 4 d")
def joined_scores_alone(q: Tensor, k: Tensor, v: Tensor, mk: Tensor) -> Tensor:
    """The values are in one place."""
    return (torch.cat([q @ k.mT, q @ mk.mT], -1) * 0.4).softmax(-1) @ v


@formulation("b 5 7 d", "b 5 7 d", "b 5 7 d", fused=0, declined=("joined",))
def criss_cross(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each place attends to its row and its column (Huang et al., 2019)."""
    columns = torch.einsum("bhwd,bgwd->bhwg", q, k)
    hidden = torch.eye(5, dtype=torch.bool)[None, :, None]
    columns = columns.masked_fill(hidden, -torch.inf)
    rows = torch.einsum("bhwd,bhud->bhwu", q, k)
    weights = (torch.cat([columns, rows], -1) * 0.4).softmax(-1)
    column, row = weights.split([5, 7], -1)
    of_column = torch.einsum("bhwg,bgwd->bhwd", column, v)
    return of_column + torch.einsum("bhwu,bhud->bhwd", row, v)


@formulation("b h 3 4 d", "b h 3 4 d", "b h 3 4 d", "b h 2 d", "b h 2 d", "b 3 4:mask")
def joined_global_tokens(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor, gv: Tensor, mask: Tensor
) -> Tensor:
    """PEGASUS-X: blocks of tokens beside global ones, under a mask of all keys."""
    others = torch.einsum("BHNKF,BHGF->BHNKG", q, gk)
    own = torch.einsum("BHNKF,BHNXF->BHNKX", q, k)
    hidden = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    hidden = nn.functional.pad(hidden, (2, 0), value=0)
    scores = torch.cat([others, own], -1) * 0.4 + hidden[:, None, :, None, :]
    weights = scores.softmax(-1)
    context = torch.einsum("BHNKG,BHGF->BHNKF", weights[..., :2], gv)
    return context + torch.einsum("BHNKX,BHNXF->BHNKF", weights[..., 2:], v)


@formulation(Q, K, V)
class PersistentMemory(nn.Module):
    """All-attention (Sukhbaatar et al., 2019): learned keys and values, as a linear layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(6, 4, bias=False)
        self.values = nn.Parameter(torch.randn(4, 10))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.cat([self.keys(q), torch.einsum("bhsd,bhtd->bhst", q, k)], dim=3)
        first, rest = (scores / 6**0.5).softmax(3).split([4, k.shape[2]], dim=3)
        return torch.matmul(first, self.values) + torch.matmul(rest, v)


@formulation(*["b 12 4 6"] * 3)
def joined_focal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Focal attention: the window of a map that a query is in, beside what all windows pool."""

    def windows(x: Tensor) -> Tensor:
        tiles = x.reshape(-1, 2, 6, 2, 2, 3, 2).permute(0, 3, 5, 1, 4, 6, 2)
        return tiles.reshape(-1, 6, 2, 4, 6)

    def pooled(x: Tensor) -> Tensor:
        tokens = functional.avg_pool2d(x, 2).reshape(-1, 1, 2, 6, 6).mT
        return tokens.expand(-1, 6, -1, -1, -1)

    q = windows(q) * 0.4
    scores = torch.cat([q @ windows(k).mT, q @ pooled(k).mT], -1)
    return _both(scores.softmax(-1), windows(v), pooled(v))
