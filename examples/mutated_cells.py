"""The three mutated cells of Jozefowicz, Zaremba and Sutskever (2015), found by a search.

    MUT1  z = σ(W_xz x + b_z)                    r = σ(W_xr x + W_hr h + b_r)
          h' = tanh(W_hh (r ⊙ h) + tanh(x) + b_h) ⊙ z + h ⊙ (1 - z)
    MUT2  z = σ(W_xz x + W_hz h + b_z)           r = σ(x + W_hr h + b_r)
          h' = tanh(W_hh (r ⊙ h) + W_xh x + b_h) ⊙ z + h ⊙ (1 - z)
    MUT3  z = σ(W_xz x + W_hz tanh(h) + b_z)     r = σ(W_xr x + W_hr h + b_r)
          h' as in MUT2

ONNX has no operator for them: torch's `scan` keeps the loop a loop, whatever the length.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim


class Mutated1(nn.Module):
    """One step: x (B, C) and h (B, C) to the next h."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.update, self.reset = nn.Linear(width, width), nn.Linear(2 * width, width)
        self.candidate = nn.Linear(width, width)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        z = torch.sigmoid(self.update(x))
        r = torch.sigmoid(self.reset(torch.cat([x, h], dim=-1)))
        return torch.tanh(self.candidate(r * h) + torch.tanh(x)) * z + h * (1 - z)


class Mutated2(nn.Module):
    """As `Mutated1`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.update, self.reset = nn.Linear(2 * width, width), nn.Linear(width, width)
        self.candidate, self.input = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        z = torch.sigmoid(self.update(torch.cat([x, h], dim=-1)))
        r = torch.sigmoid(x + self.reset(h))
        return torch.tanh(self.candidate(r * h) + self.input(x)) * z + h * (1 - z)


class Mutated3(nn.Module):
    """As `Mutated1`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.update, self.reset = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.candidate, self.input = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        z = torch.sigmoid(self.update(torch.cat([x, torch.tanh(h)], dim=-1)))
        r = torch.sigmoid(self.reset(torch.cat([x, h], dim=-1)))
        return torch.tanh(self.candidate(r * h) + self.input(x)) * z + h * (1 - z)


class Recurrence(nn.Module):
    """A cell over x (B, T, C): all its states (B, T, C)."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        def step(h: Tensor, x_t: Tensor) -> tuple[Tensor, Tensor]:
            h = self.cell(x_t, h)
            return h, h.clone()

        states: Tensor = scan(step, torch.zeros_like(x[:, 0]), x.transpose(0, 1))[1]
        return states.transpose(0, 1)


Built = tuple[Recurrence, tuple[Tensor], tuple[dict[int, Dim]]]


def build(cell: type[nn.Module] = Mutated1) -> Built:
    torch.manual_seed(0)
    shapes = {0: Dim("batch", max=1024), 1: Dim("seq", min=2, max=4096)}
    return Recurrence(cell(32)).eval(), (torch.randn(3, 12, 32),), (shapes,)


def build_mut2() -> Built:
    return build(Mutated2)


def build_mut3() -> Built:
    return build(Mutated3)


if __name__ == "__main__":
    for cell in (Mutated1, Mutated2, Mutated3):
        module, args, _ = build(cell)
        print(cell.__name__, tuple(module(*args).shape))
