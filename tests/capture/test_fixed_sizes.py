"""Functions of torch whose C++ would make constants of sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.rewording.scaled_images import stretched

WEIGHT = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


WEIGHTS = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))


class Computes(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(8, 8), code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.linear(x))


def _place(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True).argsort(1)


CODE: dict[str, Callable[[Tensor], Tensor]] = {
    "a pooled sequence": lambda x: F.max_pool1d(x.mT, 3, 2, 1).mT.softmax(1),
    "a pooling module": lambda x: nn.MaxPool1d(3, stride=1, padding=1)(x.mT),
    "pooled by pairs": lambda x: F.max_pool1d(x.mT, (2,), stride=[1], padding=1),
    "pooled with gaps": lambda x: torch.max_pool1d(x.mT, 3, 1, 1, 1),
    "pooled without a batch": lambda x: F.max_pool1d(x[0].mT, kernel_size=3, padding=1),
    "rows in another order": lambda x: torch.take_along_dim(x, _place(x), 1),
    "rows of one element": lambda x: x[:1].take_along_dim(_place(x), dim=-2),
    "places of all": lambda x: x.take_along_dim(_place(x)),
    "a map of pixels": lambda x: F.affine_grid(
        x[:, 0, :6].reshape(-1, 2, 3), [x.shape[0], 1, x.shape[1], 5], align_corners=False
    ),
    "a map of corners": lambda x: F.affine_grid(
        x[:, 0, :6].reshape(-1, 2, 3), [x.shape[0], 1, 5, x.shape[1] + 1], True
    ),
    "a product of all pairs": lambda x: torch.kron(x[0], WEIGHT),
    "a product of fewer axes": lambda x: torch.kron(x[0, :, 0], WEIGHT),
    "linears of several models": lambda x: torch.vmap(partial(F.linear, x))(WEIGHTS, WEIGHTS[:, 0]),
    "a linear for each": lambda x: torch.vmap(F.linear)(
        x.expand(2, *x.shape), WEIGHTS, WEIGHTS[:, 0]
    ),
    "norms of several models": lambda x: torch.vmap(
        lambda w: F.layer_norm(x @ w, (8,), w[0], w[1], 1e-3) + F.layer_norm(x @ w, [8])
    )(WEIGHTS),
    "tables of several models": lambda x: torch.vmap(
        lambda w: F.embedding((x[..., 0] > 0).long(), w, padding_idx=0)
    )(WEIGHTS),
    "attentions of several models": lambda x: torch.vmap(
        lambda w: (
            F.scaled_dot_product_attention(x @ w, x, x, is_causal=True, scale=-0.3)
            + F.scaled_dot_product_attention(x, x @ w, x, x[..., :1].mT > x[..., 1:2])
            + F.scaled_dot_product_attention(x, x, x @ w, x[..., :1].mT)
        )
    )(WEIGHTS),
    "a window": lambda x: x * torch.hann_window(x.shape[1])[:, None],
    "a symmetric window": lambda x: x * torch.hamming_window(x.shape[1], False)[:, None],
    "a window of three terms": lambda x: x * torch.blackman_window(x.shape[1] + 1)[1:, None],
}


@pytest.mark.parametrize("code", CODE.values(), ids=CODE)
def test_the_file_holds_at_other_sizes(code: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Computes(code).eval().requires_grad_(False)
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=500)}
    found = attngraph.optimize(model, (torch.randn(2, 9, 8),), dynamic_shapes=(dims,))
    for batch, length in ((1, 1), (3, 2), (1, 3), (2, 10), (1, 257)):
        x = torch.randn(batch, length, 8)
        torch.testing.assert_close(found(x), model(x), rtol=1e-5, atol=2e-6)


def test_places_that_do_not_spread_tie_their_dims() -> None:
    """Rows of two inputs: either has one row, or both as many, and the sample has as many."""

    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.take_along_dim(x, _place(y), 1).softmax(-1)

    dims = tuple({0: torch.export.Dim(name)} for name in ("batch", "other"))
    with pytest.raises(CaptureError, match="batch"):
        attngraph.optimize(Two(), (torch.randn(3, 5, 8), torch.randn(3, 5, 8)), dynamic_shapes=dims)


MODES = {"linear": (5,), "bilinear": (3, 5), "trilinear": (3, 1, 5), "bicubic": (3, 5)}
IMAGE = torch.randn(2, 3, 3, 1, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mode", MODES)
def test_the_formula_of_images_that_factors_stretch(mode: str) -> None:
    """Shorter, longer and as long as before, where a kernel may copy."""
    image = IMAGE.double().reshape(2, 3, -1)[..., : math.prod(MODES[mode])]
    image = image.reshape(2, 3, *MODES[mode])
    for factor in (0.7, 1.0, 1.03, 2.0, 2.9):
        factors = [factor if size > 1 else 1.3 for size in MODES[mode]]
        sizes = [math.floor(n * by) for n, by in zip(MODES[mode], factors, strict=True)]
        expected = F.interpolate(image, scale_factor=tuple(factors), mode=mode)
        torch.testing.assert_close(stretched(image, sizes, factors, mode), expected)


def _by_factors(x: Tensor, mode: str) -> Tensor:
    factors = (x.shape[1] + 0.1) / 3, (x.shape[1] + 2.1) / 4
    return F.interpolate(WEIGHT[None, None], scale_factor=factors, mode=mode) + x[0, 0, 0]


@pytest.mark.parametrize(
    "code",
    [
        lambda x: _by_factors(x, "bilinear"),
        lambda x: _by_factors(x, "bicubic"),
        lambda x: (
            F.interpolate(WEIGHT[None], None, (x.shape[1] + 0.1) / 4, "linear", True) + x.sum()
        ),
    ],
    ids=["bilinear", "bicubic", "between corners"],
)
def test_images_that_sizes_stretch(code: Callable[[Tensor], Tensor]) -> None:
    model = Computes(code).eval()
    shapes = ({1: torch.export.Dim("length", max=500)},)
    compiled = attngraph.optimize(model, (torch.randn(2, 9, 8),), dynamic_shapes=shapes)
    for length in (1, 2, 3, 4, 10, 257):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_factor_that_is_a_number_stays_torchs() -> None:
    model = Computes(lambda x: F.interpolate(x.mT, scale_factor=1.5, mode="linear")).eval()
    shapes = ({1: torch.export.Dim("length", max=500)},)
    graph = attngraph.capture(model, (torch.randn(2, 9, 8),), dynamic_shapes=shapes)
    assert any(node.op.startswith("aten.upsample_linear1d") for node in graph)


def test_antialiasing_by_factors_has_no_formula() -> None:
    def smoothed(x: Tensor) -> Tensor:
        factors = (x.shape[1] + 0.1) / 3, 1.0
        return F.interpolate(WEIGHT[None, None], None, factors, "bicubic", antialias=True) + x.sum()

    model = Computes(smoothed).eval()
    shapes = ({1: torch.export.Dim.AUTO},)
    compiled = attngraph.optimize(model, (torch.randn(2, 9, 8),), dynamic_shapes=shapes)
    with pytest.raises(UsageError, match="compiled for sizes"):
        compiled(torch.randn(2, 10, 8))
