"""A passed check says what it exercised, and names what it didn't."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.checks.probing import draws_of, shapes_of_mask
from attngraph.checks.roles import Role, roles_of
from attngraph.optimized import Optimized
from attngraph.reports.coverage import Coverage

MASK = torch.ones(2, 6, dtype=torch.bool)


class Attends(nn.Module):
    """(B, S, 16) where `mask` (B, S) is true; the attention counts `share` in the result."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 16)
        self.share = share

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (self.query(x) @ self.key(x).mT).masked_fill(~mask[:, None], -1e9)
        out: Tensor = self.out(x) + self.share * (scores.softmax(-1) @ x)
        return out


def _compiled(module: nn.Module, *args: Tensor) -> tuple[Optimized, Coverage]:
    torch.manual_seed(0)
    optimized = attngraph.optimize(module.eval(), args)
    assert optimized.report.coverage is not None
    return optimized, optimized.report.coverage


def test_a_model_whose_parts_all_count_is_exercised_whole() -> None:
    optimized, coverage = _compiled(Attends(), torch.randn(2, 6, 16), MASK)
    assert str(coverage) == "100 % of 6 parameters and 1 mask exercised"
    assert coverage.whole
    assert optimized.report.notes == []
    assert str(optimized.report).count(str(coverage)) == 1
    said = json.loads(json.dumps(optimized.report.to_dict()))["coverage"]
    assert said["summary"] == str(coverage)
    assert (said["parameters"], said["masks"], said["without"]) == (6, 1, [])


def test_an_attention_times_zero_is_named_by_its_parameters() -> None:
    optimized, coverage = _compiled(Attends(0.0), torch.randn(2, 6, 16), MASK)
    assert str(coverage) == "33 % of 6 parameters and 1 mask exercised"
    assert set(coverage.without) == {"query.weight", "query.bias", "key.weight", "key.bias"}
    (note,) = optimized.report.notes
    assert note.startswith("4 parameters (query.weight, query.bias, key.weight and 1 more) have no")


def test_what_has_no_gradient_is_found_by_trying_it() -> None:
    class Choice(nn.Module):
        """Its only output is an integer; `unused` is read and multiplied by zero."""

        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(16, 9)
            self.unused = nn.Parameter(torch.randn(9))

        def forward(self, x: Tensor) -> Tensor:
            return (self.out(x) + 0 * self.unused).argmax(-1)

    _, coverage = _compiled(Choice(), torch.randn(2, 6, 16))
    assert coverage.without == ["unused"]
    assert coverage.parameters == 3
    assert coverage.unknown == []


def test_a_mask_that_no_input_turns_is_named() -> None:
    class Guards(nn.Module):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            impossible = ids + 100 < ids
            return (x @ x.mT).masked_fill(impossible[:, None], -1e9).softmax(-1) @ x

    optimized, coverage = _compiled(Guards(), torch.randn(2, 6, 16), torch.arange(12).view(2, 6))
    assert coverage.masks == 1
    assert len(coverage.halves) == 1
    assert not coverage.whole
    assert any("of ids, was only ever false" in note for note in optimized.report.notes)
    assert "test_coverage.py" in coverage.halves[0]


@pytest.mark.parametrize("sample", [True, False])
def test_a_flag_is_tried_both_ways(sample: bool) -> None:
    class Flagged(nn.Module):
        def forward(self, x: Tensor, causal: Tensor) -> Tensor:
            seen = torch.ones(6, 6, dtype=torch.bool).tril() | ~causal
            return (x @ x.mT).masked_fill(~seen, -1e9).softmax(-1) @ x

    optimized, coverage = _compiled(Flagged(), torch.randn(2, 6, 16), torch.tensor(sample))
    assert coverage.halves == []
    assert not any("only ever" in note for note in optimized.report.notes)


