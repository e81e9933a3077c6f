"""Time mixing as RWKV does it (Peng et al., 2023, arXiv:2305.13048): attention as a recurrence.

    aₜᵢ = e^{−(t−1−i)w + kᵢ} for i < t,  e^{u + kₜ} for i = t
    wkvₜ = Σᵢ aₜᵢ vᵢ / Σᵢ aₜᵢ
    yₜ = W_o (σ(rₜ) ⊙ wkvₜ)

The sums are carried from step to step, with the largest exponent taken out so that none overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim

WIDTH = 48

State = tuple[Tensor, Tensor, Tensor]


class TimeMix(nn.Module):
    """(B, T, C) to (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.receptance = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)
        )
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix = nn.Parameter(torch.rand(3, WIDTH))
        self.decay, self.first = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        key, value, receptance = (
            part(x * mix + before * (1 - mix))
            for part, mix in zip((self.key, self.value, self.receptance), self.mix, strict=True)
        )
        zeros = torch.zeros_like(x[:, 0])
        start = (zeros, zeros.clone(), zeros - 1e38)
        steps = key.transpose(0, 1), value.transpose(0, 1)
        mixed = scan(self._step, start, steps)[1].transpose(0, 1)
        result: Tensor = self.out(torch.sigmoid(receptance) * mixed)
        return result

    def _step(self, state: State, new: tuple[Tensor, Tensor]) -> tuple[State, Tensor]:
        above, below, largest = state
        key, value = new
        bonus = self.first + key
        top = torch.maximum(largest, bonus)
        old, now = torch.exp(largest - top), torch.exp(bonus - top)
        mixed = (old * above + now * value) / (old * below + now)
        faded = largest - torch.exp(self.decay)
        top = torch.maximum(faded, key)
        old, now = torch.exp(faded - top), torch.exp(key - top)
        return (old * above + now * value, old * below + now, top), mixed


def build() -> tuple[TimeMix, tuple[Tensor], tuple[dict[int, Dim]]]:
    torch.manual_seed(0)
    shapes = ({0: Dim("batch", max=1024), 1: Dim("seq", min=3, max=4096)},)
    return TimeMix().eval(), (torch.randn(3, 12, WIDTH),), shapes


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
