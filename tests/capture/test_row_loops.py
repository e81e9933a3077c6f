"""Loops over the rows of tensors, and lists made in one expression, take any number of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError

pytestmark = pytest.mark.wide


class Computes(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(8, 8), code
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.linear(x))


def _attend(row: Tensor, other: Tensor) -> Tensor:
    return (row @ other.mT).softmax(-1) @ other


def _listed(x: Tensor) -> Tensor:
    return torch.stack([_attend(row, row) for row in x])


def _looped(x: Tensor) -> Tensor:
    found = []
    for row in x:
        mixed = _attend(row, row)
        found.append(mixed.unsqueeze(0))
    return torch.cat(found, 0)


def _zipped(x: Tensor) -> Tensor:
    double = x * 2
    found = []
    for a, b in zip(x, double, strict=True):
        found.append(_attend(a, b))
    return torch.stack(found, dim=0)


def _counted(x: Tensor) -> Tensor:
    found = []
    for at, row in enumerate(x):
        found.append(row.mean(0) + at)
    return torch.stack(found)


def _indexed(x: Tensor) -> Tensor:
    parts = [x[:, at] * 2 for at in range(x.shape[1])]
    return torch.stack(parts, 1)


def _twice(x: Tensor) -> Tensor:
    rows = [_attend(row, row) for row in x]
    return torch.stack(rows).sum(1)


def _carried(x: Tensor) -> Tensor:
    state = torch.zeros(8)
    for row in x:
        state = state * 0.5 + row.mean(0)
    return state


def _beside_a_list(x: Tensor) -> Tensor:
    """Of lists the code is run as it stands."""
    scales = [1.0, 2.0, 3.0]
    for scale in scales:
        x = x * scale
    return torch.stack([row.mean(0) for row in x])


def _unbound(x: Tensor) -> Tensor:
    """Along an axis that isn't the first."""
    state, found = x.new_zeros(x.shape[0], 8), []
    for a, b in zip(x.unbind(1), torch.unbind(x * 2, dim=-2), strict=True):
        state = torch.tanh(state + a) * b
        found.append(state)
    return torch.stack(found, 1)


def _unbound_before(x: Tensor) -> Tensor:
    steps = x.unbind(dim=1)
    state = torch.zeros_like(steps[0])
    for at, step in enumerate(steps):
        state = torch.tanh(state + step + at)
    return state + steps[-1] * len(steps)


def _split(x: Tensor) -> Tensor:
    """Parts of one place keep the axis."""
    state, found = x.new_zeros(x.shape[0], 1, 8), []
    for step in x.split(1, dim=1):
        state = torch.tanh(state + step)
        found.append(state)
    return torch.cat(found, dim=1)


def _split_from_the_end(x: Tensor) -> Tensor:
    state = x.new_zeros(x.shape[0], 1, 8)
    for step in torch.split(x, 1, -2):
        state = torch.tanh(state + step)
    return state


def _chunked(x: Tensor) -> Tensor:
    state = x.new_zeros(x.shape[0], 1, 8)
    for at, step in enumerate(x.chunk(x.size(1), dim=1)):
        state = torch.tanh(state * at + step)
    return state


def _listed_parts(x: Tensor) -> Tensor:
    parts = [step * 2 for step in x.unbind(1)]
    q, k = x.split(4, -1)  # of a size that is known
    return torch.stack(parts, 1) * torch.cat([k, q], -1)


def _in_pairs(x: Tensor) -> Tensor:
    """Of an odd length the last part is shorter."""
    return torch.cat([step.softmax(1) for step in x.split(2, 1)], 1)


CODE = (
    *(_listed, _looped, _zipped, _counted, _indexed, _twice, _carried, _beside_a_list),
    *(_unbound, _unbound_before, _split, _split_from_the_end, _chunked, _listed_parts),
    _in_pairs,
)


def _compiled(code: Callable[[Tensor], Tensor]) -> tuple[nn.Module, attngraph.Optimized]:
    torch.manual_seed(0)
    model = Computes(code).eval().requires_grad_(False)
    dims = {0: Dim("batch"), 1: Dim("length")}
    return model, attngraph.optimize(model, (torch.randn(3, 7, 8),), dynamic_shapes=(dims,))


@pytest.mark.parametrize("code", CODE, ids=lambda code: code.__name__)
def test_any_number_of_rows_is_taken(code: Callable[[Tensor], Tensor]) -> None:
    model, found = _compiled(code)
    for batch, length in ((1, 1), (2, 5), (5, 3), (2, 6)):
        x = torch.randn(batch, length, 8)
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)


def _skipped(x: Tensor) -> Tensor:
    """A list of some of the rows."""
    return torch.stack([row for row in x if row.shape[0] > 1])


def _reassigned(x: Tensor) -> Tensor:
    """The loop goes on through the rows that there were."""
    for row in x:
        x = x + row
    return x


@pytest.mark.parametrize("code", [_skipped, _reassigned], ids=lambda code: code.__name__)
def test_other_loops_are_refused(code: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"Leave the dim static"):
        _compiled(code)
