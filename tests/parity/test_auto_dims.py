"""Dim.AUTO: what the model fixes is told, what it takes together is checked together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F
from torch.utils._sympy.functions import Mod

import attngraph
from attngraph.checks.sizes import choose_sizes
from attngraph.errors import AttngraphError, CaptureError
from attngraph.frontend.capture import capture
from attngraph.ir import parse
from attngraph.ir.conditions import format_condition
from attngraph.ir.dims import symbol
from attngraph.ir.printer import format_graph
from attngraph.ir.ranges import Ranges

pytestmark = pytest.mark.wide

AUTO = {0: Dim.AUTO, 1: Dim.AUTO}


class Counted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor([float(place) for place in range(x.shape[1])])[:, None]


class Gathered(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.gather(x, 1, index[..., None].expand(-1, -1, 16)) * 2


class Picky(nn.Module):
    """What torch.export can't see: eager takes equal lengths only."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            assert x.shape[1] == y.shape[1], "lengths differ"
        return x * 2, y * 3


class Columns(nn.Module):
    """Each column has categories of its own, in a table of all: FT-Transformer's embedding."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__()
        self.table = nn.Embedding(sum(numbers), 8)
        self.register_buffer("first", torch.tensor([0, *numbers[:-1]]).cumsum(0))

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.table(rows + self.first)
        return found.flatten(1)


class Passing(nn.Module):
    def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
        return x * kwargs["scale"] + kwargs["bias"]


class Subsampled(nn.Module):
    """A norm, not behind a convolution, of a length that two strides left."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.halve = nn.Conv1d(4, 4, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(torch.sin(self.halve(self.halve(x))))
        return found


