"""Elements of earlier steps that a loop reads by their places in a list that it fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError


class Model(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x)


def _check(code: Callable[[Tensor], Tensor], lengths: Sequence[int]) -> None:
    torch.manual_seed(0)
    model = Model(code).eval()
    found = attngraph.optimize(
        model, (torch.randn(2, 6, 4),), dynamic_shapes=({1: Dim("length", min=lengths[0])},)
    )
    for length in lengths:
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(found(x), model(x), rtol=1e-5, atol=1e-5)


def _from_third(x: Tensor) -> Tensor:
    found = [x[:, 0].sin(), x[:, 1].cos()]
    for t in range(2, x.shape[1]):
        found.append(torch.tanh(x[:, t] + found[t - 1] * 0.5 - found[t - 2]))
    return torch.stack(found, 1)


def _behind_more(x: Tensor) -> Tensor:
    """A list that has three elements before the first step, and one of them in each is the last."""
    found = [x[:, 0], x[:, 0].sin(), x[:, 0].cos()]
    for t in range(x.shape[1]):
        found.append(torch.tanh(x[:, t] + found[t] * 0.5 + 0.3 * found[t + 1] - found[t + 2]))
    return torch.stack(found, 1)


def _two_back(x: Tensor) -> Tensor:
    found = [x[:, 0].sin(), x[:, 1].cos()]
    for t in range(2, x.shape[1]):
        found.append(torch.tanh(x[:, t] - found[t - 2]))
    return torch.stack(found, 1)


@pytest.mark.parametrize(
    ("code", "lengths"),
    [(_from_third, (3, 4, 5, 6, 14)), (_behind_more, (1, 2, 5, 7, 14)), (_two_back, (3, 6, 14))],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_elements_of_earlier_steps(
    code: Callable[[Tensor], Tensor], lengths: Sequence[int]
) -> None:
    _check(code, lengths)


def _from_the_end(x: Tensor) -> Tensor:
    """In the first step t - 2 is -1, the place of the last element."""
    found = [x[:, 0].sin()]
    for t in range(1, x.shape[1]):
        found.append(torch.tanh(x[:, t] + found[t - 1] * 0.5 - found[t - 2]))
    return torch.stack(found, 1)


def _of_a_longer_list(x: Tensor) -> Tensor:
    """The last element is that at t."""
    found = [x[:, 0].sin(), x[:, 0].cos(), x[:, 1]]
    for t in range(2, x.shape[1]):
        found.append(torch.tanh(x[:, t] + found[t - 1] * 0.5 - found[t - 2]))
    return torch.stack(found, 1)


@pytest.mark.parametrize("code", [_from_the_end, _of_a_longer_list], ids=lambda each: each.__name__)
def test_elements_at_other_places_are_refused(code: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"fixes it to 6 at .*for t in range"):
        _check(code, (3, 4, 5, 6, 14))
