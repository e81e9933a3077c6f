"""Windows of keys around each query, whose scores are kept by offset; and near misses of those."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.formulations.kit import SELF, formulation

M, H, D = 18, 3, 6
W = 2  # keys on either side
CHUNKED = "b 12 m"
_NO_PRODUCT = ("logits-not-a-product",)


class _Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(M, 3 * M), nn.Linear(M, M)

    def heads(self, x: Tensor) -> list[Tensor]:
        parts = self.packed(x).chunk(3, -1)
        return [part.view(*x.shape[:2], H, D).transpose(1, 2) for part in parts]

    def joined(self, x: Tensor) -> Tensor:
        return self.out(x.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _places(length: int, count: int = 2 * W + 1, step: int = 1) -> Tensor:
    """The key at each offset from each query, which may be off the ends."""
    return torch.arange(length)[:, None] + step * (torch.arange(count) - W)


def _hidden(scores: Tensor, places: Tensor, fill: float = -math.inf) -> Tensor:
    return scores.masked_fill((places < 0) | (places >= scores.shape[2]), fill)


class _Shifted(_Windows):
    """A score for each shift of the keys, stacked (Ramachandran et al., 2019, in one dimension)."""

    count, step = 2 * W + 1, 1

    def shifts(self, x: Tensor) -> list[Tensor]:
        length, reach = x.shape[2], W * self.step
        padded = F.pad(x, (0, 0, reach, reach))
        return [padded[:, :, n * self.step :][:, :, :length] for n in range(self.count)]

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        scores = torch.stack([(query * k).sum(-1) for k in self.shifts(key)], -1) / D**0.5
        return _hidden(scores, _places(query.shape[2], self.count, self.step)).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        weights = self.weights(query, key)
        values = torch.stack(self.shifts(value), 3)
        return self.joined((weights[..., None] * values).sum(3))


@formulation(SELF, dynamic="b s")
class Shifted(_Shifted):
    pass


@formulation(SELF, dynamic="b s")
class ShiftedToThePast(_Shifted):
    """Of a causal window."""

    count = W + 1


@formulation(SELF, dynamic="b s")
class Dilated(_Shifted):
    """Every second key (Beltagy et al., 2020)."""

    step = 2


@formulation(SELF, dynamic="b s")
class Diagonals(_Windows):
    """The diagonals of the scores of all pairs."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        places = _places(query.shape[2])
        inside = places.clamp(0, query.shape[2] - 1)
        scores = query @ key.mT / D**0.5
        kept = scores.gather(-1, inside.expand(*scores.shape[:3], -1))
        weights = _hidden(kept, places, -1e9).softmax(-1)
        return self.joined(torch.einsum("bhij,bhijd->bhid", weights, value[:, :, inside]))


