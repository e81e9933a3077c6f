"""Outputs of which most is zero but for rounding: what must pass, and what is still caught."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attngraph.export.formats import Precision
from attngraph.export.parity.budget import compare
from attngraph.export.parity.cancellation import cancelled
from attngraph.export.parity.reference import Reference, ReferenceOutputs
from tests.export.parity.residual_attention import run

PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_EPS = {name: torch.finfo(dtype).eps for name, dtype in _DTYPES.items()}
ROWS, WIDTH = 24, 64


class Cancelling(nn.Module):
    """x W Vᵀ − x (W Vᵀ), which is 0, in the first `zeros` features; x W Vᵀ in the others.

    With `halves` each product is the sum of two, as an engine has it that cuts them in blocks.
    """

    def __init__(self, zeros: int, fill: float | None = None) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.right = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.zeros, self.fill = zeros, fill
        self.halves = False

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not self.halves:
            return a @ b
        half = WIDTH // 2
        return a[:, :half] @ b[:half] + a[:, half:] @ b[half:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.tanh()  # whose products float64 rounds too
        first = self.product(self.product(x, self.left), self.right)
        both = first - self.product(x, self.product(self.left, self.right))
        kept = first if self.fill is None else torch.full_like(first, self.fill)
        return torch.cat([both[:, : self.zeros], kept[:, self.zeros :]], -1)


def setting(
    precision: Precision, zeros: int, fill: float | None = None
) -> tuple[ReferenceOutputs, torch.Tensor]:
    """What eager gives, and what another engine would."""
    torch.manual_seed(0)
    module, x = Cancelling(zeros, fill), torch.randn(ROWS, WIDTH)
    module, x = module.to(_DTYPES[precision]), x.to(_DTYPES[precision])
    reference = Reference(module, precision=precision)((x,))
    module.halves = True
    return reference, run(module, x)


@PRECISIONS
@pytest.mark.parametrize("zeros", [10, 30, 40, 60, WIDTH])
def test_another_engine_passes_at_any_share_of_zeros(precision: Precision, zeros: int) -> None:
    reference, output = setting(precision, zeros)
    assert not torch.equal(output, reference.eager[0])
    assert compare(reference, [output], precision).passed


@PRECISIONS
@pytest.mark.parametrize("zeros", [40, 60, WIDTH])
def test_what_should_cancel_and_does_not_fails(precision: Precision, zeros: int) -> None:
    reference, output = setting(precision, zeros)
    for place in ((3, 5), (0, zeros - 1)):
        wrong = output.clone()
        wrong[place] += 40 * _EPS[precision]  # the terms that cancel are of the order of 1
        worst = compare(reference, [wrong], precision).worst
        assert (worst.passed, worst.norm) == (False, "max")
    assert not compare(reference, [output + 10 * _EPS[precision]], precision).passed
    assert not compare(reference, [torch.randn_like(output)], precision).passed


@pytest.mark.parametrize("zeros", [40, 60])
def test_the_elements_that_are_not_zero_keep_their_own_budget(zeros: int) -> None:
    reference, output = setting("fp32", zeros)
    wrong = output.clone()
    wrong[:, zeros:] *= 1 + 1e-5
    assert not compare(reference, [wrong], "fp32").passed
    wrong[:, zeros:] = 0.0
    assert not compare(reference, [wrong], "fp32").passed


def test_fills_beside_zeros_are_no_scale_for_them() -> None:
    reference, output = setting("fp32", 50, fill=-1e9)
    assert compare(reference, [output], "fp32").passed
    output[2, 3] += 1e-4
    assert not compare(reference, [output], "fp32").passed


def test_where_eager_cancels_to_the_last_bit_the_samples_tell_the_noise() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 3.3) / 3.3 - x

    x = torch.randn(400, dtype=torch.float64).float()
    reference = Reference(Scaled(), precision="fp32")((x,))
    engine = x * torch.tensor(3.3) * (1 / torch.tensor(3.3)) - x
    assert compare(reference, [engine], "fp32").passed
    assert not compare(reference, [engine + 1e-5], "fp32").passed


def test_another_branch_of_eager_is_no_rounding() -> None:
    """Probabilities that float64 has as nothing, and eager as uniform: a fill that absorbed."""
    exact = torch.zeros(8, 64, dtype=torch.float64)
    exact[:, 1:] = torch.rand(8, 63, dtype=torch.float64) * 1e-17
    exact[:, 0] = 1.0
    eager = torch.full((8, 64), 1 / 64)
    among = torch.ones_like(exact, dtype=torch.bool)
    error = eager.double() - exact
    assert not cancelled(exact, [error], among, _EPS["fp32"])[0].any()
    reference = ReferenceOutputs(("weights",), (eager,), (exact,))
    assert not compare(reference, [eager.roll(1, 0) * 1.1], "fp32").passed


def test_small_numbers_with_digits_are_no_zeros() -> None:
    exact = 10.0 ** torch.linspace(-30, 0, 640, dtype=torch.float64).view(10, 64)
    eager = exact.float()
    among = torch.ones_like(exact, dtype=torch.bool)
    zero, most = cancelled(exact, [eager.double() - exact], among, _EPS["fp32"])
    assert not zero.any()
    assert math.isclose(most, 0.0)
