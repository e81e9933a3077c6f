"""Attention block by block: loops over blocks of keys in loops over blocks of queries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph

pytestmark = pytest.mark.wide

SIZE = 4


class Attends(nn.Module):
    def __init__(self, code: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(2, (2, 4)).transpose(1, 2)
        return self.code(q, q.cos(), q.flip(2)).transpose(1, 2).flatten(2)


def _one_size(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Online softmax (Milakov and Gimelshein): a running maximum and sum."""
    found = torch.zeros_like(q)
    for start in range(0, q.shape[2], SIZE):
        query = q[:, :, start : start + SIZE]
        given, total = torch.zeros_like(query), torch.zeros_like(query[..., :1])
        most = torch.full_like(total, -torch.inf)
        for at in range(0, k.shape[2], SIZE):
            scores = query @ k[:, :, at : at + SIZE].mT
            larger = torch.maximum(most, scores.amax(-1, keepdim=True))
            weights, before = (scores - larger).exp(), (most - larger).exp()
            total = total * before + weights.sum(-1, keepdim=True)
            given = given * before + weights @ v[:, :, at : at + SIZE]
            most = larger
        found[:, :, start : start + SIZE] = given / total
    return found


@pytest.mark.parametrize("code", [_one_size], ids=lambda code: code.__name__)
def test_blocks_of_queries_go_through_blocks_of_keys(
    code: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model = Attends(code).eval()
    dims = {0: Dim("batch", max=8), 1: Dim("length", max=64)}
    found = attngraph.optimize(model, (torch.randn(2, 11, 8),), dynamic_shapes=(dims,))
    for batch, length in ((1, 1), (2, 4), (3, 5), (2, 8), (2, 9), (2, 12), (1, 31), (2, 64)):
        x = torch.randn(batch, length, 8)
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)
