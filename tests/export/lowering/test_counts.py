"""Counts by bin and by run, places in order, and reductions of bools and of single numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from tests.export.lowered import agrees

pytestmark = pytest.mark.wide

RUNS = torch.tensor([1.5, 1.5, -2.0, 0.0, -0.0, 0.0, 1.5, math.inf, math.inf])
EDGES = torch.tensor([-1.0, 0.0, 1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int32, torch.int64])
def test_runs_of_equal_elements(dtype: torch.dtype) -> None:
    x = RUNS.nan_to_num(posinf=5).to(dtype) if dtype != torch.float32 else RUNS
    function = functools.partial(torch.unique_consecutive, return_inverse=True, return_counts=True)
    agrees(function, (x,), (x.repeat(2),), (x[:1],), shapes=({0: Dim("length", max=99)},))
    agrees(function, (x[:8].reshape(2, 4),))
    agrees(function, (x[0],))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16])
def test_what_onnxruntime_finds_no_unique_elements_of(dtype: torch.dtype) -> None:
    function = functools.partial(torch.unique, return_inverse=True, return_counts=True)
    agrees(function, (RUNS.nan_to_num(posinf=5).to(dtype).reshape(3, 3),))


def test_bins_are_counted_and_weighed() -> None:
    x, weights = torch.tensor([0, 3, 3, 1]), torch.tensor([0.5, -1.0, 2.5, math.inf])
    length = Dim("length", max=9)
    agrees(
        lambda x, w: (torch.bincount(x), torch.bincount(x, w), torch.bincount(x, w.long(), 6)),
        (x, weights.nan_to_num(posinf=1)),
        (x.flip(0).repeat(2), weights.nan_to_num(posinf=2).repeat(2)),
        shapes=({0: length}, {0: length}),
    )
    agrees(lambda x, w: torch.bincount(x, w, minlength=2), (x, weights))


def test_bins_over_the_range_of_the_values() -> None:
    runs = [torch.linspace(-3, 4, 29), torch.full((4,), 2.5), torch.tensor([0.0, 1e30, -1e30])]
    agrees(lambda x: torch.histc(x, 7), *((x,) for x in runs), shapes=({0: Dim("n", max=40)},))


IN_ORDER: dict[str, Callable[[Tensor], Any]] = {
    "bucketize": lambda x: torch.bucketize(x, EDGES),
    "bucketize-right": lambda x: torch.bucketize(x, EDGES, right=True, out_int32=True),
    "searchsorted": lambda x: torch.searchsorted(EDGES, x),
    "median": lambda x: x.median(0),
    "nanmedian": lambda x: x.nanmedian(0, keepdim=True),
    "kthvalue": lambda x: x.kthvalue(1, 0),
    "mode": lambda x: x.mode(),
    "max": lambda x: (x.max(0), x.min(-1, keepdim=True)),
    "argmax": lambda x: (x.argmax(0), x.argmin(), x.argmax(-1, keepdim=True)),
    "amax": lambda x: (x.amax(0, keepdim=True), x.amin((), keepdim=True), x.amax()),
    "sum": lambda x: (x.sum(0, keepdim=True), x.nansum(0), x.cumsum(0), x.cumsum(-1).sum()),
    "prod": lambda x: (x.prod(), x.prod(0)),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", IN_ORDER)
def test_a_number_is_its_own_row(name: str, whole: bool) -> None:
    function = IN_ORDER[name]
    kind = torch.int64 if whole else torch.float32
    agrees(function, *((torch.tensor(x).to(kind),) for x in (0.5, -4.0, 1.0, 7.0)))


def test_deviations_of_a_number() -> None:
    number = torch.tensor(2.5)
    agrees(lambda x: (x.var(correction=0), x.std(0, correction=0), x.mean(0)), (number,))


def test_modes() -> None:
    x = torch.tensor([[2, 1, 1, 2, 3], [1 << 40, 5, 5, 1 << 40, -7], [4, 3, 2, 1, 0]])
    agrees(lambda x: (x.mode(), x.float().mode(0, keepdim=True), (x > 2).mode(1)), (x,), (-x,))


def test_kth_values_with_infinities_and_gaps() -> None:
    x = torch.tensor([[math.inf, 1.0, -math.inf, 2.0], [3.0, math.nan, 0.0, 1.0]])
    agrees(lambda x: [x.kthvalue(k) for k in (1, 2, 3, 4)], (x,))


BOOLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "maximum": lambda x, y: (torch.maximum(x, y), torch.max(x, y)),
    "minimum": lambda x, y: (torch.minimum(x, y), torch.min(x, y)),
    "clamp": lambda x, y: (torch.clamp_min(x, y), torch.clamp_max(x, y)),
    "extrema": lambda x, y: (x.max(1), x.min(0, keepdim=True), y.amax(0), y.amin()),
}


@pytest.mark.parametrize("name", BOOLS)
def test_extrema_of_bools(name: str) -> None:
    x = torch.tensor([[False, True, True], [False, False, False], [True, True, True]])
    agrees(BOOLS[name], (x, x.flip(0)), (x.mT, x))


def test_extrema_of_integers_over_all_axes_that_are_kept() -> None:
    x = torch.tensor([[1 << 33, -5], [7, -(1 << 40)]])
    agrees(lambda x: (x.amax((), keepdim=True), x.amin((0, 1), keepdim=True)), (x,))


def test_numbers_between_ends_that_a_run_tells() -> None:
    def between(a: Tensor, b: Tensor) -> Any:
        return (
            torch.linspace(a, b, 7),
            torch.linspace(a, 2.0, 1),
            torch.linspace(-3.0, b, 4, dtype=torch.int64),
        )

    agrees(
        between, (torch.tensor(0.25), torch.tensor(9.0)), (torch.tensor(5.0), torch.tensor(-5.0))
    )
