"""A norm whose row is summed one term after another passes; one that is as far off elsewhere, not.

onnxruntime's norms with a residual sum so: a row of 4096 features is off by several eps as a whole.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attngraph.export.parity.budget import compare
from attngraph.export.parity.reference import Reference

EPS = torch.finfo(torch.float32).eps
FEATURES = 4096


class RMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _in_turn(x: Tensor) -> Tensor:
    """The norm of one row, its squares added up in float32 from the first to the last."""
    squares = x.square().numpy().ravel()
    total = torch.tensor(np.add.accumulate(squares, dtype=np.float32)[-1])
    return x * torch.rsqrt(total / FEATURES + 1e-6)


def _rows() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, FEATURES) for _ in range(30)]


def test_sums_in_turn_are_rounding() -> None:
    module, needed = RMSNorm(), 0
    for x in _rows():
        reference = Reference(module, precision="fp32")((x,))
        found = _in_turn(x)
        assert compare(reference, [found], "fp32").passed
        off = (found.double() - reference.exact[0]).square().mean().sqrt()
        needed += float(off) > 4 * EPS
    assert needed  # rows that are past what eager's own runs explain


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, RMSNorm])
@pytest.mark.parametrize(("off", "passes"), [(10 * EPS, True), (80 * EPS, False)])
def test_a_row_may_be_off_as_a_whole(kind: type[nn.Module], off: float, passes: bool) -> None:
    module = RMSNorm() if kind is RMSNorm else kind(FEATURES)  # type: ignore[call-arg]
    reference = Reference(module.requires_grad_(False), precision="fp32")((_rows()[0],))
    assert compare(reference, [reference.eager[0] * (1 + off)], "fp32").passed is passes


@pytest.mark.parametrize("where", ["element", "features"])
def test_what_no_sum_explains_fails(where: Literal["element", "features"]) -> None:
    """A row of which one element, or each by another share, is off by as much."""
    reference = Reference(RMSNorm(), precision="fp32")((_rows()[0],))
    wrong = reference.eager[0].clone()
    if where == "element":
        wrong[0, int(wrong.abs().argmax())] *= 1 + 80 * EPS
    else:
        wrong *= 1 + 40 * EPS * torch.randn(FEATURES).sign()
    assert not compare(reference, [wrong], "fp32").passed


class Counted(nn.Module):
    """Divides by how many positions a mask shows, which is a whole number."""

    def forward(self, x: Tensor) -> Tensor:
        shown = x > -10
        return x.sum(-1, keepdim=True) / shown.sum(-1, keepdim=True) + shown.double().mean()


def test_what_a_mask_counts_is_exact() -> None:
    reference = Reference(Counted(), precision="fp32")((_rows()[0],))
    assert not compare(reference, [reference.eager[0] * 2], "fp32").passed
    for pair in reference.sums():
        assert all(each.isfinite().all() for run in pair for each in run)


class Guarded(nn.Module):
    """Fails where a mean is another one than that of the sample."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.mean = float(x.double().mean())

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64 and float(x.mean()) != self.mean:
            raise ValueError("another mean")
        return x.exp()


def test_a_run_that_fails_shows_nothing() -> None:
    x = _rows()[0]
    reference = Reference(Guarded(x), precision="fp32")((x,))
    assert reference.sums() == ()
    assert not compare(reference, [reference.eager[0] * (1 + 40 * EPS)], "fp32").passed


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum((1, 2), keepdim=True)


@pytest.mark.parametrize("signed", [True, False])
def test_sums_are_off_by_what_their_partial_sums_are_rounded(signed: bool) -> None:
    """Terms of both signs have small partial sums: as far off as those of one sign is too far."""
    torch.manual_seed(0)
    x = torch.randn(64, 32, 128)
    x = x if signed else x.abs()
    reference = Reference(Sum(), precision="fp32")((x,))
    exact = x.double().flatten(1).cumsum(1).square().sum(1).div(12).sqrt()
    off = torch.stack([run[0][0] - reference.exact[0] for run in reference.sums()]).flatten(1)
    share = off.abs() / (EPS * exact)
    assert share.max() <= 1
    assert share.max() > 1 / 2
    of_one_sign = EPS * 4096**0.5 / 6 * x.abs().double().sum((1, 2), keepdim=True)
    found = (reference.exact[0] + of_one_sign).to(torch.float32)
    assert compare(reference, [found], "fp32").passed is not signed


class Mean(nn.Module):
    """A mean over as many keys as there are rows, in one of torch's products."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, weights: Tensor, values: Tensor) -> Tensor:
        if self.kind == "attention":
            query = torch.zeros_like(weights)[..., :8]
            key = torch.zeros_like(values)[..., :8]
            found = nn.functional.scaled_dot_product_attention(query, key, values)
        elif self.kind == "linear":
            found = nn.functional.linear(weights[0], values[0].mT.contiguous())
        else:
            found = weights @ values
        return found


@pytest.mark.parametrize("kind", ["attention", "linear", "matmul"])
def test_products_in_turn_are_rounding(kind: str) -> None:
    """Whatever the BLAS at hand does: eager is taken to sum without an error of its own."""
    torch.manual_seed(0)
    weights, values = torch.full((1, 16, 4096), 1 / 4096), torch.randn(1, 4096, 12)
    reference = Reference(Mean(kind), precision="fp32")((weights, values))
    exact = reference.exact[0]
    assert exact is not None
    alone = dataclasses.replace(reference, eager=(exact.float(),), sample=tuple)
    terms = (weights[0, 0, :, None] * values[0]).numpy()
    row = torch.from_numpy(np.add.accumulate(terms, axis=0, dtype=np.float32)[-1])
    found = row.expand(exact.shape).contiguous()
    assert compare(alone, [found], "fp32").passed
    assert not compare(dataclasses.replace(alone, sums=tuple), [found], "fp32").passed
    wrong = found.clone()
    wrong[..., 3] += 4e-5 * exact.abs().max()
    assert not compare(alone, [wrong], "fp32").passed
