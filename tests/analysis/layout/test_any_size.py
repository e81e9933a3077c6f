"""Sizes as unknowns: whatever is solved, the numbers of the graph stay a solution."""

from __future__ import annotations

import math
import random

import pytest

from attngraph.analysis.layout.any_size import Sizes
from attngraph.ir import Dim
from attngraph.ir.dims import symbol


def test_large_sizes_are_unknown_and_small_ones_stay() -> None:
    sizes = Sizes(["seq"])
    assert sizes.fresh(16) == 16
    assert sizes.fresh(symbol("seq")) == symbol("seq")
    large = sizes.fresh(17)
    assert not isinstance(large, int)
    assert sizes.number(large) == 17
    assert len(sizes.unknowns) == 1


def test_unified_sizes_are_one() -> None:
    sizes = Sizes([])
    first, second, third = (sizes.fresh(64) for _ in range(3))
    sizes.unify(first, second)
    sizes.unify(second, third)
    assert sizes.resolved(first) == sizes.resolved(second) == sizes.resolved(third)
    assert len(sizes.unknowns) == 1


def test_a_number_makes_what_is_one_with_it_that_number() -> None:
    sizes = Sizes([])
    first, second = sizes.fresh(64), sizes.fresh(64)
    sizes.unify(first, second)
    sizes.unify(second, 64)
    assert sizes.resolved(first) == 64
    assert sizes.unknowns == []


def test_sums_are_solved_and_what_cannot_be_solved_is_pinned() -> None:
    sizes = Sizes([])
    past, new, total = sizes.fresh(40), sizes.fresh(24), sizes.fresh(64)
    sizes.unify(total, past + new)
    assert sizes.resolved(total) == sizes.resolved(past + new)
    assert sizes.unknowns
    square, whole = sizes.fresh(32), sizes.fresh(1024)
    sizes.unify(square * square, whole)
    assert sizes.number(square) ** 2 == sizes.number(whole)


def test_dims_of_the_graph_are_no_unknowns() -> None:
    sizes = Sizes(["seq", "batch"])
    seq, batch = symbol("seq"), symbol("batch")
    assert sizes.number(seq) != sizes.number(batch)
    large = sizes.fresh(sizes.number(seq))
    sizes.unify(large, seq)
    assert sizes.resolved(large) == seq


@pytest.mark.parametrize("seed", range(40))
def test_what_is_solved_keeps_the_numbers(seed: int) -> None:
    """Random unifications that hold for the numbers, and reshapes: no number moves."""
    draw, sizes = random.Random(seed), Sizes(["seq"])
    known: list[tuple[Dim, int]] = [(sizes.fresh(n), n) for n in (20, 24, 48, 96, 480, 20, 48)]
    for _ in range(6):
        (a, left), (b, right) = draw.choice(known), draw.choice(known)
        kind = draw.randrange(3)
        if kind == 0:
            same = draw.choice([dim for dim, number in known if number == left])
            sizes.unify(a, same)
        elif kind == 1:
            known.append((sizes.resolved(a * b), left * right))
        else:
            outer = [part for part in (4, left * right // 4) if left % 4 == 0 or right % 4 == 0]
            if outer and math.prod(outer) == left * right:
                found = sizes.regrouped([a, b], outer)
                assert [sizes.number(dim) for dim in found] == outer
    for dim, number in known:
        assert sizes.number(dim) == number


@pytest.mark.parametrize(
    ("inner", "outer"),
    [((30, 64), (30, 4, 16)), ((30, 4, 16), (30, 64)), ((30, 64), (1920,)), ((1, 30), (30, 1))],
)
def test_a_reshape_keeps_the_axes_that_it_doesnt_touch(
    inner: tuple[int, ...], outer: tuple[int, ...]
) -> None:
    sizes = Sizes([])
    dims = [sizes.fresh(size) for size in inner]
    found = sizes.regrouped(dims, outer)
    assert [sizes.number(dim) for dim in found] == list(outer)
    if inner[0] == outer[0]:
        assert sizes.resolved(found[0]) == sizes.resolved(dims[0])
    back = sizes.regrouped(found, inner)
    assert [sizes.resolved(dim) for dim in back] == [sizes.resolved(dim) for dim in dims]


def test_sizes_for_trials_lie_below_the_numbers() -> None:
    sizes = Sizes([])
    sizes.fresh(64)
    sizes.unify(sizes.fresh(32), 32)
    (info,) = sizes.infos(2).values()
    assert (info.low, info.high) == (2, 64)
