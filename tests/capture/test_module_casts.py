"""Modules that a forward casts, or names by numbers of a tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.errors import CaptureError


class Router(nn.Module):
    """Casts its classifier to `dtype`, as that of Switch Transformers does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.classifier, self.dtype = nn.Linear(8, 4), dtype

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(self.dtype)
        return self.classifier(x).softmax(-1)


def test_a_module_is_cast_to_the_dtype_that_it_has() -> None:
    model, x = Router(torch.float32), torch.randn(5, 8)
    found = attngraph.optimize(model, (torch.randn(3, 8),), dynamic_shapes=({0: "batch"},))
    torch.testing.assert_close(found(x), model(x))


class Named(nn.Module):
    """Its part is named by a number of its input, as experts of Switch Transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({f"part_{n}": nn.Linear(8, 4) for n in range(2)})

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        made: Tensor = self.parts[f"part_{index[0]}"](x)
        return made


def test_a_key_that_is_made_of_a_tensors_value_is_told() -> None:
    given = (torch.randn(3, 8), torch.tensor([1, 0]))
    with pytest.raises(CaptureError, match=r"a key is made of a tensor's value there, which a tr"):
        attngraph.optimize(Named(), given)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(CaptureError):
        attngraph.optimize(Router(torch.float64), (torch.randn(3, 8),))
