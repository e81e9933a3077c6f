"""What code does for its sample's size alone is traced at another, if that is the model there."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from attngraph import optimize
from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.capture import capture
from attngraph.ir import interpret

pytestmark = pytest.mark.wide

X = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))


class Table(nn.Module):
    """Distances as a mask, which grow with the longest length that was seen: ALiBi as published."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.bias is None or self.bias.shape[-1] < length:
            at = torch.arange(length)
            self.register_buffer("bias", -(at[:, None] - at).abs(), persistent=False)
        return (x @ x.mT + self.bias[:length, :length]).softmax(-1) @ x


class Counted(Table):
    """A table by how many rows it has, to which one that is no longer than that is no question."""

    known = 0

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length > self.known:
            self.bias, self.known = torch.arange(float(length)).sqrt(), length
        return x + self.bias[:length, None]


class Resolution(nn.Module):
    """A mask for the length that was configured, and one that is made for any other."""

    def __init__(self, *, differs: bool = False) -> None:
        super().__init__()
        self.differs = differs
        self.register_buffer("mask", torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = self.mask if length == 6 else torch.arange(length) + float(self.differs)
        return x * mask[:, None]


class Short(Resolution):
    """Below 4 it is another function."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.shape[1] < 4 else super().forward(x)


@pytest.mark.parametrize("dim", [Dim.AUTO, Dim("length")], ids=["auto", "named"])
@pytest.mark.parametrize("made", [Table, Counted, Resolution])
def test_the_general_side_is_followed_where_it_is_the_model(made: type, dim: object) -> None:
    model = made().eval()
    model(X)  # which leaves a table of the sample's size
    optimized = optimize(model, (X,), dynamic_shapes=({1: dim},))
    for length in (6, 9, 4, 1, 20):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(optimized(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_side_that_differs_at_the_samples_size_is_not_followed() -> None:
    model = Resolution(differs=True)
    optimized = optimize(model, (X,), dynamic_shapes=({1: Dim.AUTO},))
    torch.testing.assert_close(optimized(X), model(X))
    with pytest.raises(UsageError):
        optimized(torch.randn(2, 9, 4))
    with pytest.raises(CaptureError, match="the model fixes it to 6"):
        capture(model, (X,), dynamic_shapes=({1: Dim("length")},), elsewhere=True)


def test_what_is_the_model_at_two_sizes_alone_is_not_followed() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * len({x.shape[1], 5})

    captured = capture(Looks(), (X,), dynamic_shapes=({1: Dim.AUTO},), elsewhere=True)
    assert captured.graph.inputs[0].shape == (2, 6, 4)


class Odd(nn.Module):
    """Below 8 its loop treats one size by itself, which the sample and its halves don't show."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length < 8:
            return torch.stack([x[:, at] * at for at in range(length)], 1) + (
                1 if length == 5 else 0
            )
        return x * torch.arange(length)[:, None]


def test_a_size_that_the_sample_does_not_show_is_tried() -> None:
    optimized = optimize(Odd(), (X,), dynamic_shapes=({1: Dim.AUTO},))
    torch.testing.assert_close(optimized(X), Odd()(X))
    for length in (5, 9):
        with pytest.raises(UsageError):
            optimized(torch.randn(2, length, 4))


def test_what_is_done_at_all_sizes_is_told() -> None:
    optimized = optimize(Resolution(), (X,), dynamic_shapes=({1: Dim.AUTO},))
    assert "what the model does where x_1 ≠ 6" in optimized.report.notes[0]


def test_a_lower_end_of_the_model_stays_one() -> None:
    model = Short()
    optimized = optimize(model, (X,), dynamic_shapes=({1: Dim.AUTO},))
    for length in (4, 6, 9):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(optimized(x), model(x))
    with pytest.raises(UsageError, match="at least 4"):
        optimized(torch.randn(2, 3, 4))


class Windows(nn.Module):
    """Attention in windows of 4: a last one that is not full is padded, or else nothing is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        missing = (4 - length % 4) % 4
        if self.how == "remainder" and length % 4:
            x = F.pad(x, (0, 0, 0, 4 - length % 4))
        elif self.how != "remainder" and missing > 0:
            x = F.pad(x, (0, 0, 0, missing))
        elif self.how == "differs":
            x = 2 * x
        parts = x.unflatten(1, (-1, 4))
        return ((parts @ parts.mT).softmax(-1) @ parts).flatten(1, 2)[:, :length]


@pytest.mark.parametrize(("how", "sample"), [("pad", 8), ("remainder", 9)])
def test_an_axis_that_is_padded_to_windows_takes_all_lengths(how: str, sample: int) -> None:
    model = Windows(how)
    found = capture(
        model,
        (torch.randn(2, sample, 4),),
        dynamic_shapes=({1: Dim("length", min=3, max=40)},),
        elsewhere=True,
    )
    for length in (3, 4, 8, 9, 14, 16, 40):
        x = torch.randn(2, length, 4)
        (given,) = interpret(found.graph, (x,))
        torch.testing.assert_close(given, model(x))


def test_a_full_last_window_that_is_treated_otherwise_is_refused() -> None:
    with pytest.raises(CaptureError, match="can't take every size: the model needs length = 4"):
        optimize(
            Windows("differs"),
            (torch.randn(2, 8, 4),),
            dynamic_shapes=({1: Dim("length", min=3, max=40)},),
        )


class Padded(Table):
    """Windows of 4 after a table of an earlier call; the padding is cut off again where it is."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x = super().forward(x)
        missing = math.ceil(length / 4) * 4 - length
        if missing > 0:
            x = F.pad(x, (0, 0, 0, missing))
        parts = x.unflatten(1, (-1, 4)).flatten(0, 1)
        x = (parts @ parts.mT).softmax(-1) @ parts
        x = x.unflatten(0, (-1, math.ceil(length / 4))).flatten(1, 2)
        if missing > 0:
            x = x[..., :-missing, :]
        return x if missing or not self.keeps else 2 * x


def test_windows_after_a_table_of_an_earlier_call_take_all_lengths() -> None:
    """The sample is full, a sample of twice its size too; and one window is a number as any."""
    model = Padded().eval()
    x = torch.randn(2, 8, 4)
    model(x)
    optimized = optimize(model, (x,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    for batch, length in ((2, 8), (3, 4), (1, 3), (2, 1), (1, 21), (2, 24)):
        x = torch.randn(batch, length, 4)
        torch.testing.assert_close(optimized(x), model(x), rtol=1e-5, atol=1e-5)


def test_windows_that_differ_where_they_are_full_keep_to_the_sample() -> None:
    model = Padded(keeps=True).eval()
    x = torch.randn(2, 8, 4)
    model(x)
    optimized = optimize(model, (x,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    torch.testing.assert_close(optimized(x), model(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(UsageError):
        optimized(torch.randn(2, 9, 4))


class Thirds(nn.Module):
    """The middle of three parts, of which the first are one longer where 3 doesn't divide."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tensor_split(3, 1)[1]


def test_parts_whose_lengths_depend_on_a_rest_are_refused() -> None:
    """torch's operator takes any length; the types of what it gives hold for one rest alone."""
    with pytest.raises(CaptureError, match="the model needs length = 3"):
        optimize(Thirds(), (X,), dynamic_shapes=({1: Dim("length", max=64)},))


class Written(nn.Module):
    """A table of its own, into which the rows for one element of the batch are written."""

    def forward(self, x: Tensor) -> Tensor:
        table = x.new_zeros(1, x.shape[1] + 2, x.shape[2])
        table.data[:, 2:].copy_(torch.arange(x.shape[2]).float().expand(x.shape[1], -1))
        return torch.cat([x[:, :2], x], 1) + table


def test_what_is_written_into_a_tensor_of_the_models_own_stays() -> None:
    x = torch.randn(3, 5, 8)
    optimized = optimize(Written(), (x,))
    torch.testing.assert_close(optimized(x), Written()(x))


class ChosenParts(nn.Module):
    """The two parts of 4, the last one padded, that a score picks: one alone is too few."""

    def forward(self, x: Tensor) -> Tensor:
        missing = math.ceil(x.shape[1] / 4) * 4 - x.shape[1]
        parts = (x if missing == 0 else F.pad(x, (0, 0, missing, 0))).unflatten(1, (-1, 4))
        places = parts.mean((2, 3)).topk(2).indices[:, :, None, None]
        return parts.gather(1, places.expand(-1, -1, 4, parts.shape[-1]))


def test_sizes_that_the_model_does_not_take_say_nothing_of_its_other_side() -> None:
    model = ChosenParts()
    shapes = ({0: Dim.AUTO, 1: Dim.AUTO},)
    optimized = optimize(model, (torch.randn(2, 16, 4),), dynamic_shapes=shapes)
    for batch, length in ((2, 16), (1, 19), (3, 24), (1, 5)):
        x = torch.randn(batch, length, 4)
        torch.testing.assert_close(optimized(x), model(x))
