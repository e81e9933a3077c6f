"""Ratios of a size that the steps of a loop read: numbers of Python, whose type they keep."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError


class Model(nn.Module):
    def __init__(self, code: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.code(x)


def _check(code: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    torch.manual_seed(0)
    model = Model(code).eval()
    found = attngraph.optimize(
        model, (torch.randn(2, 6, 4),), dynamic_shapes=({1: Dim("length", max=1000)},)
    )
    for length in (1, 2, 5, 6, 7, 300):
        x = torch.randn(2, length, 4)
        for own, expected in zip(found(x), model(x), strict=True):
            assert own.dtype == expected.dtype
            digits = torch.finfo(own.dtype).eps * 64
            torch.testing.assert_close(own, expected, rtol=digits, atol=digits)


def _of_several_types(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of doubles a ratio has all digits, of whole numbers the product is a float32."""
    length = x.shape[1]
    root, ratio = 1 / math.sqrt(length), 1 - 1 / (length + 1)
    whole, state = (4 * x).long(), torch.zeros_like(x[:, 0], dtype=torch.float64)
    counts, states = [], []
    for t in range(length):
        counts.append(whole[:, t] * ratio)
        state = torch.tanh(state * ratio + x[:, t].double()).clamp(-ratio, 2 * root)
        states.append(state)
    return torch.stack(counts, 1), torch.stack(states, 1)


def test_ratios_of_a_size_in_steps() -> None:
    _check(_of_several_types)


def _asked(x: Tensor) -> tuple[Tensor, Tensor]:
    """A step asks for the ratio, which no trace of the step knows."""
    ratio, state, states = 1 / x.shape[1], torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        new = torch.tanh(state + x[:, t])
        state = new * ratio if ratio < 0.2 else new
        states.append(state)
    return state, torch.stack(states, 1)


def test_a_ratio_that_a_step_asks_for_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"fixes it to 6 at .*for t in range"):
        _check(_asked)