class Nearest(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return y.gather(1, x.topk(4, largest=False).indices)


def test_rows_of_other_batches_keep_the_categories_of_their_columns() -> None:
    module = Columns((7, 2, 5)).eval()
    rows = torch.tensor([[6, 1, 4], [0, 0, 3]])
    optimized = attngraph.optimize(module, (rows,), dynamic_shapes=({0: Dim.AUTO},))
    other = torch.tensor([[5, 0, 2], [6, 1, 4], [1, 1, 0], [2, 0, 1]])
    torch.testing.assert_close(optimized(other), module(other))


class Packed(nn.Module):
    """A recurrence that ends where each row does: its lengths are no longer than the axis."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        found: Tensor = self.cells(packed)[0]
        return nn.utils.rnn.pad_packed_sequence(found, True, total_length=x.shape[1])[0]


class Placed(nn.Module):
    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return x[torch.arange(2)[:, None], -1 - places]


@pytest.mark.parametrize("module", [Packed(), Placed()], ids=["lengths", "places"])
def test_lengths_and_places_end_where_a_shorter_axis_does(module: nn.Module) -> None:
    numbers, length = torch.tensor([[5, 2, 1]] * 2), Dim("length", min=1, max=40)
    if isinstance(module, Packed):
        numbers = torch.tensor([6, 3])
    module = module.eval()
    shapes = ({1: length}, None)
    optimized = attngraph.optimize(module, (torch.randn(2, 6, 4), numbers), dynamic_shapes=shapes)
    assert any("smaller integers" in note for note in optimized.report.notes)
    for size in (6, 9, 3):
        x, given = torch.randn(2, size, 4), numbers.clamp(max=size - 1)
        torch.testing.assert_close(optimized(x, given), module(x, given))


@pytest.mark.parametrize("nested", [False, True])
def test_what_forward_takes_in_its_keywords_has_dims_by_name(nested: bool) -> None:
    def given(rows: int, tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        x, scale = torch.randn(rows, tokens, 8), torch.randn(rows, tokens, 1)
        return x, {"scale": scale, "bias": torch.randn(rows, tokens, 8)}

    module, (x, named) = Passing(), given(3, 5)
    batch, seq = Dim("batch"), Dim("seq")
    inner = {name: {0: batch, 1: seq} for name in named}
    shapes = {"x": {0: batch, 1: seq}, **({"kwargs": inner} if nested else inner)}
    optimized = attngraph.optimize(module, (x,), kwargs=named, dynamic_shapes=shapes)
    assert "forward" not in vars(module)
    wide, named = given(4, 7)
    torch.testing.assert_close(optimized(wide, **named), module(wide, **named))


class HalvedAndBack(nn.Module):
    """What strides left is brought back to the length there was, and to twice its own."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        half = self.down(x)
        return F.interpolate(half, size=x.shape[-2:]), self.up(F.avg_pool2d(half, 2))


def test_sizes_that_strides_left_are_no_guess_and_their_quotients_are_compared() -> None:
    torch.manual_seed(0)
    module = HalvedAndBack().eval()
    optimized = attngraph.optimize(
        module,
        (torch.randn(2, 3, 16, 12),),
        dynamic_shapes=(dict.fromkeys((0, 2, 3), Dim.AUTO),),
    )
    for shape in ((1, 3, 15, 21), (3, 3, 9, 8)):
        x = torch.randn(shape)
        for found, expected in zip(optimized(x), module(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_norm_of_a_length_that_strides_left_is_lowered() -> None:
    module = Subsampled().eval()
    optimized = attngraph.optimize(
        module, (torch.randn(2, 4, 40),), dynamic_shapes=({0: Dim.AUTO, 2: Dim.AUTO},)
    )
    for length in (41, 33, 57, 7, 10):
        x = torch.randn(3, 4, length)
        torch.testing.assert_close(optimized(x), module(x), rtol=1e-5, atol=1e-5)


def test_of_equal_numbers_either_may_be_taken_and_the_error_says_so() -> None:
    with pytest.raises(AttngraphError, match=r"some are equal.*stable=True"):
        attngraph.optimize(Nearest(), (torch.zeros(2, 64), torch.randn(2, 64)))


def test_a_size_that_becomes_a_constant_is_fixed_and_told() -> None:
    module, x = Counted(), torch.randn(3, 7, 16)
    optimized = attngraph.optimize(module, (x,), dynamic_shapes=(AUTO,))
    (note,) = (note for note in optimized.report.notes if "stays 7" in note)
    assert "axis 1" in note
    assert "test_auto_dims.py" in note
    wider = torch.randn(5, 7, 16)
    torch.testing.assert_close(optimized(wider), module(wider))
    with pytest.raises(AttngraphError, match="7"):
        optimized(torch.randn(3, 8, 16))


def test_a_named_dim_that_becomes_a_constant_is_refused() -> None:
    with pytest.raises(CaptureError, match="can't be dynamic"):
        attngraph.optimize(Counted(), (torch.randn(3, 7, 16),), dynamic_shapes=({1: Dim("n")},))


def test_an_index_stays_within_the_axis_that_it_chooses_from() -> None:
    index = torch.tensor([[6, 0, 3, 5, 1, 2, 6]] * 3)
    optimized = attngraph.optimize(
        Gathered(), (torch.randn(3, 7, 16), index), dynamic_shapes=(AUTO, AUTO)
    )
    x, other = torch.randn(4, 9, 16), torch.tensor([[8, 1]] * 4)
    torch.testing.assert_close(optimized(x, other), Gathered()(x, other))


def test_dims_that_the_model_takes_together_are_checked_together() -> None:
    given = (torch.randn(3, 7, 16), torch.randn(3, 7, 16))
    optimized = attngraph.optimize(Picky(), given, dynamic_shapes=(AUTO, AUTO))
    (note,) = (note for note in optimized.report.notes if "x_1 = y_1" in note)
    assert "one Dim" in note
    assert optimized.report.parity is not None
    cases = {output.case for output in optimized.report.parity.outputs}
    assert len(cases) > 1  # other sizes than the sample's


def test_a_model_that_fails_at_other_sizes_is_refused() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                assert x.shape[1] == 7, "seven"
            return x * 2

    with pytest.raises(AttngraphError, match="itself fails"):
        attngraph.optimize(Fixed(), (torch.randn(3, 7, 16),), dynamic_shapes=(AUTO,))


class Quotients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        windows = x.shape[1] / 8
        if windows.is_integer() and windows > 1.5:
            return x * 2
        return x * 3


def test_conditions_on_quotients_are_of_whole_numbers() -> None:
    optimized = attngraph.optimize(Quotients(), (torch.randn(2, 16),), dynamic_shapes=(AUTO,))
    x = torch.randn(3, 24)
    torch.testing.assert_close(optimized(x), Quotients()(x))
    for size in (8, 20):
        with pytest.raises(AttngraphError, match="x_1"):
            optimized(torch.randn(3, size))


# What torch simplifies for sizes from 2 on, and what is undefined where a divisor is 0.
FROM_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "positions": lambda x: x + (torch.arange(x.shape[1]) / max(x.shape[1] - 1, 1))[:, None],
    "least": lambda x: x * min(x.shape[1], 2),
    "largest": lambda x: x * max(x.shape[1], 2),
    "batch": lambda x: x.cumsum(1) / max(x.shape[0] - 1, 1),
    "remainder": lambda x: x * (1 % x.shape[1] + 2),
}


class Whole(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("name", FROM_ONE)
def test_what_holds_from_two_on_is_not_taken_for_granted_at_one(name: str) -> None:
    module = Whole(FROM_ONE[name])
    dims = ({0: Dim.AUTO, 1: Dim.AUTO},)
    compiled = attngraph.optimize(module, (torch.randn(2, 5, 4),), dynamic_shapes=dims)
    for sizes in [(1, 1), (1, 3), (3, 1), (2, 2), (4, 9)]:
        x = torch.randn(*sizes, 4)
        torch.testing.assert_close(compiled(x), module(x))


def test_sizes_for_which_a_condition_divides_by_zero_break_it() -> None:
    n, m = symbol("n"), symbol("m")
    ranges = Ranges({"n": (1, None), "m": (1, None)}, (sympy.Ne(Mod(n, m - 2), 0),))
    assert ranges.broken({"n": 5, "m": 2}) == "n % (m - 2) ≠ 0"
    assert not ranges.broken({"n": 5, "m": 4})


def test_a_checked_size_is_looked_for_where_conditions_leave_few() -> None:
    found = choose_sizes({"n": 64}, {"n": (1, None)}, lambda sizes: sizes["n"] % 32 == 0)
    assert [sizes["n"] for sizes in found] == [32, 128]


class Counts(nn.Module):
    """What Python makes of a number that only a run tells, which may be 0 or below."""

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        some = keep.sum().item()
        more = (keep.sum() - 5).item()
        kept = len(x[keep])
        return x / max(some, 1), x * abs(more), x + max(more, 0), x + min(more, 0), x / max(kept, 1)


def test_a_number_of_a_run_is_not_taken_for_a_size() -> None:
    module, dims = Counts(), ({0: Dim("rows")}, {0: Dim("rows")})
    sample = torch.randn(9, 4), torch.ones(9, dtype=torch.bool)
    compiled = attngraph.optimize(module, sample, dynamic_shapes=dims, verify="off")
    for count in (0, 1, 4, 5, 6):
        inputs = torch.randn(7, 4), torch.arange(7) < count
        torch.testing.assert_close(compiled(*inputs), module(*inputs))
    text = str(format_graph(compiled.graph))
    assert "in -9223372036854775808.." in text
    assert format_graph(parse(text)) == text


class Windows(nn.Module):
    """Local attention over windows of 4 tokens and those before them; the number is the queries'.

    With one window there is nothing before it: a model of its own there is written with `special`.
    """

    def __init__(self, special: bool = False, bias: Tensor | float = 0.0) -> None:
        super().__init__()
        self.special, self.bias = special, bias

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        k, v = q if k is None else k, q if v is None else v
        batch, length, width = q.shape
        windows = length // 4
        assert length % 4 == 0
        assert k.shape[1] % 4 == 0
        q, k, v = (x.reshape(batch, windows, -1, width) for x in (q, k, v))
        k, v = (torch.cat([torch.zeros_like(x[:, :1]), x], 1) for x in (k, v))
        k, v = (torch.cat([x[:, :-1], x[:, 1:]], 2) for x in (k, v))
        if self.special and windows == 1:
            return (q @ k.transpose(-1, -2) @ v).reshape(batch, length, width)
        weights = torch.softmax(q @ k.transpose(-1, -2) + self.bias, -1)
        return (weights @ v).reshape(batch, length, width)


@pytest.mark.parametrize("special", [False, True])
def test_a_number_of_windows_is_a_size_of_which_one_is_tried(special: bool) -> None:
    """torch takes it to be 2 or more; whether one window computes the same is found out."""
    module = Windows(special)
    optimized = attngraph.optimize(module, (torch.randn(2, 8, 4),), dynamic_shapes=(AUTO,))
    assert optimized.report.sites[0].status == "fused"
    assert not [note for note in optimized.report.notes if "stopped" in note]
    demands = [note for note in optimized.report.notes if "model demands it" in note]
    assert special or len(demands) == 1, demands  # not one for each view that torch asked about
    for length in (12, 8, 4):
        x = torch.randn(3, length, 4)
        if special and length == 4:
            with pytest.raises(AttngraphError, match="compiled for sizes"):
                optimized(x)
        else:
            torch.testing.assert_close(optimized(x), module(x))


def test_lengths_that_windows_make_equal_are_told_to_be() -> None:
    """A table of 4 queries and 8 keys leaves one length of keys for each of queries."""
    sample = tuple(torch.randn(2, 8, 4) for _ in range(3))
    module = Windows(bias=torch.randn(4, 8))
    found = capture(module, sample, dynamic_shapes=(AUTO, AUTO, AUTO))
    told = {format_condition(condition) for condition in found.graph.conditions}
    assert {"k_1 == q_1", "q_1 % 4 == 0", "k_1 % 4 == 0"} <= told
    assert not [each for each in told if "k_1" in each and "//" in each and "v_1" not in each]
