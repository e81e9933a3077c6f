"""A model may take an object of its own class; what hides tensors is refused."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph.compiling.compiler import optimize
from attngraph.errors import UsageError
from attngraph.frontend.capture import capture


@dataclass
class Batch:
    states: Tensor
    padding: Tensor
    scale: float = 2.0


class Hides:
    """Of which a tensor is outside of its attributes."""

    def __init__(self, states: Tensor) -> None:
        self.states, self.other = states, weakref.ref(states)


class Attends(nn.Module):
    def forward(self, batch: Any) -> Tensor:
        x = batch.states
        scores = (x @ x.mT) / batch.scale
        return scores.masked_fill(batch.padding[:, None], -torch.inf).softmax(-1) @ x


class Nested(nn.Module):
    def forward(self, batches: list[Batch], more: dict[str, Batch]) -> Tensor:
        return batches[0].states * more["last"].states


def _batch(size: int, length: int, **rest: Any) -> Batch:
    padding = torch.zeros(size, length, dtype=torch.bool)
    padding[:, length // 2 + 1 :] = True
    return Batch(torch.randn(size, length, 8), padding, **rest)


@pytest.mark.parametrize(
    "shapes",
    [
        {"states": {0: "b", 1: "t"}, "padding": {0: "b", 1: "t"}},
        [{0: "b", 1: "t"}, {0: "b", 1: "t"}, None],
        Batch({0: "b", 1: "t"}, {0: "b", 1: "t"}, None),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_an_object_is_its_attributes(shapes: Any, by_name: bool) -> None:
    given = {"batch": shapes} if by_name else (shapes,)
    captured = capture(Attends(), (_batch(2, 4),), dynamic_shapes=given)
    assert captured.input_names == ("batch_states", "batch_padding")
    assert captured.dynamic == {(0, 0): "b", (0, 1): "t", (1, 0): "b", (1, 1): "t"}


def test_a_call_takes_such_an_object() -> None:
    shapes = ({"states": {0: "b", 1: "t"}, "padding": {0: "b", 1: "t"}},)
    optimized = optimize(Attends(), (_batch(2, 4),), dynamic_shapes=shapes)
    given = _batch(3, 9)
    torch.testing.assert_close(optimized(given), Attends()(given))
    with pytest.raises(UsageError, match=r"holds 3\.0 where the model was compiled for 2\.0"):
        optimized(_batch(3, 9, scale=3.0))


def test_objects_in_lists_and_dicts() -> None:
    batch, shape = Dim("batch"), {"states": {0: "batch"}}
    shapes: Any = ([{"states": {0: batch}}], {"last": shape})
    captured = capture(Nested(), ([_batch(3, 4)], {"last": _batch(3, 4)}), dynamic_shapes=shapes)
    assert set(captured.dynamic.values()) == {"batch"}


def test_an_attribute_that_it_lacks() -> None:
    with pytest.raises(UsageError, match=r"has 'mask' for an input of class Batch.* scale"):
        capture(Attends(), (_batch(2, 4),), dynamic_shapes=({"mask": {0: "b"}},))


def test_what_hides_tensors_says_so() -> None:
    with pytest.raises(UsageError, match=r"class Hides, which may hold tensors beside its attr"):
        capture(Attends(), (Hides(torch.randn(2, 4, 8)),), dynamic_shapes=({"states": {0: "b"}},))
