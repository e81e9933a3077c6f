"""What a model returns beside tensors is the same for all inputs, or it is refused."""

from __future__ import annotations

import itertools
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError, ParityError

_calls = itertools.count()


class Sign(Enum):
    ABOVE = 1
    BELOW = 2


class ByValue(nn.Module):
    """(B, S) to its softmax, and what is said of its values."""

    def __init__(self, above: Any, below: Any) -> None:
        super().__init__()
        self.above, self.below = above, below

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return x.softmax(-1), self.above if x.sum() > 0 else self.below


class BySize(ByValue):
    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return x.softmax(-1), self.above if x.shape[1] > 8 else self.below


class Told:
    def __init__(self, weights: Tensor, sign: Sign) -> None:
        self.weights, self.sign = weights, sign


class Named(ByValue):
    def forward(self, x: Tensor) -> Any:
        return {self.above if x.sum() > 0 else self.below: x.softmax(-1)}


class InAnObject(nn.Module):
    def __init__(self, above: Sign) -> None:
        super().__init__()
        self.above = above

    def forward(self, x: Tensor) -> list[Told]:
        return [Told(x.softmax(-1), self.above if x.sum() > 0 else Sign.BELOW)]


class Counts(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x.softmax(-1), next(_calls)


SAID = [("above", "below"), (1, 0), (1.5, None), (Sign.ABOVE, Sign.BELOW)]


@pytest.mark.parametrize(("above", "below"), SAID)
def test_what_depends_on_values_is_refused(above: Any, below: Any) -> None:
    """The file said the same of all inputs, and a note that both sides are equal."""
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match="its sides return different things"):
        attngraph.optimize(ByValue(above, below), (torch.randn(2, 5),))


@pytest.mark.parametrize(("above", "below"), SAID)
def test_what_depends_on_a_size_bounds_it(above: Any, below: Any) -> None:
    shapes = ({1: Dim("length", max=32)},)
    with pytest.raises(CaptureError, match="the model demands length is at most 8"):
        attngraph.optimize(BySize(above, below), (torch.randn(2, 5),), dynamic_shapes=shapes)
    shapes = ({1: Dim("length", min=9, max=32)},)
    x = torch.randn(2, 12)
    found = attngraph.optimize(BySize(above, below), (x,), dynamic_shapes=shapes)
    assert found(x)[1] == above


def test_what_is_the_same_on_both_sides_is_none_that_depends() -> None:
    x = torch.randn(2, 5)
    found = attngraph.optimize(ByValue("own", "own"), (x,))
    assert found(x)[1] == found(-x)[1] == "own"


def test_what_changes_from_call_to_call_is_no_function_of_the_inputs() -> None:
    x = torch.randn(2, 5)
    assert isinstance(attngraph.optimize(Counts(), (x,))(x)[1], int)


def test_an_attribute_that_depends_on_values_is_refused() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5)
    with pytest.raises(CaptureError, match="its sides return different things"):
        attngraph.optimize(InAnObject(Sign.ABOVE), (x,))
    assert attngraph.optimize(InAnObject(Sign.BELOW), (x,))(x)[0].sign is Sign.BELOW


def test_numbers_of_numpy_are_numbers() -> None:
    x = torch.randn(2, 5)
    found = attngraph.optimize(ByValue(np.float64(0.5), 0.5), (x,))
    assert found(x)[1] == found(-x)[1] == 0.5


def test_names_that_depend_on_values_are_refused() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5)
    with pytest.raises(CaptureError, match="its sides return different things"):
        attngraph.optimize(Named("above", "below"), (x,))
    assert list(attngraph.optimize(Named("own", "own"), (x,))(x)) == ["own"]


def test_a_text_that_is_made_of_a_size_is_refused() -> None:
    """A trace has the symbol's own name in it."""

    class Says(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, str]:
            return x.softmax(-1), f"{x.shape[0]} rows"

    shapes = ({0: Dim("batch", max=9)},)
    with pytest.raises(ParityError, match="returns '5 rows' for some inputs, and a file"):
        attngraph.optimize(Says(), (torch.randn(5, 4),), dynamic_shapes=shapes)
    assert attngraph.optimize(Says(), (x := torch.randn(5, 4),))(x)[1] == "5 rows"
