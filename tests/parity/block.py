"""An attention with a mask, which the tests of checks and of sessions compile."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, HEADS = 16, 2


class Block(nn.Module):
    """Attention over x (B, S, 16) where `mask` (B, S) is true, then a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.projections(3 * x).chunk(3, -1)
        )
        scores = query @ key.transpose(-1, -2) * 0.5
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
        context = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return torch.tanh(self.out(context))


def build() -> tuple[Block, tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    module = Block().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5, generator=random)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[0, :3], mask[1, 5] = False, False
    return module, (torch.randn(3, 7, WIDTH, generator=random), mask)


def tensor_of(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The only output."""
    assert isinstance(output, Tensor)
    return output
