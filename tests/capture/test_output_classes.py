"""A model may return an object of its own class; what hides tensors is refused."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from attngraph.errors import CaptureError
from attngraph.frontend.capture import capture


class Layer:
    def __init__(self, keys: Tensor) -> None:
        self.keys, self.dtype, self.held = keys, keys.dtype, keys.shape[0]


class Output:
    def __init__(self, states: Tensor) -> None:
        self.states, self.layers, self.name = states, [Layer(states * 2)], "held"


class Listed(list[Tensor]):
    """Holds its tensor beside its attributes."""


class Slotted:
    __slots__ = ("states", "unset")

    def __init__(self, states: Tensor) -> None:
        self.states = states


class Private:
    __slots__ = ("__states",)

    def __init__(self, states: Tensor) -> None:
        self.__states = states


class Circle:
    def __init__(self, states: Tensor) -> None:
        self.states, self.inner = states, self


class Kind(Enum):
    OWN = 1
    OTHER = 2


class Returns(nn.Module):
    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Any:
        return self.made(x + 1)


def test_an_object_is_its_attributes() -> None:
    x = torch.randn(3, 4)
    captured = capture(Returns(Output), (x,), dynamic_shapes=({0: Dim("batch", max=9)},))
    assert captured.output_names == ("states", "layers_0_keys", "layers_0_held")
    assert any("returns a Output" in note for note in captured.notes)
    found = captured.signature.unflatten([x, x * 2, torch.tensor(3)])
    assert (type(found), type(found.layers[0])) == (Output, Layer)
    assert found.layers[0].dtype == torch.float32
    assert (found.layers[0].held, found.name) == (3, "held")


def test_slots_are_attributes() -> None:
    captured = capture(Returns(Slotted), (torch.randn(3, 4),))
    assert captured.output_names == ("states",)
    found = captured.signature.unflatten([torch.ones(3, 4)])
    assert (type(found), found.states.sum()) == (Slotted, 12)
    assert not hasattr(found, "unset")


@pytest.mark.parametrize("kind", [lambda y: Listed([y]), Private, Circle])
def test_what_may_hide_a_tensor_is_refused(kind: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match="can't take apart"):
        capture(Returns(kind), (torch.randn(3, 4),))
    assert type(kind(torch.ones(1))) not in pytree.SUPPORTED_NODES


def test_what_holds_no_tensor_is_a_constant() -> None:
    x = torch.randn(3, 4)

    def made(y: Tensor) -> Any:
        return {"kind": Kind.OWN, "y": y, "more": (y.dtype, y.device, [Kind.OTHER, y.shape[0]])}

    captured = capture(Returns(made), (x,), dynamic_shapes=({0: Dim("batch", max=9)},))
    assert captured.output_names == ("y", "more_2_1")
    assert not any("returns a" in note for note in captured.notes)
    found = captured.signature.unflatten([x, torch.tensor(3)])
    assert found["kind"] is Kind.OWN
    assert found["more"] == (torch.float32, torch.device("cpu"), [Kind.OTHER, 3])
    assert Kind not in pytree.SUPPORTED_NODES


def test_a_slice_of_a_size_is_no_constant() -> None:
    with pytest.raises(CaptureError, match="returns a slice"):
        capture(
            Returns(lambda y: (y, slice(0, y.shape[0]))),
            (torch.randn(3, 4),),
            dynamic_shapes=({0: Dim("batch", max=9)},),
        )


class Differentiates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (found,) = torch.autograd.grad((x @ self.weight).tanh().sum(), x)
        return -found


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_gradients_that_a_model_takes_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"torch\.autograd\.grad is called in forward"):
        capture(Differentiates(), (torch.randn(3, 4),))
