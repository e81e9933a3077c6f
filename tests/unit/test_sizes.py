"""Other sizes of the sample: legal values, masks that stay masks, dims that can't be mixed up."""

from __future__ import annotations

import math

import pytest
import torch

from attngraph.checks.sizes import (
    choose_sizes,
    equal_sizes,
    is_mask,
    resized_inputs,
    summed_integers,
)
from attngraph.errors import UsageError

BOTH = {(0, 0): "batch", (0, 1): "seq", (1, 0): "batch", (1, 1): "seq"}


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (2, 8) and a mask with left padding in row 0 and a hole in row 1."""
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    mask[1, 5] = 0
    return torch.arange(16).reshape(2, 8) + 5, mask


def test_the_two_assignments_are_smaller_and_larger_and_tell_dims_apart() -> None:
    shapes = {"batch": 2, "source": 12, "target": 12}
    ranges = {"batch": (1, 16), "source": (2, 64), "target": (2, None)}
    smaller, larger = choose_sizes(shapes, ranges)
    assert smaller["batch"] == 1
    for chosen, sign in ((smaller, -1), (larger, 1)):
        assert all((chosen[name] - size) * sign > 0 for name, size in shapes.items())
        assert math.gcd(chosen["source"], chosen["target"]) == 1
        assert len(set(chosen.values())) == 3
        assert chosen["source"] % 2 == 1
        assert all(chosen[name] >= ranges[name][0] for name in shapes)
    assert larger["batch"] <= 16


@pytest.mark.parametrize("low", [2, 3, 7])
@pytest.mark.parametrize("high", [8, 9, None])
def test_sizes_stay_in_range(low: int, high: int | None) -> None:
    for chosen in choose_sizes({"batch": 8, "s": 8}, {"batch": (low, high), "s": (low, high)}):
        assert all(low <= size <= (high or 10**9) for size in chosen.values())


def test_only_batch_becomes_one() -> None:
    smaller, _ = choose_sizes({"batch": 3, "seq": 6}, {"batch": (1, None), "seq": (1, None)})
    assert smaller["batch"] == 1
    assert smaller["seq"] > 1


def test_fixed_ranges_give_no_further_size() -> None:
    assert choose_sizes({"seq": 4}, {"seq": (4, 4)}) == ()


@pytest.mark.parametrize(("batch", "seq"), [(1, 3), (3, 13), (5, 8), (2, 2), (1, 1)])
def test_values_are_the_samples_own(batch: int, seq: int) -> None:
    ids, mask = sample()
    new_ids, new_mask = resized_inputs((ids, mask), BOTH, {"batch": batch, "seq": seq})
    assert new_ids.shape == new_mask.shape == (batch, seq)
    assert new_ids.dtype == ids.dtype
    assert set(new_ids.flatten().tolist()) <= set(ids.flatten().tolist())
    assert is_mask(new_mask)
    assert new_mask.any(1).all(), "every row still sees a key"


@pytest.mark.parametrize("seq", [5, 7, 21])
def test_left_padding_stays_left_and_the_hole_stays_inside(seq: int) -> None:
    _, mask = resized_inputs(sample(), BOTH, {"batch": 4, "seq": seq})
    for row in (0, 2):
        changes = mask[row].diff().nonzero()
        assert len(changes) == 1, "padding, then tokens"
        assert mask[row, 0] == 0
    for row in (1, 3):
        assert mask[row, 0] == mask[row, -1] == 1
        assert (mask[row] == 0).any()


def test_no_two_rows_are_the_same() -> None:
    ids, _ = resized_inputs(sample(), BOTH, {"batch": 6, "seq": 8})
    assert len({tuple(row) for row in ids.tolist()}) == 6


@pytest.mark.parametrize("fill", [-1e4, -math.inf, torch.finfo(torch.float32).min])
def test_an_additive_mask_stays_one(fill: float) -> None:
    mask = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), fill)
    dynamic = {(0, 2): "seq", (0, 3): "seq"}
    for seq in (1, 3, 11):
        (new,) = resized_inputs((mask,), dynamic, {"seq": seq})
        assert new.shape == (1, 1, seq, seq)
        assert set(new.flatten().tolist()) <= {0.0, fill}
        assert (new.diagonal(dim1=-2, dim2=-1) == 0).all(), "every query still sees itself"


def test_the_same_size_changes_nothing() -> None:
    ids, mask = sample()
    new = resized_inputs((ids, mask), BOTH, {"batch": 2, "seq": 8})
    assert torch.equal(new[0], ids)
    assert torch.equal(new[1], mask)


def test_boxes_keep_their_corners() -> None:
    boxes = torch.tensor([[[1, 2, 9, 8], [3, 4, 5, 6]]])
    (new,) = resized_inputs((boxes,), {(0, 1): "seq"}, {"seq": 5})
    assert {tuple(box) for box in new[0].tolist()} == {(1, 2, 9, 8), (3, 4, 5, 6)}


@pytest.mark.parametrize(
    ("dynamic", "sizes", "message"),
    [
        ({(0, 1): "seq"}, {}, "'seq' was given no size"),
        ({(0, 5): "seq"}, {"seq": 3}, "axis 5 of input 0"),
        ({(0, 0): "n", (0, 1): "n"}, {"n": 3}, "2 in one input and 8 in another"),
    ],
)
def test_dims_that_dont_fit_are_named(
    dynamic: dict[tuple[int, int], str], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        resized_inputs(sample(), dynamic, sizes)


def test_dims_that_were_taken_for_unequal_meet_within_their_ranges() -> None:
    sample = {"b": 3, "s": 9, "t": 7, "u": 5}
    ranges = {"b": (1, None), "s": (1, 64), "t": (1, 8), "u": (1, None)}
    assert equal_sizes(sample, ranges, []) == sample
    assert equal_sizes(sample, ranges, [("s", "t")]) == {**sample, "s": 8, "t": 8}
    met = equal_sizes(sample, ranges, [("s", "u"), ("u", "t")])
    assert met == {"b": 3, "s": 8, "t": 8, "u": 8}


def test_dims_without_a_common_size_stay_apart() -> None:
    sample = {"s": 9, "t": 3}
    assert equal_sizes(sample, {"s": (6, 64), "t": (1, 4)}, [("s", "t")]) == sample


@pytest.mark.parametrize("size", [5, 12, 29])
def test_groups_of_rows_stay_side_by_side(size: int) -> None:
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    (resized,) = resized_inputs((groups,), {(0, 0): "rows"}, {"rows": size})
    assert resized.shape == (size,)
    assert bool((resized.diff() >= 0).all())
    assert resized.unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("values", [[0, 1, 2, 3, 4, 5], [3, 1, 4, 1, 5, 9]])
def test_other_integers_are_repeated(values: list[int]) -> None:
    (resized,) = resized_inputs((torch.tensor(values),), {(0, 0): "n"}, {"n": 9})
    assert resized.tolist() == [*values, *values[:3]]


@pytest.mark.parametrize("ends", [[0, 5, 9, 12], [0, 4, 8, 12], [0, 1, 1, 12]])
@pytest.mark.parametrize("size", [2, 3, 11])
def test_ends_of_packed_sequences_keep_their_order(ends: list[int], size: int) -> None:
    (resized,) = resized_inputs((torch.tensor(ends),), {(0, 0): "n"}, {"n": size})
    assert resized.shape == (size,)
    assert bool((resized.diff() >= 0).all())
    assert resized[[0, -1]].tolist() == [0, 12]


@pytest.mark.parametrize("lengths", [[5, 4, 3], [0, 12], [1, 1, 1, 9], [0, 0]])
@pytest.mark.parametrize("size", [1, 7, 40])
def test_lengths_sum_up_to_a_size(lengths: list[int], size: int) -> None:
    summed = summed_integers(torch.tensor(lengths), size)
    assert summed.shape == (len(lengths),)
    assert bool((summed >= 0).all())
    assert int(summed.sum()) == (size if sum(lengths) else 0)


def test_repeats_of_what_is_sorted_have_no_ties() -> None:
    times = torch.rand(1, 5, generator=torch.Generator().manual_seed(0))
    for untied in (False, True):
        (resized,) = resized_inputs((times,), {(0, 1): "n"}, {"n": 40}, untied=untied)
        assert len(resized.unique()) == (40 if untied else 5)
        torch.testing.assert_close(resized, times.repeat(1, 8), rtol=2e-3, atol=0.0)
    (whole,) = resized_inputs((times.round(),), {(0, 1): "n"}, {"n": 40}, untied=True)
    assert bool((whole == whole.round()).all())
