"""Short-time Fourier transforms and the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.passes.canonical.signals import spell_out_signals
from attngraph.passes.rewriting.checked import Checked

pytestmark = pytest.mark.wide

SIZE = 16
AUTO = {0: Dim.AUTO, 1: Dim.AUTO}


class Transformed(nn.Module):
    """A separator of sources: a factor on the spectrum. `window` is a length, 0 for none."""

    def __init__(self, *, window: int = SIZE, back: bool = True, **options: Any) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(window) if window else None)
        self.back = back
        self.options = options

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        spectrum = torch.stft(x, SIZE, window=self.window, return_complex=True, **self.options)
        if not self.back:
            return (torch.view_as_real(spectrum),)
        given = {key: value for key, value in self.options.items() if key != "pad_mode"}
        return torch.istft(spectrum * 2, SIZE, window=self.window, **given), spectrum.abs()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hop_length": 8, "normalized": True},
        {"win_length": 12, "window": 12, "hop_length": 3},
        {"win_length": 10, "window": 0, "pad_mode": "constant"},
        {"onesided": False, "pad_mode": "replicate"},
        {"center": False, "hop_length": 4, "back": False},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["one signal", "any length"])
def test_a_spectrum_and_back(options: dict[str, Any], dynamic: bool) -> None:
    module = Transformed(**options)
    x = torch.randn(2, 64) if dynamic else torch.randn(64)
    optimized = attngraph.optimize(module, (x,), dynamic_shapes=(AUTO,) if dynamic else None)
    unseen = torch.randn(3, 96) if dynamic else torch.randn(64)
    for found, expected in zip(optimized(unseen), module(unseen), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_spectrum_of_a_length_that_is_given() -> None:
    class Restored(nn.Module):
        def forward(self, real: Tensor, imaginary: Tensor) -> Tensor:
            window = torch.ones(SIZE)
            return torch.istft(torch.complex(real, imaginary), SIZE, window=window, length=50)

    module, parts = Restored(), (torch.randn(2, 9, 15), torch.randn(2, 9, 15))
    optimized = attngraph.optimize(module, parts)
    torch.testing.assert_close(optimized(*parts), module(*parts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("refused", ["longer than its frames", "aligned"])
def test_what_is_not_spelled_out_leaves_nothing_behind(refused: str) -> None:
    class Left(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if refused == "aligned":
                options = {"center": False, "align_to_window": True, "return_complex": True}
                return torch.view_as_real(torch.stft(x, SIZE, win_length=12, **options))
            spectrum = torch.view_as_complex(x)
            return torch.istft(spectrum, SIZE, window=torch.ones(SIZE), length=1000)

    x = torch.randn(2, 64) if refused == "aligned" else torch.randn(2, 9, 15, 2)
    graph = attngraph.capture(Left(), (x,))
    before = [node.op for node in graph]
    spell_out_signals(graph, Checked(graph, "canonicalize"))
    assert [node.op for node in graph] == before


def test_outputs_of_a_type_that_pytree_knows_without_keys() -> None:
    class Output:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    torch.utils._pytree.register_pytree_node(
        Output, lambda output: ([output.value], None), lambda values, _: Output(values[0])
    )

    class Returns(nn.Module):
        def forward(self, x: Tensor) -> Output:
            return Output(x * 2)

    x = torch.randn(3, 4)
    optimized = attngraph.optimize(Returns(), (x,))
    torch.testing.assert_close(optimized(x).value, x * 2)
