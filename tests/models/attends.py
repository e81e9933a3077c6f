"""Attention of one head over x itself, with what is hidden given."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Attends(nn.Module):
    """Of x (…, length, 16), where `hidden` is true a key isn't seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def attend(self, x: Tensor, hidden: Tensor) -> Tensor:
        scores = (self.query(x) @ self.key(x).mT / 4).masked_fill(hidden, -1e9)
        attended: Tensor = scores.softmax(-1) @ x
        return attended
