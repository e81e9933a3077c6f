"""Code that pads a sequence to whole chunks takes any length, whichever the sample has."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from attngraph import optimize
from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.sizes.suspects import is_count
from attngraph.ir.conditions import parse_condition

pytestmark = pytest.mark.wide

CHUNK = 8


class Chunks(nn.Module):
    """Attention in chunks and a state over them, as state-space models are computed."""

    def __init__(self, *, differs: bool = False) -> None:
        super().__init__()
        self.differs = differs

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        missing = (CHUNK - length % CHUNK) % CHUNK
        padded = F.pad(x, (0, 0, 0, missing))
        parts = padded.reshape(batch, -1, CHUNK, width)
        within = (parts @ parts.mT / width).softmax(-1) @ parts
        sums = parts.sum(2)
        before = torch.cat([torch.zeros_like(sums[:, :1]), sums.cumsum(1)], 1)[:, :-1]
        made = (within + before.unsqueeze(2)).reshape(batch, -1, width)
        if missing > 0:
            made = made[:, :length] + (1.0 if self.differs else 0.0)
        return made


DIMS: dict[str, Any] = {
    "named": Dim("length"),
    "named to an end": Dim("length", min=2, max=300),
    "auto": Dim.AUTO,
}


@pytest.mark.parametrize(
    ("dim", "sample"),
    [
        *(("named", sample) for sample in (CHUNK, 2 * CHUNK, 21)),
        *(("auto", sample) for sample in (5, CHUNK)),
        ("named", 5),
        ("auto", 2 * CHUNK),
        ("named to an end", 21),
    ],
)
def test_a_length_is_any_number_of_chunks_and_a_part(dim: str, sample: int) -> None:
    """Whether the sample fills its chunks, or one of them, or less than that."""
    model = Chunks().eval()
    optimized = optimize(model, (torch.randn(2, sample, 4),), dynamic_shapes=({1: DIMS[dim]},))
    with torch.no_grad():
        for length in (2, 7, 8, 9, 16, 17, 40, 131):
            x = torch.randn(2, length, 4)
            torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [CHUNK, 21])
def test_a_padded_length_that_is_treated_otherwise_is_refused(length: int) -> None:
    x = torch.randn(2, length, 4)
    with pytest.raises(CaptureError, match="length"):
        optimize(Chunks(differs=True), (x,), dynamic_shapes=({1: Dim("length", min=2)},))


@pytest.mark.parametrize("length", [5, CHUNK])
def test_chunks_that_are_treated_otherwise_take_what_the_trace_holds_for(length: int) -> None:
    model = Chunks(differs=True).eval()
    x = torch.randn(2, length, 4)
    optimized = optimize(model, (x,), dynamic_shapes=({1: Dim.AUTO},))
    for other in (3, 7, 8, 16, 17, 24):
        x = torch.randn(2, other, 4)
        with contextlib.suppress(UsageError):
            torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)


class Viewed(nn.Module):
    """Distances from the last row of each chunk, of the sizes that a view is given but one.

    `open_width` has the length be what the view isn't told.
    """

    def __init__(self, *, factor: float = 1.0, open_width: bool = False) -> None:
        super().__init__()
        self.factor, self.open_width = factor, open_width

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        missing = (CHUNK - (length % CHUNK)) % CHUNK
        if missing > 0:
            x = F.pad(x, (0, 0, 0, missing)) * self.factor
        count = x.shape[1] // CHUNK
        if self.open_width:
            parts = x.mT.reshape(batch, 2, CHUNK, -1).mT
            return (parts - parts[..., -1:]).flatten(1)
        parts = x.view(batch, count, CHUNK, -1)
        return (parts - parts[..., -1:, :]).flatten(1, 2)[:, :length]


@pytest.mark.parametrize("sample", [CHUNK, 3 * CHUNK, 21])
def test_what_a_view_isnt_told_is_a_number(sample: int) -> None:
    """Where the sample leaves nothing missing, torch doesn't see that it fills the chunks, and
    fails; at a few rows more the trace has the padding.
    """
    model = Viewed().eval()
    x = torch.randn(2, sample, 4)
    optimized = optimize(model, (x,), dynamic_shapes=({1: Dim("length", max=99)},))
    for length in (1, 7, 8, 9, 16, 17, 40, 99):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(optimized(x), model(x))


def test_what_a_view_isnt_told_may_be_an_open_size() -> None:
    model = Viewed(open_width=True).eval()
    shapes = ({1: CHUNK * Dim("count", max=9)},)
    optimized = optimize(model, (torch.randn(2, 3 * CHUNK, 4),), dynamic_shapes=shapes)
    for count in (1, 2, 9):
        x = torch.randn(2, count * CHUNK, 4)
        torch.testing.assert_close(optimized(x), model(x))


def test_padding_that_changes_the_rows_is_not_taken_for_none() -> None:
    """The trace at a length with padding isn't the model at the sample's: torch's error stands."""
    x = torch.randn(2, 2 * CHUNK, 4)
    with pytest.raises(CaptureError, match="The size of tensor a"):
        optimize(Viewed(factor=2.0), (x,), dynamic_shapes=({1: Dim("length", max=99)},))


class Cached(nn.Module):
    """Chunks, and the last rows of the input, which are padded if there are fewer."""

    def __init__(self, rows: int, fill: float = 0.0) -> None:
        super().__init__()
        self.chunks, self.rows, self.fill = Chunks(), rows, fill

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        last = x
        if x.shape[1] < self.rows:
            last = F.pad(x, (0, 0, self.rows - x.shape[1], 0)) + self.fill
        return self.chunks(x), last[:, -self.rows :]


