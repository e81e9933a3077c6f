"""Sizes that are rounded up are the same numbers, and a trace sees what they are multiples of."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

import numpy
import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, guard_int
from torch.nn import functional as F

import attngraph
from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.capture import capture
from attngraph.frontend.rewording.rounded_sizes import rounded_up
from attngraph.ir import interpret, verify
from attngraph.ir.ranges import Ranges

Rounded = Callable[[int], int]
FORMS: dict[str, Rounded] = {
    "remainder of -n": lambda n: -n % 4,
    "rounded up": lambda n: math.ceil(n / 4) * 4 - n,
    "rounded up, of floats": lambda n: math.ceil(n / 4.0) * 4 - n,
    "rounded up, a factor": lambda n: math.ceil(n * 0.25) * 4 - n,
    "rounded down": lambda n: (math.floor((n - 1) / 4) + 1) * 4 - n,
    "cut off": lambda n: (math.trunc((n + 3) / 4)) * 4 - n,
    "both at once": lambda n: sum(divmod(n, 4)),
    "no whole factor": lambda n: math.ceil(n * 0.1) + math.trunc(-n / 4) + math.ceil(n / -4),
    "remainder twice": lambda n: (4 - n % 4) % 4,
    "quotient of -n": lambda n: -(-n // 4) * 4 - n,
    "quotient of n": lambda n: (n + 3) // 4 * 4 - n,
    "more is taken": lambda n: (9 - 2 * n) % 4,
    "of what is left": lambda n: (7 - n % 4 - n) // 3,
    "two remainders": lambda n: (-(n % 4) - 3 * (n % 5)) % 5,
    "negative divisor": lambda n: -n % -4,
    "one": lambda n: (-n % 1) + (-n // 1),
    "frames of a signal": lambda n: (math.ceil((n - 4) / 4 + 1) - 1) * 4 + 4 - n,
    "nearest, and less": lambda n: math.floor(n / 3 + 0.5) + math.trunc(n / 4 - 1.25),
    "a part that is none": lambda n: math.ceil(n / 3 + 0.1) + math.floor(1 / 3 + n / 3),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_numbers_are_pythons(form: Rounded) -> None:
    for number in range(2, 24):
        env = ShapeEnv()
        source = torch._dynamo.source.ConstantSource("n")
        symbol = env.create_symbol(number, source, DimDynamic.DYNAMIC)
        size = env.create_symintnode(symbol, hint=number, source=source)
        with rounded_up():
            found = form(size)
        assert guard_int(found) == form(number)


class Blocks(nn.Module):
    def __init__(self, form: Rounded) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, self.form(x.shape[1])))
        return padded.unflatten(1, (-1, 4)).softmax(2).flatten(1, 2)[:, : x.shape[1]]


_CASES = [("remainder of -n", 8), ("remainder twice", 9), ("quotient of -n", 9), ("rounded up", 9)]


@pytest.mark.parametrize(("name", "sample"), _CASES)
def test_an_axis_in_blocks_takes_every_length(name: str, sample: int) -> None:
    module, dim = Blocks(FORMS[name]), Dim("n", min=5, max=40)
    graph = capture(module, (torch.randn(2, sample, 3),), dynamic_shapes=({1: dim},)).graph
    for length in (5, 8, 9, 12, 15, 40):
        x = torch.randn(2, length, 3)
        (given,) = interpret(graph, (x,))
        torch.testing.assert_close(given, module(x))


class Flattened(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(1)


class Frames(nn.Module):
    """(B, N) to what streaming codecs pad a signal to: a last frame that is whole."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        frames = (length - 4 + 2) / 2 + 1
        missing = (math.ceil(frames) - 1) * 2 + (4 - 2) - length
        if missing > length:
            raise ValueError("too short")
        padded = F.pad(x[:, None], (2, missing), mode="reflect")[:, 0]
        return padded.unfold(1, 4, 2).softmax(-1)


@pytest.mark.parametrize("sample", [8, 9])
def test_frames_of_a_signal_are_whole_numbers(sample: int) -> None:
    module, dim = Frames(), Dim("n", min=3, max=40)
    graph = capture(module, (torch.randn(2, sample),), dynamic_shapes=({1: dim},)).graph
    for length in (3, 4, 7, 8, 9, 40):
        x = torch.randn(2, length)
        (found,) = interpret(graph, (x,))
        torch.testing.assert_close(found, module(x))


@pytest.mark.parametrize("blocks", [Blocks, Flattened])
def test_a_sample_of_whole_blocks_is_no_demand(blocks: type[Blocks]) -> None:
    """What is cut to the sample's length is contiguous there alone, which is no demand."""
    module, x = blocks(FORMS["rounded up"]), torch.randn(2, 8, 3)
    graph = capture(module, (x,), dynamic_shapes=({1: Dim.AUTO},)).graph
    for length in (8, 9, 15, 40):
        x = torch.randn(2, length, 3)
        assert not Ranges.of(graph).broken({"x_1": length})
        torch.testing.assert_close(interpret(graph, (x,)), (module(x),))


class WrittenCopy(Blocks):
    """contiguous() gives the cut tensor itself for whole blocks: these writes are seen there."""

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, -x.shape[1] % 4))
        padded[:, : x.shape[1]].contiguous().mul_(2.0)
        return padded.sum(1)


class WrittenView(Blocks):
    """flatten(1) gives a view at all sizes."""

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, -x.shape[1] % 4))
        padded[:, : x.shape[1]].flatten(1).add_(1.0)
        return padded.sum(1)


