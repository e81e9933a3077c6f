"""Pools, convolutions and norms in forms that their operators lack; what is refused says why."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

from attngraph.errors import LoweringError
from attngraph.export.lowering.lower import lower
from attngraph.frontend.capture import capture
from tests.export.lowered import agrees, module

pytestmark = pytest.mark.wide


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


POOLS: dict[str, dict[str, Any]] = {
    "small-steps": {"kernel_size": 3, "stride": 2, "padding": 1},
    "large-steps": {"kernel_size": 2, "stride": 3, "padding": 1, "count_include_pad": False},
    "no-steps": {"kernel_size": 4, "padding": 2},
}


@pytest.mark.parametrize("divisor", [5, 1])
@pytest.mark.parametrize("name", POOLS)
def test_pools_over_a_divisor_that_reach_beyond_the_end(name: str, divisor: int) -> None:
    options = POOLS[name] | {"ceil_mode": True, "divisor_override": divisor}
    agrees(lambda x: F.avg_pool2d(x, **options), (floats(2, 3, 7, 9),))
    agrees(lambda x: F.avg_pool3d(x, **options), (floats(2, 7, 9, 6),))
    agrees(lambda x: F.avg_pool3d(x, **options), (floats(1, 2, 7, 9, 6),))
    runs = [(floats(1, 2, size, 9),) for size in (7, 8, 9, 10, 23)]
    sizes = ({2: Dim("height", min=4, max=40)},)
    agrees(lambda x: F.avg_pool2d(x, **options), *runs, shapes=sizes)


def test_transposed_convolutions_that_are_padded_and_dilated() -> None:
    agrees(
        lambda x, w, b: F.conv_transpose2d(x, w, b, (3, 2), (1, 2), (2, 3), 2, (4, 4)),
        (floats(2, 2, 4, 4), floats(2, 2, 4, 5), floats(4)),
    )
    agrees(
        lambda x, w: F.conv_transpose1d(x, w, None, 2, 0, 1, 1, 2),
        (floats(2, 2, 4), floats(2, 3, 3)),
        (floats(5, 2, 4) * 2, floats(2, 3, 3)),
        shapes=({0: Dim("batch", max=9)}, None),
    )
    agrees(
        lambda x, w, b: F.conv_transpose3d(x, w, b, 3, 1, (2, 0, 1), 1, 3),
        (floats(2, 3, 4, 2), floats(2, 3, 2, 2, 3), floats(3)),
    )


def test_a_transposed_convolution_of_any_batch() -> None:
    """torch computes it in another way for few rows, and then says so of the trace."""
    sizes = {0: Dim("batch", max=64), 2: Dim("length", max=99)}
    for options in ((), (1, 0, 0, 2), (2, 1, 1), (1, 2, 0, 1, 3)):
        agrees(
            lambda x, w, b, options=options: F.conv_transpose1d(x, w, b, *options),
            *(
                (floats(n, 4, t), floats(4, 3, 4), floats(3 * (2 if 2 in options[3:4] else 1)))
                for n, t in ((2, 7), (20, 4), (1, 9))
            ),
            shapes=(sizes, None, None),
        )
    agrees(lambda x, w: F.conv_transpose2d(x, w, padding=1), (floats(3, 4, 5), floats(3, 2, 3, 3)))


@pytest.mark.parametrize("affine", [True, False])
def test_batches_are_normalised_with_their_own_statistics(affine: bool) -> None:
    def normalised(x: Tensor, w: Tensor, b: Tensor) -> Any:
        weights = (w, b) if affine else (None, None)
        native = torch.native_batch_norm(x, *weights, None, None, True, 0.1, 1e-5)
        running = (torch.zeros(2), torch.ones(2))
        legit = torch.ops.aten._native_batch_norm_legit(x, *weights, *running, True, 0.1, 0.5)
        return *native, *legit, F.batch_norm(x, None, None, *weights, training=True), w + b

    x = floats(3, 2, 4) * 3 + 1
    agrees(normalised, (x, floats(2), floats(2) - 1), (x.exp(), floats(2), floats(2)))
    agrees(normalised, (x[..., 0], floats(2), floats(2) - 1))


def test_running_statistics_are_not_dropped() -> None:
    model = module(lambda x, m: F.batch_norm(x, m, m + 1, training=True), 2)
    graph = capture(model, (floats(3, 2, 4), torch.ones(2))).graph
    with pytest.raises(LoweringError, match="it updates its running statistics, which no file"):
        lower(graph)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_volumes_are_sampled(mode: str, padding: str) -> None:
    def sampled(x: Tensor, grid: Tensor) -> Any:
        return [F.grid_sample(x, grid, mode, padding, aligned) for aligned in (False, True)]

    agrees(sampled, (floats(2, 3, 4, 5, 6), floats(2, 3, 2, 4, 3)))


def test_numbers_are_similar_by_their_signs() -> None:
    pairs = [(2.0, -3.0), (0.0, 1.0), (-1e-9, -4.0)]
    agrees(
        lambda x, y: F.cosine_similarity(x, y, 0),
        *(tuple(map(torch.tensor, pair)) for pair in pairs),
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_pixels_of_any_dtype_are_shuffled(dtype: torch.dtype) -> None:
    x = (floats(2, 12, 3, 5) * 3).to(dtype)
    sizes = ({2: Dim("height", max=9)},)
    agrees(lambda x: F.pixel_shuffle(x, 2), (x,), (x.repeat(1, 1, 3, 1),), shapes=sizes)
    agrees(lambda x: F.pixel_shuffle(x, 2), (x[0],))


def test_a_linear_of_integers_wraps_around() -> None:
    x = torch.tensor([[1 << 40, -3, 7], [5, 1 << 62, 1]])
    for given in (x, x[None], x[0]):
        agrees(lambda x, w, b: F.linear(x, w, b), (given, x.flip(0), x[:, 0]))


def test_empty_rows_are_joined() -> None:
    agrees(lambda x: (torch.cat([x, x]), x + 1), (floats(0),))


def test_a_form_that_is_missing_is_a_sentence() -> None:
    graph = capture(module(lambda x: F.avg_pool2d(x, 2), 1), (torch.ones(1, 4, 4).long(),)).graph
    with pytest.raises(LoweringError, match=r"no form of it takes i64\[1, 4, 4\] \("):
        lower(graph)
    graph = capture(module(lambda x: x.roll(1, 0), 1), (floats(0, 2),)).graph
    with pytest.raises(LoweringError, match=r"no form of it takes f32\[0, 2\]\. Register"):
        lower(graph)


def test_what_a_large_element_is_not_in_keeps_its_mean() -> None:
    x = floats(1, 2, 8, 8, 8)
    x[..., 7, 7, 7], x[..., 7, 7, 6] = 1e30, math.inf
    agrees(lambda x: F.adaptive_avg_pool3d(x, (5, 7, 4))[..., :4, :, :], (x,))
