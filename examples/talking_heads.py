"""An image encoder in the manner of CaiT (arXiv:2103.17239): talking heads, then class attention.

    A = softmax(M Q Kᵀ / √d),    patches ← N A V,    class ← softmax(q Kᵀ / √d) V

M and N mix the heads before and after the softmax (arXiv:2003.02436). No attention kernel does
that, so `attngraph explain` declines the patches' attention with a reason; the class token's fuses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim


class TalkingHeads(nn.Module):
    """(B, S, C) to (B, S, C)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.packed = nn.Linear(width, 3 * width)
        self.before = nn.Linear(heads, heads)
        self.after = nn.Linear(heads, heads)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        packed = self.packed(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = packed.unbind(0)
        scores = (query * self.scale) @ key.transpose(-2, -1)
        scores = self.before(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = scores.softmax(dim=-1)
        weights = self.after(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        context = (weights @ value).transpose(1, 2).reshape(batch, length, width)
        projected: Tensor = self.out(context)
        return projected


class ClassAttention(nn.Module):
    """A class token (B, 1, C) over patches (B, S, C) to (B, 1, C)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, token: Tensor, patches: Tensor) -> Tensor:
        batch, length, width = patches.shape
        query = self.query(token).view(batch, 1, self.heads, -1).transpose(1, 2)
        key = self.key(patches).view(batch, length, self.heads, -1).transpose(1, 2)
        value = self.value(patches).view(batch, length, self.heads, -1).transpose(1, 2)
        weights = ((query * self.scale) @ key.transpose(-2, -1)).softmax(dim=-1)
        projected: Tensor = self.out((weights @ value).transpose(1, 2).reshape(batch, 1, width))
        return projected


class Encoder(nn.Module):
    """Patches (B, S, C) to their class token (B, C)."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.patches = TalkingHeads(width, heads)
        self.summary = ClassAttention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patches(self.norms[0](x))
        token = self.token.expand(x.shape[0], -1, -1)
        result: Tensor = (token + self.summary(token, self.norms[1](x))).squeeze(1)
        return result


def build() -> tuple[Encoder, tuple[Tensor], tuple[dict[int, Dim]]]:
    torch.manual_seed(0)
    module = Encoder().eval()
    return (
        module,
        (torch.randn(3, 12, 64),),
        ({0: Dim("batch", max=1024), 1: Dim("seq", max=4096)},),
    )


if __name__ == "__main__":
    module, args, _ = build()
    print(tuple(module(*args).shape))
