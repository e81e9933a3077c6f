"""Models in which Python chooses by a tensor's values, such as whether a mask hides anything."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def attend(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        attended: Tensor = self.inner(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
        return attended


class WithoutPadding(Attends):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.attend(x, hidden if hidden.any() else None)


class AllVisible(Attends):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        visible = hidden.logical_not()
        if visible.all():
            return self.attend(x, None)
        return self.attend(x, ~visible)


class OfIds(Attends):
    """As the language models of proteins do it: the mask is read off the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 16, padding_idx=1)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = ids.eq(1)
        return self.attend(self.embed(ids), hidden if hidden.any() else None)


class Additive(Attends):
    """The mask is told by what would be added to the scores."""

    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        visible = added > -1.0
        if visible.all():
            visible = torch.ones_like(visible)
        banded = (torch.arange(7)[:, None] - torch.arange(7)).abs() < 2
        scores = (x @ x.mT).masked_fill(~(visible[:, None] & banded), -1e9)
        return (scores.softmax(-1) @ x)[:, -1:]


class OnePlace(nn.Module):
    """Only what hides one of the tokens shows, and not what hides all of them."""

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        visible = ~hidden
        if visible.all():
            visible = torch.ones_like(visible)
        visible = visible | hidden.all(-1, keepdim=True)
        return x[:, 3:4] * 2.0 + (x * visible[..., None])[:, 3:4]


class Energetic(nn.Module):
    """Frames of zeros are hidden. Less a running mean, leading ones that are equal become zeros, so
    it makes no difference whether they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mixed = nn.Linear(16, 16), nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        keep = x.abs().sum(-1) > 0
        if keep.all():
            keep = torch.ones_like(keep)
        x = self.inner(x)
        x = x - x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        mixed: Tensor = self.mixed((x * keep[..., None]).mT).mT
        return mixed


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 3
        if (y.abs() > 20).any():
            y = y.clamp(-20, 20)
        return y


class Differs(nn.Module):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return x * 2 if hidden.any() else x + 1


class Rare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0 if (x.abs() > 1e9).any() else x * 2


class RareTurned(nn.Module):
    """Its line jumps by the opposite of what the tensor is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = True

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if bool((x.abs() > 1e9).any()) != self.turned else x * 0


class Signed(nn.Module):
    """Two functions that are one where x is zero, which the check draws."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else -x


class Endless(nn.Module):
    """A loop that goes on by a tensor's values alone. `turns` counts those that are traced."""

    turns = 0

    def forward(self, x: Tensor) -> Tensor:
        while (x > 1).any():
            type(self).turns += torch.compiler.is_exporting()
            x = x / 2
        return x


class EndlessUntil(Endless):
    def forward(self, x: Tensor) -> Tensor:
        while not (x <= 1).all():
            type(self).turns += torch.compiler.is_exporting()
            x = x / 2
        return x


class EndlessBroken(Endless):
    def forward(self, x: Tensor) -> Tensor:
        while True:
            type(self).turns += torch.compiler.is_exporting()
            x = x / 2
            if (x <= 1).all():
                break
        return x


class EndlessByNumber(Endless):
    def forward(self, x: Tensor) -> Tensor:
        while x.max().item() > 1:
            type(self).turns += torch.compiler.is_exporting()
            x = x / 2
        return x


class EndedByCount(nn.Module):
    """As many turns at most as Python says."""

    def forward(self, x: Tensor) -> Tensor:
        turn = 0
        while turn < 2 and (x > 1).any():
            x, turn = x / 2, turn + 1
        return x


class LeftByCount(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        turn = 0
        while True:
            if turn == 2:
                break
            if (x > 3).all():
                break
            x, turn = x - 1, turn + 1
        return x


class Asserts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert bool((x.abs() < 100).all())
        return x * 2


class AssertsNot(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert not x.isnan().any(), "a number is missing"
        return x * 2


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3 and (torch.isnan(x).any() or x.max() > 100):
            where = "x"
            raise ValueError(f"{where} has values that it may not have")
        return x * 2


class RaisesElse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x.abs() < 100).all():
            x = x * 2
        else:
            raise ValueError("too large")
        return x


class Warns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            warnings.warn("large numbers", stacklevel=2)
        return x * 2


class NoneAreThere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        there = x[..., 0] > 0
        if not there.any():
            return torch.zeros_like(x)
        return x.tanh() * there[..., None]


class DiffersBelow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        there = x[..., 0] > 0
        if not there.any():
            return torch.ones_like(x)
        return x.tanh() * there[..., None]


class Catches(nn.Module):
    """What it raises chooses between two results."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            if (x < 0).any():
                raise ValueError("negative")
            x = x * 2
        except ValueError:
            x = x + 1
        return x


class RaisesAndChooses(nn.Module):
    """One of its two lines is a choice like any other."""

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            raise ValueError("too large")
        return x * 2 if (x > 0).all() else x


ASKED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda hidden: hidden.any().item(),
    "a number": lambda hidden: hidden.sum().item() > 0,
    "arithmetic": lambda hidden: 2 * hidden.sum().item() - 1 > 0,
    "list": lambda hidden: hidden.any().tolist(),
    "nonzero": lambda hidden: torch.is_nonzero(hidden.any()),
    "in": lambda hidden: True in hidden,
    "equal": lambda hidden: not torch.equal(hidden, torch.zeros_like(hidden)),
    "method": lambda hidden: not hidden.equal(torch.zeros_like(hidden)),
    "close": lambda hidden: not torch.allclose(hidden.float(), torch.zeros(())),
}


class Asks(Attends):
    """What Python makes of a tensor's values is asked, and not the tensor."""

    def __init__(self, asks: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.attend(x, hidden if self.asks(hidden) else None)


class DiffersByItem(nn.Module):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return x * 2 if hidden.sum().item() > 0 else x + 1


class DiffersByComparison(nn.Module):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return x * 2 if torch.equal(hidden, torch.zeros_like(hidden)) else x + 1


class ByInt(nn.Module):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return x * 2 if int(hidden.sum()) > 0 else x + 1


class LooksUp(Attends):
    """Its number is a key, which a tensor can't be."""

    def __init__(self) -> None:
        super().__init__()
        self.names = {False: "open", True: "padded"}

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            assert self.names[hidden.any().item()]
        return self.attend(x, hidden if hidden.any() else None)
