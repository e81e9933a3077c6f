"""Numbers that a model computes from sizes, where torch would make constants of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.errors import CaptureError

HALF = torch.tensor(0.5)


class Computes(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(8, 8), code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.linear(x))


CODE: dict[str, Callable[[Tensor], Tensor]] = {
    "coordinates": lambda x: x * torch.linspace(-1, 1, x.shape[1])[:, None],
    "coordinates by name": lambda x: (
        x + torch.linspace(start=0, end=1, steps=x.shape[1] + 2, dtype=x.dtype)[1:-1, None]
    ),
    "centres of pixels": lambda x: (
        x + torch.linspace(0.5, x.shape[1] - 0.5, x.shape[1])[:, None] / x.shape[1]
    ),
    "a few of many places": lambda x: x + torch.linspace(0, x.shape[1] - 1, 5).sum(),
    "between tensors": lambda x: x + torch.linspace(HALF, 2 * HALF, x.shape[1])[:, None],
    "a logarithmic scale": lambda x: x + torch.logspace(0, 1, x.shape[1], base=2.0)[:, None],
    "a power of a ratio": lambda x: x * (8 / max(x.shape[1], 8)) ** HALF,
    "a power of a size": lambda x: x * x.shape[1] ** (torch.arange(8.0) / 8),
    "a function of a ratio": lambda x: x * torch.pow(x.shape[1] / 8, torch.arange(8) / 8),
    "a list of sizes": lambda x: x * torch.tensor([x.shape[1], x.shape[0]]).sum(),
    "a list of ratios": lambda x: x * torch.tensor([1.0 / x.shape[1], 3]).sum(),
    "rows of ratios": lambda x: x * x.new_tensor([[x.shape[1] / 2, 3], [1, 2]]).sum(),
    "a ratio": lambda x: x * torch.as_tensor(x.shape[1] / 3),
    "a logarithm of a base": lambda x: x * math.log(x.shape[1] + 1, 16),
    "a logarithm whose base is a size": lambda x: x * math.log(3, x.shape[1] + 1),
    "a power in Python": lambda x: x * math.pow(x.shape[1], -0.5),
}


@pytest.mark.parametrize("code", CODE.values(), ids=CODE)
def test_the_file_holds_at_other_sizes(code: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Computes(code).eval().requires_grad_(False)
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=500)}
    found = attngraph.optimize(model, (torch.randn(2, 9, 8),), dynamic_shapes=(dims,))
    for batch, length in ((1, 1), (3, 2), (1, 3), (2, 10), (1, 257)):
        x = torch.randn(batch, length, 8)
        expected = model(x)
        # A sum of 8 products and a bias has roundings of its largest term, whatever it comes to.
        largest = float(expected.abs().max())
        torch.testing.assert_close(found(x), expected, rtol=1e-5, atol=1e-6 * max(1.0, largest))


@pytest.mark.parametrize(
    "dtype", [torch.int64, pytest.param(torch.bfloat16, marks=pytest.mark.wide)]
)
def test_steps_that_are_rounded_stay_refused(dtype: torch.dtype) -> None:
    """torch rounds whole numbers and halves as it goes, which no formula of tensors does alike."""
    model = Computes(lambda x: x + torch.linspace(0, 10, x.shape[1], dtype=dtype)[:, None])
    dims = {1: torch.export.Dim("length")}
    with pytest.raises(CaptureError, match="can't be dynamic"):
        attngraph.optimize(model, (torch.randn(2, 9, 8),), dynamic_shapes=(dims,))
