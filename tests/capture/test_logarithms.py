"""A logarithm of a size that is rounded is a size: how many keys are chosen, or turns are taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph import optimize
from attngraph.errors import CaptureError

Count = Callable[[int], Any]

COUNTS: dict[str, Count] = {
    "int": lambda n: int(2 * math.log(n)),
    "numpy's": lambda n: int(np.ceil(np.log(n))),
    "numpy's item": lambda n: 2 * np.ceil(np.log(n)).astype("int").item(),
    "exact powers": lambda n: math.ceil(math.log2(n)) + 1,
    "of a base": lambda n: math.floor(math.log(n, 3)) + 1,
    "rounded": lambda n: round(1.5 * math.log(n)),
    "of a sum": lambda n: int(math.log10(3 * n + 1) / 0.5 - 0.25),
    "rounded twice": lambda n: int(1.5 * np.floor(np.log2(n)) + 0.5),
}


class Chosen(nn.Module):
    """Attention to as many of the largest scores as the length says."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.project = nn.Linear(8, 16)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.project(x).chunk(2, -1)
        scores = 4 * query @ key.mT
        least = scores.topk(self.count(x.shape[1])).values[..., -1:]
        return scores.masked_fill(scores < least, -torch.inf).softmax(-1) @ x


class Rolled(nn.Module):
    """Autoformer's aggregation (Wu et al. 2021): rolled values, as many as the length says."""

    def forward(self, x: Tensor) -> Tensor:
        length, steps = x.shape[1], torch.arange(x.shape[1])
        number = int(1.5 * math.log(length))
        weights, delays = x.mean(-1).topk(number, dim=-1)
        weights = weights.softmax(-1)
        total = torch.zeros_like(x)
        for i in range(number):
            places = (steps + delays[:, i, None]) % length
            total = total + weights[:, i, None, None] * x.gather(1, places[..., None].expand_as(x))
        return total


def assert_same(model: nn.Module, lengths: set[int], least: int) -> None:
    model = model.eval()
    shapes = ({0: Dim("batch", max=8), 1: Dim("length", min=least, max=70)},)
    optimized = optimize(model, (torch.randn(2, 24, 8),), dynamic_shapes=shapes)
    for length in sorted(lengths):
        x = torch.randn(3, length, 8)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)


def at_steps(count: Count, least: int) -> set[int]:
    """The sizes at which it grows, those before, and the ends."""
    grows = [n for n in range(least + 1, 71) if count(n) != count(n - 1)]
    assert len(grows) > 1
    return {least, 70, *grows, *(n - 1 for n in grows)}


@pytest.mark.parametrize("name", ["int", "numpy's item"])
def test_so_many_keys_are_chosen(name: str) -> None:
    count = COUNTS[name]
    assert_same(Chosen(count), at_steps(count, 8), 8)


@pytest.mark.wide
@pytest.mark.parametrize("name", COUNTS)
def test_in_any_spelling_from_the_first_size_that_has_so_many(name: str) -> None:
    count = COUNTS[name]
    least = next(n for n in range(1, 9) if all(0 < count(m) <= m for m in range(n, 71)))
    assert_same(Chosen(count), at_steps(count, least), least)


def test_so_many_turns_are_taken() -> None:
    assert_same(Rolled(), {4, 7, 8, 14, 15, 28, 29, 54, 55, 70}, 4)


@pytest.mark.wide
def test_a_length_below_which_there_are_fewer_is_named() -> None:
    """Informer's (Zhou et al. 2021): 2·⌈log n⌉ is less than n from 5 on."""

    def count(n: int) -> Any:
        number = 2 * np.ceil(np.log(n)).astype("int").item()
        return number if number < n else n

    assert_same(Chosen(count), {5, 6, 7, 8, 20, 21, 55, 70}, 5)
    shapes = ({1: Dim("length", min=2, max=70)},)
    with pytest.raises(CaptureError, match=r"length is at least 5 at .*test_logarithms\.py"):
        optimize(Chosen(count), (torch.randn(2, 24, 8),), dynamic_shapes=shapes)


@pytest.mark.wide
def test_as_a_number_it_stays_one() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            number = math.log(x.shape[1])
            scale = torch.tensor([number / 9, 2 * number - 1]) / torch.full((2,), 3 + number)
            return (
                (x @ x.mT * number / (number + 1)).softmax(-1)
                @ x
                * scale.sum().exp() ** (number / 9)
            )

    assert_same(Scaled(), {1, 2, 23, 70}, 1)


@pytest.mark.wide
def test_one_that_grows_at_most_sizes_is_no_size() -> None:
    model = Chosen(lambda n: min(n, int(40 * math.log(n))))
    shapes = ({1: Dim("length", min=8, max=4000)},)
    with pytest.raises(CaptureError, match="number"):
        optimize(model, (torch.randn(2, 24, 8),), dynamic_shapes=shapes)
