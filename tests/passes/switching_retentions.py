"""Retentions that aren't one at some numbers or lengths, where no trial may have looked."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.passes.linear_attentions import SwitchingRetention


class ClampedDistance(SwitchingRetention):
    def mask(self, apart: Tensor) -> Tensor:
        return torch.where(apart >= 0, 0.9 ** apart.clamp(0, 100), 0.0)


class LeastDecay(SwitchingRetention):
    def mask(self, apart: Tensor) -> Tensor:
        return torch.where(apart >= 0, (0.9 ** apart.clamp(min=0)).clamp_min(1e-4), 0.0)


class Window(SwitchingRetention):
    def mask(self, apart: Tensor) -> Tensor:
        return super().mask(apart) * (apart - 100 < 0)


class TableOfDecays(SwitchingRetention):
    def __init__(self) -> None:
        super().__init__()
        table = 0.9 ** torch.arange(512)
        table[100:] = 0.0
        self.register_buffer("table", table)

    def mask(self, apart: Tensor) -> Tensor:
        return torch.where(apart >= 0, self.table[apart.clamp(min=0)], 0.0)


class ClampedScores(SwitchingRetention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT).clamp(max=1000.0)


class SoftWindow(SwitchingRetention):
    def mask(self, apart: Tensor) -> Tensor:
        return super().mask(apart) / (1 + ((apart - 100) * 0.7).exp())


class SteepPower(SwitchingRetention):
    def mask(self, apart: Tensor) -> Tensor:
        return super().mask(apart) * (-((apart / 100) ** 40)).exp()


class HiddenGrowth(SwitchingRetention):
    def mask(self, apart: Tensor) -> Tensor:
        return super().mask(apart) + torch.where(apart >= 0, (0.05 * apart - 60).exp(), 0.0)


class FarFill(SwitchingRetention):
    """What lies ahead is e^-60 at first."""

    def mask(self, apart: Tensor) -> Tensor:
        return torch.where(apart >= 0, -0.1 * apart, -60 - 0.1 * apart).exp()


class RoundedPlaces(SwitchingRetention):
    def mask(self, apart: Tensor) -> Tensor:
        return torch.where(apart >= 0, 0.9 ** (apart / 100).long(), 0.0)


class HalfPlaces(SwitchingRetention):
    """Places from 256 on are not told apart."""

    def mask(self, apart: Tensor) -> Tensor:
        place = torch.arange(apart.shape[0]).bfloat16()
        return super().mask(place[:, None] - place[None]).float()


class PaddedPlaces(SwitchingRetention):
    def mask(self, apart: Tensor) -> Tensor:
        mask = super().mask(apart)
        return mask + F.pad(mask, (0, 0, 100, 0))[: apart.shape[0]]


class JoinedPlaces(SwitchingRetention):
    def mask(self, apart: Tensor) -> Tensor:
        mask = super().mask(apart)
        return mask + torch.cat([torch.zeros(100, apart.shape[1]), mask])[: apart.shape[0]]


class RepeatedPlaces(SwitchingRetention):
    def mask(self, apart: Tensor) -> Tensor:
        segment = torch.arange(apart.shape[0]).repeat_interleave(100)[: apart.shape[0]]
        return super().mask(apart) * (segment[:, None] >= segment[None])


class LimitInBuffer(SwitchingRetention):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limit", torch.tensor(100))

    def mask(self, apart: Tensor) -> Tensor:
        return super().mask(apart) * (apart < self.limit)


class EchoedScores(SwitchingRetention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT
        return scores + F.pad(scores, (0, 0, 100, 0))[:, :, : scores.shape[2]]


class FaintScores(SwitchingRetention):
    """The second summand shows where the first one vanishes."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT + 1e-12


class HalvedScores(SwitchingRetention):
    """Which are infinite from 65520 on."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k).half().float()


class CubicScores(SwitchingRetention):
    """Scores of 1e6 are cubes; of those that are drawn nothing shows."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT
        return scores + (scores * 1e-4) ** 3


class BoundedScores(SwitchingRetention):
    """Scores of 1e6 count less than those of 1."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT
        return scores / (1 + (scores * 1e-4) ** 4)


SWITCHING = (
    *(ClampedDistance, LeastDecay, Window, TableOfDecays, ClampedScores, SoftWindow, SteepPower),
    *(HiddenGrowth, FarFill, RoundedPlaces, HalfPlaces, PaddedPlaces, JoinedPlaces),
    *(RepeatedPlaces, LimitInBuffer, EchoedScores, FaintScores),
    *(CubicScores, BoundedScores, HalvedScores),
)
"""What agrees with a recurrence wherever a trial may have looked."""