@pytest.mark.parametrize(
    ("dim", "sample"),
    [
        ("named", 5),
        pytest.param("named", 2 * CHUNK, marks=pytest.mark.slow),
        ("auto", CHUNK),
        pytest.param("auto", 21, marks=pytest.mark.slow),
    ],
)
def test_a_least_length_is_found_beside_chunks(dim: str, sample: int) -> None:
    """The trace at a longer sample begins at more than that, or doesn't say where it begins."""
    model = Cached(3, fill=1.0).eval()
    optimized = optimize(model, (torch.randn(2, sample, 4),), dynamic_shapes=({1: DIMS[dim]},))
    for length in (3, 4, 7, 8, 9, 16, 40):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)
    with pytest.raises(UsageError, match=r"(at least|≥) 3"):
        optimized(torch.randn(2, 2, 4))
    assert any("can't be 1 or 2" in note for note in optimized.report.notes)


def test_a_least_length_within_a_chunk_leaves_the_counts_of_chunks_alone() -> None:
    model = Cached(9).eval()
    x = torch.randn(2, 21, 4)
    optimized = optimize(model, (x,), dynamic_shapes=({1: Dim("length")},))
    for length in (9, 16, 17, 40):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)
    with pytest.raises(UsageError, match="length ≥ 9"):
        optimized(torch.randn(2, 8, 4))


def test_without_verification_no_other_size_is_traced_and_that_is_told() -> None:
    x, shapes = torch.randn(2, 2 * CHUNK, 4), ({1: Dim("length")},)
    with pytest.raises(CaptureError, match="leave out --verify off"):
        optimize(Chunks().eval(), (x,), dynamic_shapes=shapes, verify="off")


@pytest.mark.parametrize("sample", [CHUNK, 2 * CHUNK])
def test_a_range_that_begins_below_the_least_length_is_refused(sample: int) -> None:
    x = torch.randn(2, sample, 4)
    with pytest.raises(CaptureError, match="length is at least 4 at"):
        optimize(Cached(4).eval(), (x,), dynamic_shapes=({1: Dim("length", min=2)},))
    optimized = optimize(Cached(4).eval(), (x,), dynamic_shapes=({1: Dim("length", min=4)},))
    x = torch.randn(2, 4, 4)
    torch.testing.assert_close(optimized(x)[1], x)


@pytest.mark.parametrize(
    ("length", "chunk", "cached"),
    [
        pytest.param(64, 64, False, marks=pytest.mark.slow),
        pytest.param(16, 64, True, marks=pytest.mark.slow),
        (64, 16, True),
    ],
)
def test_a_mamba_takes_any_length(length: int, chunk: int, cached: bool) -> None:
    """With a cache from 4 on: it keeps that many tokens for its convolution."""
    from transformers import Mamba2Config, Mamba2Model

    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "vocab_size": 50}
    config = Mamba2Config(
        **sizes, n_groups=1, chunk_size=chunk, num_hidden_layers=1, use_cache=cached
    )
    model = Mamba2Model(config).eval()
    shapes = ({1: Dim("length", max=512)},)
    optimized = optimize(model, (torch.randint(50, (1, length)),), dynamic_shapes=shapes)
    if not cached:
        assert [site.code for site in optimized.report.sites] == ["recurrence"]
    with torch.no_grad():
        for other in (4 if cached else 1, 5, chunk - 1, chunk, chunk + 1, 3 * chunk, 3 * chunk + 2):
            ids = torch.randint(50, (1, other))
            wanted = model(ids).last_hidden_state
            actual = optimized(ids)["last_hidden_state"]
            torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)


class Frames(nn.Module):
    """Frames of a signal, in pairs that are set apart again, times a table that may grow."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.frames, self.pairs = nn.Conv1d(1, 4, 10, 5), nn.AvgPool1d(2, 2)
        self.table = torch.arange(rows)[:, None] / 60

    def forward(self, x: Tensor) -> Tensor:
        made = self.frames(x[:, None])
        halved = self.pairs(made)
        length = min(halved.shape[-1], made.shape[-1] // 2)
        again = halved[..., :length].repeat_interleave(2, -1)
        if again.shape[-1] < made.shape[-1]:
            again = F.pad(again, (0, made.shape[-1] - again.shape[-1]))
        if again.shape[-1] > self.table.shape[0]:
            self.table = torch.arange(again.shape[-1])[:, None] / 60
        return made.mT + again.mT * self.table[: again.shape[-1]]


@pytest.mark.parametrize(("samples", "rows"), [(200, 60), (105, 1000)])
def test_frames_of_a_signal_are_odd_or_even_and_more_than_a_table_has(
    samples: int, rows: int
) -> None:
    """The sample's are odd, and even."""
    model = Frames(rows).eval()
    shapes = ({0: Dim("batch"), 1: Dim("samples")},)
    optimized = optimize(model, (torch.randn(2, samples),), dynamic_shapes=shapes)
    for batch, length in ((1, 40), (2, 45), (1, 99), (3, 110), (2, 299), (1, 305), (1, 401)):
        x = torch.randn(batch, length)
        torch.testing.assert_close(optimized(x), Frames.forward(model, x), atol=1e-5, rtol=1e-5)


COUNTS = {
    "(n + 63) // 64 >= 2": True,
    "64 < 64*((n + 63) // 64)": True,
    "3*(n // 4) > 5": True,
    "3*(n // 4) > 6": False,
    "64 <= 64*(n // 4)": False,
    "n - 64*(n // 64) > 0": False,
    "64 < n": False,
}


@pytest.mark.parametrize("text", COUNTS)
def test_which_conditions_ask_for_two_chunks(text: str) -> None:
    assert is_count(parse_condition(text)) is COUNTS[text]
