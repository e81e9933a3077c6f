"""Sides of squares, and quotients without a remainder, are sizes as any other."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.ir import format_graph

BATCH, SIDE = Dim("batch", min=1, max=16), Dim("side", min=1, max=16)
ROOTS: list[Callable[[int], int]] = [
    lambda count: int(math.sqrt(count)),
    lambda count: int(count**0.5),
    lambda count: int(np.sqrt(count)),
    lambda count: math.ceil(math.sqrt(count)),
]


class Pooled(nn.Module):
    """(B, 3, H, W) to (B, 3, …): the patches of an image are an image again, as T2T-ViT has it."""

    def __init__(self, root: Callable[[int], int]) -> None:
        super().__init__()
        self.root = root

    def forward(self, x: Tensor) -> Tensor:
        patches = nn.functional.unfold(x, 2, stride=2).transpose(1, 2)
        side = self.root(patches.shape[1])
        again = patches.transpose(1, 2).reshape(x.shape[0], -1, side, side)
        return nn.functional.avg_pool2d(again, 3, 1, 1)


@pytest.mark.parametrize("root", ROOTS, ids=map(str, range(len(ROOTS))))
def test_the_root_of_a_square_is_its_side(root: Callable[[int], int]) -> None:
    module = Pooled(root).eval()
    axes = {0: BATCH, 2: 2 * SIDE, 3: 2 * SIDE}
    optimized = attngraph.optimize(module, (torch.randn(2, 3, 8, 8),), dynamic_shapes=(axes,))
    for batch, side in ((1, 1), (1, 3), (3, 2), (2, 16)):
        x = torch.randn(batch, 3, 2 * side, 2 * side)
        torch.testing.assert_close(optimized(x), module(x))
    assert "sqrt" not in format_graph(optimized.graph)
    assert "**" not in format_graph(optimized.graph)


@pytest.mark.parametrize("shift", [1, -1])
def test_of_another_number_a_root_is_computed(shift: int) -> None:
    """4·s² + 1 and 4·s² − 1 are no squares, and 2·s² is one of a few s."""

    def near(x: Tensor) -> Tensor:
        return x.sum((2, 3)) * int(math.sqrt(x.shape[2] * x.shape[3] + shift))

    def half(x: Tensor) -> Tensor:
        return x.sum((2, 3)) * int(math.sqrt(x.shape[2] * x.shape[3] // 2))

    for function in (near, half):
        module = Calls(function)
        axes = {0: BATCH, 2: 2 * SIDE, 3: 2 * SIDE}
        optimized = attngraph.optimize(module, (torch.randn(2, 3, 8, 8),), dynamic_shapes=(axes,))
        for side in (2, 3, 4, 7, 16):
            x = torch.randn(1, 3, 2 * side, 2 * side).round()
            torch.testing.assert_close(optimized(x), module(x))


def test_two_sides_of_their_own_are_no_square() -> None:
    def counted(x: Tensor) -> Tensor:
        return x.sum((2, 3)) * int(math.sqrt(x.shape[2] * x.shape[3]))

    module = Calls(counted)
    axes = {0: BATCH, 2: Dim("height", min=1, max=16), 3: Dim("width", min=1, max=16)}
    optimized = attngraph.optimize(module, (torch.randn(2, 3, 4, 4),), dynamic_shapes=(axes,))
    for height, width in ((2, 3), (16, 4), (1, 1), (5, 5)):
        x = torch.randn(1, 3, height, width).round()
        torch.testing.assert_close(optimized(x), module(x))


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class TalkingHeads(nn.Module):
    """(B, 2, 2·H, 2·W) to (B, H · W, 8), as in CaiT; einsum computes h²·w² // (h·w)."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        patches = nn.functional.pixel_unshuffle(x, 2).flatten(2).transpose(1, 2)
        heads = patches.unflatten(-1, (2, 4)).transpose(1, 2)
        scores = torch.einsum("bhid,bhjd->bhij", heads, heads)
        scores = torch.einsum("bhij,hg->bgij", scores, self.mixed)
        weights = torch.einsum("bhij,hg->bgij", scores.softmax(-1), self.mixed)
        return torch.einsum("bhij,bhjd->bhid", weights, heads).transpose(1, 2).flatten(2)


def test_a_quotient_without_a_remainder_excludes_no_size() -> None:
    torch.manual_seed(0)
    module = TalkingHeads().eval()
    height, width = (Dim(name, min=1, max=16) for name in ("height", "width"))
    axes = {0: BATCH, 2: 2 * height, 3: 2 * width}
    optimized = attngraph.optimize(module, (torch.randn(2, 2, 6, 8),), dynamic_shapes=(axes,))
    assert "//" not in str(optimized.graph.conditions)
    for batch, tall, wide in ((1, 1, 1), (3, 1, 1), (1, 1, 5), (2, 4, 3)):
        x = torch.randn(batch, 2, 2 * tall, 2 * wide)
        torch.testing.assert_close(optimized(x), module(x))


class EdgesOfPaths(nn.Module):
    """(B, N) atoms and (B, N, N, 3, 4) edges of each pair's path, as Graphormer weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = nn.Parameter(torch.randn(5, 4, 4))

    def forward(self, atoms: Tensor, edges: Tensor) -> Tensor:
        (batch, nodes), steps = atoms.shape, edges.shape[3]
        rows = edges.permute(3, 0, 1, 2, 4).reshape(steps, -1, 4)
        weighed = torch.bmm(rows, self.distances[:steps])
        weighed = weighed.reshape(steps, batch, nodes, nodes, 4).permute(1, 2, 3, 0, 4).sum(-2)
        return weighed.permute(0, 3, 1, 2) + atoms[:, None, None]


def test_what_two_axes_of_one_name_always_are_is_no_condition() -> None:
    """torch has b·n·m // (b·n) ≠ 0, of which n·n // n ≠ 0 became: "'nodes' can't be 1"."""
    torch.manual_seed(0)
    module, nodes = EdgesOfPaths().eval(), Dim("nodes", min=1, max=64)
    axes = {0: BATCH, 1: nodes}, {0: BATCH, 1: nodes, 2: nodes}
    sample = torch.randn(2, 5), torch.randn(2, 5, 5, 3, 4)
    optimized = attngraph.optimize(module, sample, dynamic_shapes=axes)
    assert "//" not in str(optimized.graph.conditions)
    for batch, count in ((1, 1), (3, 1), (2, 7)):
        inputs = torch.randn(batch, count), torch.randn(batch, count, count, 3, 4)
        torch.testing.assert_close(optimized(*inputs), module(*inputs))
