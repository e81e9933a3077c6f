"""DeltaProduct (Siems et al. 2025) as it is written, token by token: one operator and its state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import attngraph

WIDTH, HEADS, KEYS, VALUES = 12, 4, 4, 6


class DeltaProduct(nn.Module):
    """Gated, with `updates` of each token, keys (B, T·n, H, dk) as the naive reference has them.

    Keys and queries have two heads, each for two of values.
    """

    def __init__(self, updates: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.updates = updates
        self.q, self.k = nn.Linear(WIDTH, 2 * KEYS), nn.Linear(WIDTH, updates * 2 * KEYS)
        self.v, self.b = nn.Linear(WIDTH, updates * 24), nn.Linear(WIDTH, updates * HEADS)
        self.g = nn.Linear(WIDTH, HEADS)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        rows, length = x.shape[0], x.shape[1]
        places = rows, length * self.updates
        q = self.q(x).view(rows, length, 2, KEYS).repeat_interleave(2, 2)
        k = F.normalize(self.k(x).view(*places, 2, KEYS), dim=-1).repeat_interleave(2, 2)
        v = self.v(x).view(*places, HEADS, VALUES)
        beta = 2 * self.b(x).view(*places, HEADS).sigmoid()
        g = F.logsigmoid(self.g(x))
        given = []
        for t in range(length):
            state = state * g[:, t].exp()[..., None, None]
            for j in range(self.updates):
                i = t * self.updates + j
                error = v[:, i] - (state * k[:, i][..., None]).sum(-2)
                update = beta[:, i][..., None] * error
                state = state + k[:, i][..., None] * update[..., None, :]
            given.append((state * q[:, t][..., None]).sum(-2))
        return torch.stack(given, 1).flatten(2), state


class Hidden(DeltaProduct):
    """Where a token is hidden, the state stays; what reads it then is what it was."""

    def forward(self, x: Tensor, state: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        rows = x.shape[0]
        q = self.q(x).unflatten(2, (2, KEYS)).repeat_interleave(2, 2)
        k = F.normalize(self.k(x).unflatten(2, (self.updates, 2, KEYS)), dim=-1)
        k = k.repeat_interleave(2, 3)
        v = self.v(x).unflatten(2, (self.updates, HEADS, VALUES))
        beta = 2 * self.b(x).unflatten(2, (self.updates, HEADS)).sigmoid()
        given = []
        for t in range(x.shape[1]):
            new = state * F.logsigmoid(self.g(x[:, t])).exp()[..., None, None]
            for j in range(self.updates):
                error = v[:, t, j] - torch.einsum("bhkv,bhk->bhv", new, k[:, t, j])
                error = beta[:, t, j, :, None] * error
                new = new + torch.einsum("bhk,bhv->bhkv", k[:, t, j], error)
            state = torch.where(there[:, t].view(rows, 1, 1, 1), new, state)
            given.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        return torch.stack(given, 1).flatten(2), state


def _inputs(rows: int, length: int, *, hidden: bool) -> tuple[Tensor, ...]:
    made = torch.randn(rows, length, WIDTH), torch.randn(rows, HEADS, KEYS, VALUES)
    return (*made, torch.rand(rows, length) > 0.4) if hidden else made


def _compiled(module: nn.Module, *, hidden: bool) -> attngraph.Optimized:
    rows, length = Dim("rows", min=1, max=8), Dim("length", min=1, max=256)
    dims = ({0: rows, 1: length}, {0: rows}, *([{0: rows, 1: length}] if hidden else []))
    return attngraph.optimize(module, _inputs(2, 7, hidden=hidden), dynamic_shapes=dims)


@pytest.mark.parametrize(
    ("kind", "updates"),
    [
        (DeltaProduct, 2),
        pytest.param(DeltaProduct, 4, marks=pytest.mark.wide),
        pytest.param(Hidden, 3, marks=pytest.mark.wide),
    ],
)
def test_it_is_one_operator(kind: type[DeltaProduct], updates: int) -> None:
    """Of any length, one token included, with the state of what came before."""
    module, hidden = kind(updates).eval(), kind is Hidden
    optimized = _compiled(module, hidden=hidden)
    ops = [node.op_type for node in optimized.model.graph]
    assert ops.count("LinearAttention") == 1
    assert not {"Scan", "Loop"} & {*ops}
    assert f"of {updates} updates of each token" in str(optimized.report)
    for length in (1, 2, 33):
        inputs = _inputs(3, length, hidden=hidden)
        wide = (x.double() if x.is_floating_point() else x for x in inputs)
        expected = module.double()(*wide)
        for found, wanted in zip(optimized.run(inputs), expected, strict=True):
            error = (torch.as_tensor(found) - wanted).abs().max() / wanted.abs().max()
            assert error < 20 * 2**-24 * max(1, (length * updates) ** 0.5)
