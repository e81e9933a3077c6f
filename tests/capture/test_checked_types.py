"""Functions of which beartype checks the arguments take the sizes of a trace."""

from __future__ import annotations

import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintParamViolation
from torch import Tensor, nn
from torch.export import Dim

from attngraph import optimize
from attngraph.frontend.rewording.checked_types import unchecked_types


@beartype
def halved(x: Tensor, length: int) -> Tensor:
    return x[:, :length] + x[:, -length:]


class Heads(nn.Module):
    @torch.no_grad()
    @beartype
    def forward(self, x: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
        return x.reshape(shape).softmax(-1).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = Heads()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, features = x.shape
        return halved(self.heads(x, (batch, length, 2, features // 2)), (length + 1) // 2)


def test_sizes_are_ints_to_checks() -> None:
    model, dims = Model(), ({0: Dim("batch"), 1: Dim("length", min=2)},)
    compiled = optimize(model, (torch.randn(2, 6, 8),), dynamic_shapes=dims)
    for shape in ((1, 2, 8), (3, 7, 8), (5, 32, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), model(x))


def test_calls_without_a_size_are_checked_as_before() -> None:
    checked = halved
    with unchecked_types():
        assert halved is not checked
        halved(torch.ones(1, 2), 1)
        with pytest.raises(BeartypeCallHintParamViolation):
            halved(torch.ones(1, 2), "1")
        with pytest.raises(BeartypeCallHintParamViolation):
            Heads()(torch.ones(2, 4, 2), [2, 4, 2, 1])
    assert halved is checked
    with pytest.raises(BeartypeCallHintParamViolation):
        Heads()(torch.ones(2, 4, 2), [2, 4, 2, 1])
