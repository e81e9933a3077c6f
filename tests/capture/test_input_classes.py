"""A model may take an object of its own class; what hides tensors is refused."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

from attngraph.compiling.compiler import optimize
from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.capture import capture


@dataclass
class Batch:
    states: Tensor
    padding: Tensor
    scale: float = 2.0


@dataclass(frozen=True, slots=True)
class Frozen:
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


class Mode(enum.Enum):
    PLAIN = 1
    CAUSAL = 2


@dataclass
class Settings:
    states: Tensor
    mode: Mode = Mode.CAUSAL
    rows: slice = field(default_factory=lambda: slice(0, 2))


class Chooses(nn.Module):
    """By arguments that are neither tensors nor numbers."""

    def forward(
        self,
        x: Tensor,
        mode: Any = Mode.PLAIN,
        dtype: Any = None,
        act: Any = None,
        like: Any = None,
    ) -> Tensor:
        scores = (x @ x.mT).to(dtype)
        if mode is Mode.CAUSAL:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
        y = act(scores.softmax(-1) @ x.to(dtype))
        return y[like] if isinstance(like, slice) else y.reshape(-1, like.numel())


class OfSettings(nn.Module):
    def forward(self, given: Settings) -> Tensor:
        mixed: Tensor = Chooses()(given.states, given.mode, torch.float32, torch.tanh, given.rows)
        return mixed


def _settings(size: int) -> Settings:
    return Settings(torch.randn(size, 4, 8))


@pytest.mark.parametrize("like", [slice(0, 2), torch.Size([2, 4])], ids=["slice", "size"])
def test_what_is_no_tensor_and_no_number_is_a_constant(like: Any) -> None:
    """A member of an Enum is asked for by `is`, so it has to stay the one that it is."""
    rest: tuple[Any, ...] = (Mode.CAUSAL, torch.float32, torch.tanh, like)
    shapes = ({0: "b", 1: "t"}, None, None, None, None)
    optimized = optimize(Chooses(), (torch.randn(2, 5, 8), *rest), dynamic_shapes=shapes)
    for size in ((3, 9, 8), (4, 2, 8)):
        x = torch.randn(size)
        torch.testing.assert_close(optimized(x, *rest), Chooses()(x, *rest))
    for at, other in enumerate((Mode.PLAIN, torch.float64, torch.relu, slice(0, 1))):
        changed = [*rest[:at], other, *rest[at + 1 :]]
        with pytest.raises(UsageError, match="where the model was compiled for"):
            optimized(torch.randn(2, 5, 8), *changed)


def test_a_member_of_an_enum_in_an_object_is_itself() -> None:
    shapes = ({"states": {0: "b"}},)
    optimized = optimize(OfSettings(), (_settings(3),), dynamic_shapes=shapes)
    given = _settings(5)
    torch.testing.assert_close(optimized(given), OfSettings()(given))


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (nn.Tanh(), UsageError, "An input is a Tanh, which is a module: make it an attribute"),
        (
            {1, 2},
            CaptureError,
            "An input of Chooses is or holds a set, in which torch.export finds",
        ),
    ],
    ids=["module", "set"],
)
def test_what_is_no_input_is_named(given: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        capture(Chooses(), (torch.randn(2, 5, 8), given, torch.float32, torch.tanh, slice(0, 1)))


@dataclass
class States(ModelOutput):  # type: ignore[misc]
    last: Tensor | None = None
    padding: Tensor | None = None


class Named:
    """Of which torch's pytree knows no names: its author gave none."""

    def __init__(self, parts: dict[str, Tensor]) -> None:
        self.parts = parts


pytree.register_pytree_node(
    Named,
    lambda given: (list(given.parts.values()), list(given.parts)),
    lambda values, names: Named(dict(zip(names, values, strict=True))),
)


class OfStates(nn.Module):
    def forward(self, given: States, more: dict[str, list[Tensor]]) -> Tensor:
        scores = given.last @ given.last.mT  # type: ignore[union-attr]
        kept = scores.masked_fill(given.padding[:, None], -torch.inf)  # type: ignore[index]
        return kept.softmax(-1) @ given.last * more["gains"][0]


class OfNamed(OfStates):
    def forward(self, given: Named, more: dict[str, list[Tensor]]) -> Tensor:  # type: ignore[override]
        return super().forward(States(**given.parts), more)


def _named(size: int, length: int) -> Named:
    batch = _batch(size, length)
    return Named({"last": batch.states, "padding": batch.padding})


def _states(size: int, length: int) -> States:
    return States(**_named(size, length).parts)


BOTH = {0: "b", 1: "t"}


@pytest.mark.parametrize(
    ("module", "make", "shapes"),
    [
        (OfStates(), _states, {"last": BOTH, "padding": BOTH}),
        (OfStates(), _states, [BOTH, BOTH]),
        (OfNamed(), _named, [BOTH, BOTH]),
    ],
)
def test_dims_of_a_class_that_pytree_knows(
    module: nn.Module, make: Callable[[int, int], Any], shapes: Any
) -> None:
    """And None for an input that holds tensors: all of them are static."""
    more = {"gains": [torch.tensor(2.0)]}
    optimized = optimize(module, (make(2, 4), more), dynamic_shapes=(shapes, None))
    given = make(3, 9)
    torch.testing.assert_close(optimized(given, more), module(given, more))


def test_a_class_without_names_says_so() -> None:
    more = {"gains": [torch.tensor(2.0)]}
    shapes = ({"last": BOTH, "padding": BOTH}, None)
    with pytest.raises(UsageError, match="a list with one entry for each of its 2 parts"):
        capture(OfNamed(), (_named(2, 4), more), dynamic_shapes=shapes)


def test_a_frozen_dataclass_with_slots_is_its_attributes() -> None:
    shapes = {"states": {0: "b", 1: "t"}, "padding": {0: "b", 1: "t"}}
    module, given = Attends(), _batch(2, 6)
    batch = Frozen(given.states, given.padding)
    optimized = optimize(module, (batch,), dynamic_shapes=(shapes,))
    other = _batch(3, 9)
    batch = Frozen(other.states, other.padding)
    torch.testing.assert_close(optimized(batch), module(batch))
    with pytest.raises(UsageError):  # its scale is a constant
        optimized(Frozen(other.states, other.padding, 3.0))