@pytest.mark.parametrize("sample", [7, 8])
@pytest.mark.parametrize("kind", [WrittenCopy, WrittenView])
def test_what_is_written_behind_a_cut_is_written_where_eager_writes(
    kind: type[Blocks], sample: int
) -> None:
    """At sizes of which that isn't known, the file isn't for."""
    module, x = kind(FORMS["rounded up"]), torch.randn(2, sample, 3)
    optimized = attngraph.optimize(module, (x,), dynamic_shapes=({1: Dim.AUTO},))
    right = 0
    for length in (*range(2, 14), 16):
        other = torch.randn(2, length, 3)
        with suppress(UsageError):
            torch.testing.assert_close(optimized(other), module(other.clone()))
            right += 1
    assert right > (2 if kind is WrittenCopy else 12)


class Windows(nn.Module):
    """Both axes of an image in windows of 3, padded at their ends."""

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[1:]
        padded = F.pad(x, (0, -columns % 3, 0, -rows % 3))
        batch, high, wide = padded.shape
        windows = padded.view(batch, high // 3, 3, wide // 3, 3).transpose(2, 3)
        mixed = windows.flatten(3).softmax(-1).view(windows.shape).transpose(2, 3)
        return mixed.reshape(batch, high, wide)[:, :rows, :columns].contiguous()


@pytest.mark.parametrize("sample", [(6, 8), (6, 9), (7, 9)])
def test_where_one_axis_of_the_sample_has_whole_blocks(sample: tuple[int, int]) -> None:
    """torch notes of each result whether it is contiguous, as what is cut may be for the sample."""
    module, auto = Windows(), Dim.AUTO
    x, shapes = torch.randn(2, *sample), ({0: auto, 1: auto, 2: auto},)
    graph = capture(module, (x,), dynamic_shapes=shapes).graph
    assert not any(isinstance(each, sympy.Eq) for each in graph.conditions)
    for size in ((3, 5, 7), (1, 10, 4), (2, 6, 9)):
        other = torch.randn(size)
        torch.testing.assert_close(interpret(graph, (other,))[0], module(other))


def test_the_shape_of_an_operator_is_computed_as_the_graph_does() -> None:
    class Steps(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            n = x.shape[1]
            return torch.arange(float(n)), torch.arange(n)[::2] + torch.arange(0, n, 2)

    graph = capture(Steps(), (torch.randn(2, 9),), dynamic_shapes=({1: Dim.AUTO},)).graph
    verify(graph)
    for length in (4, 9, 12):
        x = torch.randn(2, length)
        torch.testing.assert_close(interpret(graph, (x,)), Steps()(x))


class Cut(nn.Module):
    def __init__(self, number: Rounded) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : self.number(x.shape[1])].softmax(1)


@pytest.mark.parametrize(
    "number", [lambda n: int(numpy.sqrt(n)), lambda n: math.isqrt(n + 4)], ids=["numpy", "isqrt"]
)
def test_a_root_of_a_size_is_a_size(number: Rounded) -> None:
    module = Cut(number)
    graph = capture(module, (torch.randn(2, 30, 3),), dynamic_shapes=({1: Dim.AUTO},)).graph
    for length in (12, 15, 16, 35, 36, 80):
        x = torch.randn(2, length, 3)
        torch.testing.assert_close(interpret(graph, (x,)), (module(x),))


class Kept(nn.Module):
    """The tokens of the largest sums, as vision models prune them."""

    def __init__(self, number: Rounded) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        places = x.sum(-1).topk(self.number(x.shape[1]), 1).indices.sort(1).values
        return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


@pytest.mark.parametrize(
    "number",
    [lambda n: int(0.7 * n), lambda n: math.ceil(n * 0.3), lambda n: max(1, round(n * 0.4))],
    ids=["int", "ceil", "round"],
)
def test_a_share_of_the_tokens_is_kept(number: Rounded) -> None:
    module, dims = Kept(number), ({0: Dim("b"), 1: Dim("n", min=2)},)
    captured = capture(module, (torch.randn(2, 8, 3),), dynamic_shapes=dims)
    assert not captured.graph.conditions
    for length in (2, 3, 7, 10, 40):
        x = torch.randn(3, length, 3)
        torch.testing.assert_close(interpret(captured.graph, (x,)), (module(x),))


def test_more_than_all_tokens_are_no_share() -> None:
    module = Kept(lambda n: int(1.1 * n))
    with pytest.raises(CaptureError):
        capture(module, (torch.randn(2, 8, 3),), dynamic_shapes=({1: Dim("n")},))


class HalvedTwice(nn.Module):
    """A signal by strides of convolutions, its mask by steps of slices: as long at any length."""

    def __init__(self) -> None:
        super().__init__()
        self.strided = nn.Sequential(nn.Conv1d(4, 4, 3, 2), nn.ReLU(), nn.Conv1d(4, 4, 3, 2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.strided(x.mT).mT * mask[:, 2::2][:, 2::2, None]
        return found


def test_what_is_halved_twice_is_as_long_either_way() -> None:
    model, length = HalvedTwice().eval(), {1: Dim("n", min=7, max=200)}
    args = torch.randn(2, 30, 4), torch.ones(2, 30)
    captured = capture(model, args, dynamic_shapes=(length, length))
    assert not captured.graph.conditions
    for size in (7, 8, 9, 10, 53):
        given = torch.randn(2, size, 4), (torch.rand(2, size) > 0.3).float()
        assert torch.allclose(interpret(captured.graph, given)[0], model(*given), atol=1e-6)
