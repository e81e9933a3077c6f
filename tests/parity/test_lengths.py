"""Masks that are made as long as the longest row, which the tensors have to be as long as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph

pytestmark = pytest.mark.wide

LONGEST: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda lengths: lengths.max(),
    "item": lambda lengths: lengths.max().item(),
    "int": lambda lengths: int(lengths.max()),
}


class Attends(nn.Module):
    def __init__(self, longest: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.longest = longest

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        hidden = torch.arange(self.longest(lengths)) >= lengths[:, None]
        scores = self.query(x) @ self.key(x).mT / 4
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        return weights @ self.value(x)  # type: ignore[no-any-return]


def drawn(batch: int, seq: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seq)
    lengths = torch.randint(1, seq + 1, (batch,), generator=random)
    lengths[-1] = seq
    return torch.randn(batch, seq, 16, generator=random), lengths


@pytest.mark.parametrize("way", LONGEST)
def test_a_mask_as_long_as_the_longest_row(way: str) -> None:
    torch.manual_seed(0)
    module = Attends(LONGEST[way]).eval()
    batch = Dim("batch")
    optimized = attngraph.optimize(
        module, drawn(2, 7), dynamic_shapes=({0: batch, 1: Dim("seq")}, {0: batch})
    )
    notes = optimized.report.notes
    assert any("where the largest of lengths is seq, as in the sample" in note for note in notes)
    assert any(" = x.shape[1] (u0: the number read at " in note for note in notes)
    assert [site.status for site in optimized.report.sites] == ["fused"]
    with torch.no_grad():
        for sizes in ((1, 1), (3, 9), (5, 40), (1, 6)):
            inputs = drawn(*sizes)
            torch.testing.assert_close(optimized(*inputs), module(*inputs))