@formulation(SELF, dynamic="b s")
class Unfolded(_Windows):
    """Copies of the keys of each window (NATTEN in one dimension)."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        keys, values = (F.pad(a, (0, 0, W, W)).unfold(2, 2 * W + 1, 1) for a in (key, value))
        scores = torch.einsum("bhtd,bhtdj->bhtj", query, keys)
        weights = _hidden(scores, _places(query.shape[2])).softmax(-1)
        return self.joined(torch.einsum("bhtj,bhtdj->bhtd", weights, values))


class _Chunked(_Windows):
    """Blocks of queries with the blocks of keys around them, whose diagonals become columns."""

    def blocks(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, W, W)).unflatten(2, (-1, W))
        return torch.cat((x[:, :, :-2], x[:, :, 1:-1], x[:, :, 2:]), 3)

    def columns(self, scores: Tensor) -> Tensor:
        skewed = F.pad(scores.flatten(-2), (0, W)).unflatten(-1, (W, 3 * W + 1))
        return skewed[..., : 2 * W + 1].flatten(2, 3)

    def diagonals(self, weights: Tensor) -> Tensor:
        padded = F.pad(weights.unflatten(2, (-1, W)), (0, W)).flatten(-2)
        return padded[..., :-W].unflatten(-1, (W, 3 * W))

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query.unflatten(2, (-1, W)) @ self.blocks(key).mT / D**0.5
        return _hidden(self.columns(scores), _places(query.shape[2])).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        weights = self.diagonals(self.weights(query, key))
        return self.joined((weights @ self.blocks(value)).flatten(2, 3))


@formulation(CHUNKED, dynamic="b")
class Chunked(_Chunked):
    pass


@formulation(CHUNKED, dynamic="b")
class Overlapping(_Chunked):
    """Longformer's: chunks of 2w overlap by half, and their parts are written over zeros."""

    fill: float

    def chunks(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, *x.shape[2:]).unflatten(1, (-1, 2 * W))
        size, stride = list(x.shape), list(x.stride())
        size[1], stride[1] = 2 * size[1] - 1, stride[1] // 2
        return x.as_strided(size, stride)

    def band(self, query: Tensor, key: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        scores = torch.einsum("bcxd,bcyd->bcxy", self.chunks(query), self.chunks(key))
        scores = F.pad(scores, (0, 0, 0, 1))
        scores = scores.view(*scores.shape[:2], 2 * W, 2 * W + 1)
        band = scores.new_zeros((batch * heads, length // W, W, 2 * W + 1))
        band[:, :-1, :, W:] = scores[:, :, :W, : W + 1]
        band[:, -1, :, W:] = scores[:, -1, W:, : W + 1]
        band[:, 1:, :, :W] = scores[:, :, -(W + 1) : -1, W + 1 :]
        band[:, 0, 1:W, 1:W] = scores[:, 0, : W - 1, 1 - W :]
        band = band.view(batch, heads, length, 2 * W + 1)
        first = band.new_ones(W, W + 1).tril().flip(dims=[0]).bool()
        band[:, :, :W, : W + 1] = band[:, :, :W, : W + 1].masked_fill(first, -math.inf)
        last = first.flip(dims=(0, 1))
        band[:, :, -W:, -W - 1 :] = band[:, :, -W:, -W - 1 :].masked_fill(last, -math.inf)
        return band

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        return self.band(query / D**0.5, key).softmax(-1)


@formulation(CHUNKED, dynamic="b")
class PaddedRows(Overlapping):
    """A bias of each key hides padding, laid out as the scores are; rows of padding are cleared."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        padding = x[:, :, 0] > 1
        fill = torch.where(padding, torch.finfo(x.dtype).min, 0.0)[:, None, :, None]
        scores = self.band(query / D**0.5, key) + self.band(torch.ones_like(fill), fill)
        weights = scores.softmax(-1).masked_fill(padding[:, None, :, None], 0.0)
        return self.joined((self.diagonals(weights) @ self.blocks(value)).flatten(2, 3))


class _PaddedKeys(Overlapping):
    """Rows of padding stay, of which all keys of a window may be hidden."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        fill = torch.where(keep, 0.0, self.fill)[:, None, :, None]
        scores = self.band(query / D**0.5, key) + self.band(torch.ones_like(fill), fill)
        return self.joined((self.diagonals(scores.softmax(-1)) @ self.blocks(value)).flatten(2, 3))


@formulation(CHUNKED, "b 12:padding", dynamic="b")
class PaddedKeys(_PaddedKeys):
    fill = torch.finfo(torch.float32).min


@formulation("b 64 m", "b 64:padding", dynamic="b")
class PaddedKeysInBlocks(_PaddedKeys):
    fill = -10000.0


@formulation("b 64 m", dynamic="b")
class ManyBlocks(PaddedRows):
    pass


# Near misses


@formulation(SELF, fused=0, declined=_NO_PRODUCT)
class WrappedAround(_Shifted):
    """The keys before the first are the last ones."""

    def shifts(self, x: Tensor) -> list[Tensor]:
        return [x.roll(W - n, 2) for n in range(self.count)]

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        scores = torch.stack([(query * k).sum(-1) for k in self.shifts(key)], -1)
        return scores.softmax(-1)


@formulation(SELF, fused=0, declined=_NO_PRODUCT)
class ValuesOfNeighbours(_Shifted):
    """Each weight meets the value behind that of its key."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        values = torch.stack(self.shifts(F.pad(value, (0, 0, 0, 1))[:, :, 1:]), 3)
        return self.joined((self.weights(query, key)[..., None] * values).sum(3))


@formulation(SELF, fused=0, declined=_NO_PRODUCT)
class FlippedWeights(_Shifted):
    """The weight of the key before is that of the key behind."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        values = torch.stack(self.shifts(value), 3)
        return self.joined((self.weights(query, key).flip(-1)[..., None] * values).sum(3))


@formulation(SELF, fused=0, declined=_NO_PRODUCT)
class SeenEnds(_Shifted):
    """Keys off the ends are zeros that have their share."""

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.stack([(query * k).sum(-1) for k in self.shifts(key)], -1).softmax(-1)


@formulation(SELF, fused=0, declined=_NO_PRODUCT)
class LastRowAlone(_Shifted):
    """The last query looks at itself alone, and all others at their window."""

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        scores = torch.stack([(query * k).sum(-1) for k in self.shifts(key)], -1)
        places = _places(query.shape[2])
        alone = (torch.arange(query.shape[2])[:, None] == query.shape[2] - 1) & (
            places != query.shape[2] - 1
        )
        return _hidden(scores, places).masked_fill(alone, -math.inf).softmax(-1)


@formulation(CHUNKED, fused=0, declined=_NO_PRODUCT)
class AnotherKeyOnce(_Chunked):
    """One score of one row is that of another key."""

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query.unflatten(2, (-1, W)) @ self.blocks(key).mT / D**0.5
        columns = self.columns(scores)
        moved = columns.clone()
        moved[:, :, 5, 3] = columns[:, :, 5, 2]
        return _hidden(moved, _places(query.shape[2])).softmax(-1)
