"""Float64 in ops whose kernels onnxruntime has for float32 alone: as exact as torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.export.lowering.fallback.double_formulas import erfc_series
from tests.export.lowered import agrees

EPS = torch.finfo(torch.float64).eps


def doubles(*shape: int) -> Tensor:
    made = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=made, dtype=torch.float64)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(F, name)
        for name in [
            "softplus",
            "elu",
            "selu",
            "celu",
            "leaky_relu",
            "hardsigmoid",
            "hardswish",
            "mish",
            "gelu",
        ]
    },
    **{
        name: getattr(torch, name)
        for name in ["erf", "erfc", "tan", "atan", "sinh", "cosh", "asinh"]
    },
    "log_sigmoid": F.logsigmoid,
    "steep softplus": lambda x: F.softplus(x, 3.0, 5.0),
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3], dtype=torch.float64)),
}


class Made(nn.Module):
    def __init__(self, of: Callable[..., Any]) -> None:
        super().__init__()
        self.of = of

    def forward(self, *given: Tensor) -> Any:
        return self.of(*given)


def _near(of: Callable[[Tensor], Tensor], x: Tensor, roundings: float = 16.0) -> None:
    """To so many roundings of the result, or of 1 where it is a difference from 1."""
    found = torch.as_tensor(attngraph.optimize(Made(of), (x,), verify="off")(x))
    wanted = of(x)
    assert found.dtype == torch.float64
    least = roundings * EPS
    torch.testing.assert_close(found, wanted, rtol=least, atol=least, equal_nan=True)


@pytest.mark.parametrize("of", UNARY.values(), ids=list(UNARY))
def test_functions_are_exact(of: Callable[[Tensor], Tensor]) -> None:
    x = torch.cat(
        [
            torch.linspace(-6, 6, 4001, dtype=torch.float64),
            torch.logspace(-300, 0, 301, dtype=torch.float64),
            torch.tensor([0.0, -0.0, math.nan, 20.0, -20.0, 30.0, -40.0], dtype=torch.float64),
        ]
    )
    if of is torch.tan:  # a rounding of its cosine is many of its own near the poles
        x = x[x.abs() < 1.3]
    _near(of, x)


@pytest.mark.parametrize("name", ["asin", "acos", "atanh", "acosh", "atan2"])
def test_inverses_are_exact(name: str) -> None:
    x = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    x = {"acosh": x + 2, "atan2": x * 50, "atanh": x * 0.9}.get(name, x)
    of = getattr(torch, name)
    _near((lambda x: of(x, x.flip(0) + 0.3)) if name == "atan2" else of, x)


@pytest.mark.parametrize(
    "name",
    ["softplus", "elu", "gelu", "leaky_relu", "erf", "atan", "sinh", "cosh", "asinh", "mish"],
)
def test_functions_of_what_is_huge(name: str) -> None:
    x = torch.tensor([math.inf, -math.inf, 1e300, -1e300, 800.0, -800.0], dtype=torch.float64)
    of = getattr(F, name, None) or getattr(torch, name)
    found = torch.as_tensor(attngraph.optimize(Made(of), (x.sign(),), verify="off")(x))
    torch.testing.assert_close(found, of(x), rtol=16 * EPS, atol=0, equal_nan=True)


def test_the_series_of_erfc_has_ended() -> None:
    series = erfc_series()
    assert abs(series[-1]) < 1e-18 < abs(series[20])


def test_small_results_keep_their_digits() -> None:
    """erfc of large numbers, and erf and gelu of small ones."""
    x = torch.linspace(0.01, 20, 500, dtype=torch.float64)
    small = torch.logspace(-200, -1, 200, dtype=torch.float64)
    for of, given in ((torch.erfc, x), (torch.erf, small), (F.gelu, small), (F.softplus, -x * 10)):
        found = torch.as_tensor(attngraph.optimize(Made(of), (given,), verify="off")(given))
        torch.testing.assert_close(found, of(given), rtol=2048 * EPS, atol=0)


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "steps": {"stride": 2, "padding": 1},
    "dilated": {"dilation": 2, "padding": 2},
    "grouped": {"groups": 2, "stride": 3},
    "same": {"padding": "same"},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    options = CONVOLUTIONS[name]
    inner = 4 // options.get("groups", 1)
    for axes, of in enumerate((F.conv1d, F.conv2d, F.conv3d), 1):
        x, w, b = doubles(2, 4, *(7, 8, 9)[:axes]), doubles(6, inner, *(3, 2, 3)[:axes]), doubles(6)
        agrees(lambda x, w, b, of=of: of(x, w, b, **options), (x, w, b))
        agrees(lambda x, w, of=of: of(x, w, None, **options), (x[0], w))
    runs = [(doubles(rows, 4, size, 8),) for rows, size in ((2, 7), (1, 8), (3, 9), (2, 30))]
    w = doubles(6, inner, 3, 2)
    sizes = ({0: Dim("batch"), 2: Dim("height", min=5, max=40)},)
    agrees(lambda x: F.conv2d(x, w.clone(), **options), *runs, shapes=sizes)


def test_patches_and_pools() -> None:
    w = doubles(6, 3, 4, 4)
    agrees(lambda x: F.conv2d(x, w.clone(), stride=4), (doubles(2, 3, 12, 8),))
    agrees(lambda x: F.avg_pool1d(x, 3, 2, 1), (doubles(2, 3, 9),))
    agrees(lambda x: F.avg_pool2d(x, (3, 2)), (doubles(2, 3, 9, 8),))
    agrees(lambda x: F.avg_pool2d(x, 2, 1, 1, divisor_override=3), (doubles(2, 3, 9, 8),))


def test_norms() -> None:
    x, w, b = doubles(2, 6, 5, 4), doubles(6), doubles(6)
    agrees(lambda x, w, b: F.group_norm(x, 3, w, b, 1e-3), (x, w, b))
    agrees(lambda x: F.group_norm(x, 2), (x,), (x[:1] * 0.5 + 1,), shapes=({0: Dim("batch")},))
    agrees(lambda x, w, b: F.instance_norm(x, None, None, w, b), (x, w, b))


class Tokens(nn.Module):
    """A convolution into patches, and an encoder with GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.patches(x).flatten(2).mT)
        return found


def test_a_model_of_float64_is_compiled() -> None:
    torch.manual_seed(0)
    model = Tokens().double().eval()
    optimized = attngraph.optimize(
        model, (doubles(2, 3, 8, 8),), dynamic_shapes=({0: Dim("batch")},)
    )
    x = doubles(3, 3, 8, 8)
    wanted = model(x).detach()  # not by the fast path of no_grad, whose GELU is less exact
    found = torch.as_tensor(optimized(x))
    assert found.dtype == torch.float64
    # LayerNormalization has its ε as a float32, which is off by 2.5e-8 of it.
    assert float((found - wanted).abs().max()) < 1e-11 * float(wanted.abs().max())


@pytest.mark.parametrize("rows", [None, Dim("rows")])
def test_factors_beside_products_keep_their_digits(rows: Any) -> None:
    """onnxruntime makes one number beside a product an attribute, which is a float32."""
    x, w = doubles(3, 4, 8), doubles(8, 8)

    def of(x: Tensor) -> tuple[Tensor, ...]:
        own = w.clone()
        return (
            x @ own * 0.1,
            (x * 0.1) @ own,
            x @ own / 3,
            F.scaled_dot_product_attention(x, x, x),
        )

    agrees(of, (x,), shapes=None if rows is None else ({0: rows},))