def test_an_attention_of_one_key_and_an_output_of_one_value_are_named() -> None:
    class Single(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            last = x[:, -1:]
            scores = (x @ last.mT).softmax(-1)
            return scores @ last, torch.full((2, 3), 0.5) + 0 * x[:, 0, :3]

    optimized, _ = _compiled(Single(), torch.randn(2, 6, 16))
    notes = optimized.report.notes
    assert any(note.startswith("The output output_1 is 0.5 in every element") for note in notes)
    fused = optimized.report.fused
    assert fused == sum(note.startswith("No row of the attention at") for note in notes)


def test_inputs_that_the_model_rejects_are_counted() -> None:
    class Few(nn.Module):
        """Indexes a table of 50 rows, and a smaller one that its caller's ids stay within."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 16)
            self.small = nn.Embedding(60, 16)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.table(ids) + self.small(ids * 2)
            return out

    optimized, coverage = _compiled(Few(), torch.arange(12).view(2, 6))
    assert (coverage.rejected, coverage.drawn) == (1, 1)
    assert "fails on 1 of 1 sets of inputs that the check made" in optimized.report.notes[0]


def _roles(module: nn.Module, *args: Tensor) -> list[Role]:
    return roles_of(attngraph.capture(module, args), args)


class Reads(nn.Module):
    """Every kind of input: ids and a pad id, positions, lengths, segments, a bias, floats."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)

    def forward(
        self, ids: Tensor, lengths: Tensor, segments: Tensor, bias: Tensor, x: Tensor
    ) -> Tensor:
        hidden = self.table(ids) + x
        keys = torch.arange(ids.shape[1]) < lengths[:, None]
        keys = keys & (ids != 5) & (x.abs().sum(-1) != 0)
        same = segments[:, None, :] == segments[:, :, None]
        scores = hidden @ hidden.mT + bias
        return scores.masked_fill(~(keys[:, None] & same), -1e9).softmax(-1) @ hidden


READ = (
    torch.randint(6, 12, (2, 6)),
    torch.tensor([6, 6]),
    torch.zeros(2, 6, dtype=torch.int64),
    torch.zeros(2, 6, 6),
    torch.randn(2, 6, 16),
)


def test_what_an_input_is_for_is_read_off_the_graph() -> None:
    ids, lengths, segments, bias, x = _roles(Reads(), *READ)
    assert (ids.rows, ids.marks) == (40, [5])
    assert lengths.length
    assert segments.segment
    assert (bias.visible, bias.hidden) == (0.0, torch.finfo(torch.float32).min)
    assert x.tested
    assert len(draws_of([ids, lengths, segments, bias, x], READ)) == 4


@pytest.mark.parametrize(
    ("seen", "hidden"),
    [
        (lambda mask: mask > -1.0, torch.finfo(torch.float32).min),
        (lambda mask: mask >= 0, torch.finfo(torch.float32).min),
        (lambda mask: ~(mask < 0), torch.finfo(torch.float32).min),
        (lambda mask: ~(mask >= 0.5), 1.0),
        (lambda mask: mask < 1, 1.0),
    ],
)
def test_what_hides_in_a_float_mask_of_zeros_is_what_its_comparison_tells(
    seen: Callable[[Tensor], Tensor], hidden: float
) -> None:
    class Compares(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scores = (x @ x.mT).masked_fill(~seen(mask)[:, None], -1e9)
            return scores.softmax(-1) @ x

    _, role = _roles(Compares(), torch.randn(2, 6, 16), torch.zeros(2, 6))
    assert {role.visible, role.hidden} == {0.0, hidden}


def test_every_kind_of_mask_is_seen_both_ways() -> None:
    _, coverage = _compiled(Reads(), *READ)
    assert coverage.halves == []
    assert coverage.masks == 5
    used, rows = coverage.tables["ids"]
    assert rows == 40
    assert used > 6


@pytest.mark.parametrize("shape", [(4, 7), (4, 1, 1, 7), (4, 2, 5, 7), (9, 3)])
def test_the_shapes_of_masks(shape: tuple[int, ...]) -> None:
    hidden = shapes_of_mask(shape, False, 0)
    assert hidden.shape == shape
    rows = hidden.reshape(shape[0], -1, shape[-1])[:, 0]
    assert rows[0, 0]
    assert not rows[0, -1]
    assert rows[1, -1]
    assert not rows[1, 0]
    assert rows[2, 1]
    assert not rows[2, 0]
    assert not rows[3].any()
    whole = shapes_of_mask(shape, True, 0).all(-1)
    assert whole.any()
    assert not whole.all()
