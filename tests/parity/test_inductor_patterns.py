"""The attention patterns that torch's inductor matches one by one are read by one algebra here.

They come from the installed torch, in float32 and without dropout, as do the shapes and strides of
their inputs. Where inductor must not match (its own negative tests), what counts is that the result
is right: fused where that is equal, declined otherwise.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from attngraph.compiling.compiler import optimize
from attngraph.reports.report import Report

pytestmark = pytest.mark.wide

Shape = tuple[int, ...]


# torch 2.11 has the first 27 of torch 2.13's patterns, and four that cast to half in any case.
IS_NEW = TorchVersion(torch.__version__) >= "2.13"
COUNT, ON_HALF = (30, ()) if IS_NEW else (27, ("7", "8", "9", "10"))


@functools.cache
def _patterns() -> dict[str, tuple[Callable[..., Any], list[Tensor], dict[str, Any]]]:
    """By name: the function, inputs that show shapes, strides and dtypes, keyword arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._inductor.fx_passes import fuse_attention

        found = {}
        items = dict(fuse_attention._get_sfdp_patterns())
        for name, item in items.items():
            if not name.endswith("_inference") or "_half" in name:
                continue
            if name.removesuffix("_inference").rpartition("_")[2] in ON_HALF:
                item = items[name.replace("_inference", "_half_inference")]
            keywords = {k: v for k, v in item["scalar_workaround"].items() if k != "dropout_p"}
            found[name.removesuffix("_inference").removeprefix("_sfdp_")] = (
                item["search_fn"],
                item["example_inputs"],
                keywords,
            )
    return found


def _random_like(example: Tensor, random: torch.Generator) -> Tensor:
    """Peaked values, or a mask, in the example's layout; a scalar is 2.

    Of a batch of 1,024 a few elements are enough.
    """
    if example.numel() > 1 << 20:
        example = example[:6]
    if example.dim() == 0:
        return torch.tensor(2.0)
    if example.dtype == torch.bool:
        values = torch.rand(example.shape, generator=random) > 0.3
    else:
        values = (2 * torch.randn(example.shape, generator=random)).to(example.dtype)
    return torch.empty_strided(example.shape, example.stride(), dtype=values.dtype).copy_(values)


class _Called(nn.Module):
    def __init__(self, function: Callable[..., Any], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.keywords = keywords

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args, **self.keywords)


def _report(function: Callable[..., Any], args: list[Tensor], **keywords: Any) -> Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # several patterns use names that torch deprecated
        report = optimize(_Called(function, keywords), tuple(args), verify="final").report
    assert report.parity is not None
    assert report.parity.passed
    return report


def test_all_that_torch_has_are_found() -> None:
    numbers = {name.removesuffix("_bs1").rpartition("_")[2] for name in _patterns()}
    assert {str(number) for number in range(1, COUNT + 1)} <= numbers


@pytest.mark.parametrize("name", list(_patterns()))
def test_pattern_is_fused(name: str) -> None:
    function, examples, keywords = _patterns()[name]
    random = torch.Generator().manual_seed(0)
    args = [_random_like(example, random) for example in examples]
    report = _report(function, args, **keywords)
    assert (report.fused, report.declined) == (1, 0), report.sites


def _scores(query: Tensor, key: Tensor) -> Tensor:
    return torch.matmul(query, key.transpose(-2, -1)) / query.shape[-1] ** 0.5


def _reused_weights(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = _scores(query, key).softmax(dim=-1)
    return weights.matmul(value), weights


def _reused_scores(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key)
    return scores.softmax(dim=-1).matmul(value), scores.sum(-1)


def _reused_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    products = torch.matmul(query, key.transpose(-2, -1))
    return (products * 0.3).softmax(dim=-1).matmul(value) + products.mean(-1, keepdim=True)


def _tensor_scale(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
    return torch.matmul(query, key.transpose(-2, -1)).div(scale).softmax(dim=-1).matmul(value)


def _added_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return (torch.matmul(query, key.transpose(-2, -1)) + mask).softmax(dim=-1).matmul(value)


def _added_number(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (torch.matmul(query, key.transpose(-2, -1)) + 2.0).softmax(dim=-1).matmul(value)


def _values_reused_as_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (_scores(query, key) + value[..., :1].mT).softmax(dim=-1).matmul(value)


def _tensor_dtype_changed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _scores(query, key).softmax(dim=-1, dtype=torch.float64) @ value.double()


@pytest.mark.parametrize(
    ("function", "extra"),
    [
        (_reused_weights, None),
        (_reused_scores, None),
        (_reused_products, None),
        (_tensor_scale, torch.full((2, 4, 1, 1), 3.0)),
        (_tensor_scale, torch.linspace(1, 3, 8).view(2, 4, 1, 1)),
        (_tensor_scale, torch.linspace(1, 3, 5)),
        (_added_mask, torch.arange(-3, 3).repeat_interleave(10)[: 2 * 4 * 5].view(2, 4, 1, 5)),
        (_added_mask, torch.tensor([True, False, True, True, False])),
        (_added_mask, torch.linspace(-2, 2, 15, dtype=torch.float64).view(3, 5).float()),
        (_added_number, None),
        (_values_reused_as_mask, None),
        (_tensor_dtype_changed, None),
    ],
)
def test_near_miss_is_right(function: Callable[..., Any], extra: Tensor | None) -> None:
    random = torch.Generator().manual_seed(1)
    shapes: list[Shape] = [(2, 4, 3, 6), (2, 4, 5, 6), (2, 4, 5, 7)]
    args = [1.5 * torch.randn(shape, generator=random) for shape in shapes]
    report = _report(function, [*args, *([] if extra is None else [extra])])
    assert len(report.sites) == 1, report.sites
    assert report.fused or (report.sites[0].code and report.sites[0].blamed)
