"""What is found by running a model is not believed where one token is another call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attngraph.errors import UsageError
from attngraph.frontend.families.looped import Mixer, find_mixers


class _Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(2, 3)

    def forward(self, x: Tensor, up: Tensor | None = None, down: Tensor | None = None) -> Tensor:
        self.state = self.state + x.sum(1)
        return x * (1 if up is None else up) / (1 if down is None else down)


class _Model(nn.Module):
    def __init__(self, alone: str) -> None:
        super().__init__()
        self.mixer, self.alone = _Keeps(), alone
        self.by = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        name = self.alone if x.shape[1] == 1 else "up"
        made: Tensor = self.mixer(x, **{name: self.by})
        return made


def _found(alone: str) -> tuple[Mixer, ...]:
    model = _Model(alone)
    part = SimpleNamespace(name="state", tokens=None, rows=0)
    kept: Any = SimpleNamespace(parts=[part], at=lambda holder, part: holder.state)

    def run(tokens: int, seen: Any) -> None:
        seen(model.mixer)
        model(torch.ones(2, tokens, 3))

    return find_mixers(run, model, kept)


def test_one_token_by_another_name_is_refused() -> None:
    (mixer,) = _found("up")
    assert mixer.axes == (1, None)
    with pytest.raises(UsageError, match="called otherwise on one token"):
        _found("down")
