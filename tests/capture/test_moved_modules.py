"""A module that is moved to where it is stays there in a trace, and no other one does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attngraph import optimize
from attngraph.frontend.rewording.module_casts import casts_to_own_dtype

Move = Callable[[nn.Module], nn.Module]

STAYS: dict[str, Move] = {
    "its dtype": lambda module: module.to(torch.float32),
    "float": lambda module: module.float(),
    "its device": lambda module: module.to("cpu"),
    "both": lambda module: module.to(device="cpu", dtype=torch.float32),
    "as a tensor is": lambda module: module.to(torch.zeros(1)),
}
MOVES: dict[str, Move] = {
    "another dtype": lambda module: module.to(torch.float64),
    "double": lambda module: module.double(),
    "another device": lambda module: module.to("meta"),
    "another layout": lambda module: module.to(memory_format=torch.channels_last),
}


class Moved(nn.Module):
    def __init__(self, move: Move) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        self.linear = self.move(self.linear)
        return torch.relu(self.linear(x))


@pytest.mark.parametrize("move", STAYS.values(), ids=STAYS)
def test_a_move_to_where_it_is_is_left_out(move: Move) -> None:
    model, x = Moved(move).eval(), torch.randn(3, 4)
    torch.testing.assert_close(optimize(model, (x,))(x), model(x))


@pytest.mark.parametrize("name", {**STAYS, **MOVES})
def test_only_such_moves_are_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, applied = nn.Conv2d(3, 3, 1), list[str]()
    own = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[..., Tensor], recurse: bool = True) -> nn.Module:
        applied.append(name)
        return own(self, fn, recurse)

    monkeypatch.setattr(nn.Module, "_apply", apply)
    move = {**STAYS, **MOVES}[name]
    with casts_to_own_dtype():
        assert move(module) is module
    assert bool(applied) == (name in MOVES)
    applied.clear()
    move(nn.Linear(2, 2))
    assert applied
