"""Linear attention whose decays are a table of rounded powers: one operator, by exact powers.

A table that holds anything else in one entry, however small, is no decay, and stays.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph

pytestmark = pytest.mark.wide
HEADS, WIDTH, TOKENS, MOST = 2, 8, 24, 300


def powers(*bases: float, tokens: int = TOKENS) -> Tensor:
    """λ^(i − j) from the diagonal on, rounded to float32: (H, T, T)."""
    apart = _apart(tokens)
    base = torch.tensor(bases, dtype=torch.float64)[:, None, None]
    return (base ** apart.clamp(min=0) * (apart >= 0)).float()


def _apart(tokens: int) -> Tensor:
    place = torch.arange(tokens)
    return place[:, None] - place[None]


class Retention(nn.Module):
    """(q kᵀ ∘ table) v, of a table that is cut to the length."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.packed = nn.Linear(16, 3 * HEADS * WIDTH)
        self.register_buffer("table", table)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            part.unflatten(2, (HEADS, WIDTH)).transpose(1, 2)
            for part in self.packed(x).chunk(3, dim=2)
        )
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        length = x.shape[1]
        scores = q @ k.transpose(-1, -2) * self.table[:, :length, :length]
        return (scores @ v).transpose(1, 2).flatten(2)


class Contracted(Retention):
    """As fla's naive retention: three factors in one product."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = torch.einsum("bhqd,bhkd,hqk->bhqk", q, k, self.table)
        return torch.einsum("bhqk,bhkd->bqhd", scores, v).flatten(2)


def _assert_right(found: Tensor, expected: Tensor) -> None:
    """Up to what sums of some hundred float32 numbers are rounded by."""
    size = float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6 * size)


def _fused(model: nn.Module, *, tokens: int = TOKENS, to: int | None = None) -> bool:
    """Whether it is one operator, of `tokens` or of any number up to `to`; and it is right."""
    dims = None if to is None else ({1: Dim("length", max=to)},)
    sample = (torch.randn(2, tokens, 16),)
    optimized = attngraph.optimize(model.eval(), sample, dynamic_shapes=dims)
    for length in [tokens] if to is None else [1, 2, 9, tokens, to]:
        x = torch.randn(2, length, 16)
        _assert_right(optimized(x), model(x))
    return "recurrence" in [s.code for s in optimized.report.sites if s.status == "fused"]


@pytest.mark.parametrize("kind", [Retention, Contracted])
@pytest.mark.parametrize(
    "bases",
    [(0.9, 0.97), (1.0, 1 - 1e-5), (1 - 2**-5, 1 - 2**-6), (0.03, 0.5)],
    ids=["plain", "hardly", "retnet", "fast"],
)
def test_a_table_of_powers_is_a_decay(kind: type[Retention], bases: tuple[float, ...]) -> None:
    assert _fused(kind(powers(*bases)))


def test_a_table_computed_in_float32_is_one() -> None:
    slopes = torch.tensor([1.7, 0.013])[:, None, None]
    apart = _apart(TOKENS)
    assert _fused(Retention(torch.where(apart >= 0, -slopes * apart, -torch.inf).exp()))


def test_a_table_is_cut_to_any_length() -> None:
    assert _fused(Retention(powers(0.9, 0.999, tokens=MOST)), to=MOST)


def test_entries_below_the_least_number_are_powers_too() -> None:
    table = powers(0.5, 0.25, tokens=200)
    assert int((table[0, :, 0] == 0).sum()) > 40
    assert _fused(Retention(table), tokens=200)


def _one_entry(table: Tensor) -> Tensor:
    table[1, 20, 3] *= 1.001
    return table


def _rows(table: Tensor) -> Tensor:
    return powers(0.9, 0.97).double().pow(1 + 1e-5 * torch.arange(TOKENS)[:, None]).float()


def _one_diagonal(table: Tensor) -> Tensor:
    return torch.where(_apart(len(table[0])) == 5, table * 0.97, table)


def _one_diagonal_more(table: Tensor) -> Tensor:
    return torch.where(_apart(len(table[0])) == -1, 0.9, table)


def _later_rows(table: Tensor) -> Tensor:
    return torch.cat([powers(1.0, 1.0)[:, :12], powers(1.0, 1 - 1e-5)[:, 12:]], 1)


@pytest.mark.parametrize(
    "change",
    [
        _one_entry,
        _rows,
        _one_diagonal,
        _one_diagonal_more,
        _later_rows,
        lambda table: table.tril(-1),
        lambda table: table.triu(-8),
        lambda table: table.clamp(min=0.5).tril(),
    ],
    ids=["entry", "rows", "diagonal", "ahead", "later", "strict", "band", "floor"],
)
def test_another_table_stays(change: Callable[[Tensor], Tensor]) -> None:
    assert not _fused(Retention(change(powers(0.9, 0.97))))


@pytest.mark.parametrize(
    "change",
    [
        lambda table: torch.where(table < 1e-9, 0.0, table),
        lambda table: torch.where(table < 1e-9, table * 1.001, table),
        lambda table: table.triu(-40),
    ],
    ids=["cut", "scaled", "band"],
)
def test_what_is_too_small_to_show_counts_too(change: Callable[[Tensor], Tensor]) -> None:
    """Powers of ½ are exact, so all else agrees to the last digit."""
    assert _fused(Retention(powers(0.5, 0.25, tokens=64)), tokens=64)
    assert not _fused(Retention(change(powers(0.5, 0.25, tokens=64))), tokens=64)


@pytest.mark.parametrize(
    "bases", [(0.9, 0.999), (0.5, 0.25), (1.0, 1.0)], ids=["rounded", "halves", "ones"]
)
def test_places_beyond_every_trial_count_too(bases: tuple[float, ...]) -> None:
    table = powers(*bases, tokens=MOST).triu(-100)
    assert not _fused(Retention(table), to=MOST)


@pytest.mark.parametrize("lengths", [None, 700])
def test_lightning_attention_of_minimax(lengths: int | None) -> None:
    """Its layers keep their tables in float32, those of a block and of what lies before it."""
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            config = MiniMaxConfig(
                hidden_size=16,
                num_attention_heads=4,
                num_key_value_heads=4,
                head_dim=WIDTH,
                num_hidden_layers=2,
                block_size=8,
                layer_types=["linear_attention"] * 2,
            )
            self.layers = nn.ModuleList(MiniMaxLightningAttention(config, i) for i in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x, None, None)[0]
            return x

    model, dims = Layers().eval(), None if lengths is None else ({1: Dim("length", max=lengths)},)
    optimized = attngraph.optimize(model, (torch.randn(2, 20, 16),), dynamic_shapes=dims)
    fused = [site.code for site in optimized.report.sites if site.status == "fused"]
    assert fused == ["recurrence"] * 2
    for length in [20] if lengths is None else [1, 7, 8, 9, 16, 17, 100, 600]:
        x = torch.randn(2, length, 16)
        _assert_right(optimized(x), model(x))
