"""Functions that round a size up are arithmetic, or left out where they are for speed alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from attngraph.frontend.capture import Captured, capture
from attngraph.ir import interpret
from attngraph.ir.ranges import Ranges

pytestmark = pytest.mark.wide


def doubled(number: int) -> int:
    power = 1
    while power < number:
        power *= 2
    return power


def shifted(number: int) -> int:
    return 1 << (number - 1).bit_length()


@functools.lru_cache
def smooth(number: int, factors: str = "235") -> int:
    """The next number without other prime factors, as scipy.fft.next_fast_len gives it."""
    rest = number
    for prime in map(int, factors):
        while rest % prime == 0:
            rest //= prime
    return number if rest == 1 else smooth(number + 1, factors)


def block(number: int) -> int:
    while number % 8:
        number += 1
    return number


class Long(nn.Module):
    """A causal convolution as long as the input, by transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 64))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        length = self.rounded(2 * n - 1)
        spectrum = torch.fft.rfft(x, length) * torch.fft.rfft(self.weight[:, :n], length)
        return torch.fft.irfft(spectrum, length)[..., :n]

    def rounded(self, number: int) -> int:
        raise NotImplementedError


class Doubled(Long):
    def rounded(self, number: int) -> int:
        return doubled(number)


class Shifted(Long):
    def rounded(self, number: int) -> int:
        return shifted(number)


class Smooth(Long):
    def rounded(self, number: int) -> int:
        return smooth(number, factors="235")


class Padded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, block(x.shape[-1]) - x.shape[-1])).softmax(-1)


class Shown(nn.Module):
    """At 16, a power of two, what is padded can't be seen."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, doubled(x.shape[-1]) - x.shape[-1])).softmax(-1)


class Below(nn.Module):
    """What is padded shows only where every number is below -3."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        padded = F.pad(x, (0, doubled(n) - n))
        return padded.sum(-1) / n - torch.relu(-padded.amax(-1) - 3)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.arange(x.shape[-1]) / shifted(x.shape[-1]))


def _captured(module: nn.Module, length: int) -> Captured:
    shapes = ({2: Dim.AUTO},)
    return capture(module, (torch.randn(2, 3, length),), dynamic_shapes=shapes, elsewhere=True)


_SLOW = [pytest.param(module, marks=pytest.mark.slow) for module in (Doubled, Smooth)]


@pytest.mark.parametrize("module", [Shifted, Padded, *_SLOW])
def test_a_rounding_takes_every_size(module: Callable[[], nn.Module]) -> None:
    model = module()
    captured = _captured(model, 12)
    is_told = any("rounds a size up" in note for note in captured.notes)
    assert is_told == isinstance(model, Long)
    for length in (3, 12, 16, 17, 40):
        x = torch.randn(2, 3, length)
        assert not Ranges.of(captured.graph).broken({"x_2": length})
        torch.testing.assert_close(interpret(captured.graph, (x,)), (model(x),))


@pytest.mark.parametrize(
    ("module", "length"),
    [
        (Shown, 16),
        (Scaled, 16),
        (Below, 16),
        *(pytest.param(m, 12, marks=pytest.mark.slow) for m in (Shown, Scaled, Below)),
    ],
)
def test_a_rounding_that_shows_stays(module: Callable[[], nn.Module], length: int) -> None:
    model = module()
    captured = _captured(model, length)
    assert not any("rounds a size up" in note for note in captured.notes)
    x = torch.randn(2, 3, length)
    for values in (x, -x.abs() - 10):
        torch.testing.assert_close(interpret(captured.graph, (values,)), (model(values),))
