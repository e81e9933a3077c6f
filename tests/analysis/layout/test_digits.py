"""Places as they are counted by several axes, read off numbers."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.layout.digits import (
    Axis,
    Digit,
    Placed,
    UnreadError,
    affine,
    digits,
    is_placed,
    placed,
)
from attngraph.analysis.layout.followed import split_places
from attngraph.ir import parse

SIZES = (3, 4, 5)


def _axes() -> list[Axis]:
    index = split_places(torch.arange(60), SIZES)
    return [Axis(n, at, size, size) for n, (at, size) in enumerate(zip(index, SIZES, strict=True))]


@pytest.mark.parametrize(
    ("strides", "start", "size", "expected"),
    [
        ((20, 5, 1), 0, 60, (Digit(0), Digit(1), Digit(2))),
        ((1, 3, 12), 0, 60, (Digit(2), Digit(1), Digit(0))),
        ((0, 5, 1), 0, 20, (Digit(1), Digit(2))),
        ((0, 5, 1), 20, 60, (Digit(1, 4, 12), Digit(2))),  # the second of three packed parts
        ((0, 15, 1), 5, 60, (Digit(1), Digit(2, 5, 15))),  # of parts that alternate
        ((0, 8, 0), 3, 32, (Digit(1), Digit(None, 3, 8))),
        ((0, 0, 0), 0, 1, ()),
    ],
)
def test_axes_are_digits(
    strides: tuple[int, ...], start: int, size: int, expected: tuple[Digit, ...]
) -> None:
    axes = _axes()
    places = torch.full((60,), start)
    for axis, stride in zip(axes, strides, strict=True):
        places = places + stride * axis.at
    assert digits(axes, places, size) == expected
    assert affine(places, torch.stack([a.at for a in axes], dim=1)) == (start, list(strides))


@pytest.mark.parametrize(
    ("places", "size"),
    [
        (lambda a, b, c: a * b, 12),
        (lambda a, b, c: 19 - 5 * b - c, 20),  # from the end
        (lambda a, b, c: b + c, 8),  # on top of each other
        (lambda a, b, c: 5 * b + c + (a == 2), 21),  # but for one place
    ],
)
def test_what_no_digits_count_is_unread(places: object, size: int) -> None:
    assert callable(places)
    axes = _axes()
    with pytest.raises(UnreadError):
        digits(axes, places(*(axis.at for axis in axes)), size)


def test_a_value_is_placed_by_what_its_dims_are_in_the_graph() -> None:
    graph = parse("graph @main {\n  dim n = 3 in 1..\n  input %x : f32[n, 20]\n  return %x\n}")
    (value,) = graph.inputs
    first, *others = _axes()
    (n,) = value.shape[:1]
    axes = [Axis(first.axis, first.at, n, 3), *others]
    index = (first.at, 5 * others[0].at + others[1].at)
    found = placed(value, index, (3, 20), axes)
    assert found == Placed(value, ((Digit(0),), (Digit(1), Digit(2))))
    assert is_placed(found, index, axes)
    assert not is_placed(found, (first.at, index[1].flip(0)), axes)
    with pytest.raises(UnreadError):  # as long as the sample, and no longer
        placed(value, index, (3, 20), _axes())
