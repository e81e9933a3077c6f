"""Fourier transforms are right, at every size: along any axes, padded, trimmed, half, inverse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fft, nn
from torch.export import Dim

from attngraph.compiling.compiler import optimize
from attngraph.export.parity.budget import compare
from attngraph.export.parity.reference import Reference

pytestmark = pytest.mark.wide

_BATCH, _SEQ = Dim("batch", max=9), Dim("seq", max=40)
_WIDTH = 6  # of the features


class _Transforms(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        values = torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(1))
        self.weight = nn.Parameter(values, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, torch.view_as_complex(self.weight))


def _fnet(x: Tensor, w: Tensor) -> Tensor:
    return fft.fftn(x, dim=(1, 2)).real


def _two_calls(x: Tensor, w: Tensor) -> Tensor:
    return fft.fft(fft.fft(x, dim=-1), dim=-2).imag


def _correlation(x: Tensor, w: Tensor) -> Tensor:
    spectrum = fft.rfft(x, dim=-1)
    return fft.irfft(spectrum * spectrum.conj(), n=x.size(-1), dim=-1)


def _padded(x: Tensor, w: Tensor) -> Tensor:
    return fft.irfft(fft.rfft(x, n=9, dim=-1), n=9, dim=-1)


def _trimmed(x: Tensor, w: Tensor) -> Tensor:
    return fft.rfft(x, n=5, dim=-1).abs()


def _complex_inverse(x: Tensor, w: Tensor) -> Tensor:
    return torch.view_as_real(fft.ifft2(torch.complex(x, x.roll(1, 2)), norm="forward"))


def _mixed_modes(x: Tensor, w: Tensor) -> Tensor:
    """A Fourier neural operator's layer."""
    return fft.irfft(torch.einsum("bsk,km->bsm", fft.rfft(x, dim=-1), w), n=_WIDTH, dim=-1)


def _half_of_two_axes(x: Tensor, w: Tensor) -> Tensor:
    """A global filter."""
    return fft.irfft2(fft.rfft2(x, dim=(1, 2), norm="ortho") * w[:, 0, None], norm="ortho")


def _ends_are_real(x: Tensor, w: Tensor) -> Tensor:
    """irfft reads the first and the middle number as real ones, and one for two others."""
    return fft.irfft(torch.complex(x, 2 * x), dim=-1)


def _odd_inverse(x: Tensor, w: Tensor) -> Tensor:
    return fft.irfft(torch.complex(x, 2 * x), n=7, dim=-1)


def _along_the_batch(x: Tensor, w: Tensor) -> Tensor:
    return fft.fft(x, dim=0, norm="ortho").real


def _inverse_of_a_dynamic_length(x: Tensor, w: Tensor) -> Tensor:
    return fft.irfft(torch.complex(x, 2 * x), dim=1, norm="ortho")


def _convolved(x: Tensor, w: Tensor) -> Tensor:
    """Along an axis that is padded by its own length, and cut to another."""
    n, kernel = x.size(1), x[:1, :, :1].softmax(1)
    found = fft.rfft(x, n=2 * n - 1, dim=1) * fft.rfft(kernel, n=2 * n - 1, dim=1)
    return fft.irfft(found, n=2 * n - 1, dim=1)[:, :n]


def _state_space(x: Tensor, w: Tensor) -> Tensor:
    """A diagonal state space (DSS, Gupta et al. 2022): its kernel is made of complex numbers."""
    poles = -x[0, 0].exp() + 1j * x[0, 1]
    steps = poles[:, None] * torch.arange(x.size(1))
    gains = (2 - 1j) * (poles.exp() - 1) / poles
    return (gains @ steps.exp()).real + x.mean((0, 2))


def _fewer_than_there_are(x: Tensor, w: Tensor) -> Tensor:
    n = x.size(1) // 2 + 1
    found = torch.view_as_real(fft.fft(x, n=n, dim=1)).sum(-1)
    return found + fft.irfft(torch.complex(x, 2 * x), n=n, dim=1)


DYNAMIC = [
    _fnet,
    _two_calls,
    _correlation,
    _padded,
    _trimmed,
    _complex_inverse,
    _mixed_modes,
    _ends_are_real,
    _odd_inverse,
    _along_the_batch,
    _inverse_of_a_dynamic_length,
]


def _name(function: Callable[..., Tensor]) -> str:
    return function.__name__.lstrip("_")


@pytest.mark.parametrize("function", [*DYNAMIC, _half_of_two_axes], ids=_name)
def test_static(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = _Transforms(function).eval()
    x = torch.randn(3, 4, _WIDTH, generator=torch.Generator().manual_seed(0))
    if function is _half_of_two_axes:
        x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    assert optimize(model, (x,)).report.parity is not None


@pytest.mark.parametrize(
    "function", [*DYNAMIC, _convolved, _fewer_than_there_are, _state_space], ids=_name
)
def test_dynamic(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = _Transforms(function).eval()
    x = torch.randn(3, 10, _WIDTH, generator=torch.Generator().manual_seed(0))
    optimized = optimize(model, (x,), dynamic_shapes=({0: _BATCH, 1: _SEQ},))
    for batch, seq in ((2, 7), (1, 12), (4, 2)):
        x = torch.randn(batch, seq, _WIDTH, generator=torch.Generator().manual_seed(seq))
        parity = compare(Reference(model, precision="fp32")((x,)), optimized.run((x,)), "fp32")
        assert parity.passed, str(parity)


@pytest.mark.parametrize("length", [512, 768, 1000])
def test_long_ones_are_as_exact_as_their_length_explains(length: int) -> None:
    """Rounding of a sum of n products in float32: √n · 2⁻²⁴ of the result's norm, at most."""
    model = _Transforms(lambda x, w: fft.fft(x, dim=-1).real).eval()
    x = torch.randn(4, length, generator=torch.Generator().manual_seed(0))
    found = optimize(model, (x,), verify="off").run((x,))[0].double()
    expected = fft.fft(x.double(), dim=-1).real
    assert (found - expected).norm() < length**0.5 * 2**-24 * expected.norm()
