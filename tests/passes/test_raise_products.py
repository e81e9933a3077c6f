"""A loop's steps multiply matrices where the model multiplies and sums."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

import attngraph

HEADS, SIZE = 2, 16


class TwoKeys(torch.nn.Module):
    """RWKV-7's rule: the state is read by one key and written by another, so it stays a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.Linear(HEADS * SIZE, 5 * HEADS * SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, steps = x.shape[:2]
        q, k, v, a, b = self.parts(x).view(rows, steps, 5, HEADS, SIZE).unbind(2)
        a, b = torch.nn.functional.normalize(a, dim=-1), b.sigmoid()
        state, given = x.new_zeros(rows, HEADS, SIZE, SIZE), []
        for t in range(steps):
            known = (state * a[:, t].unsqueeze(-2)).sum(-1, keepdim=True)
            state = state - known * (a * b)[:, t].unsqueeze(-2)
            state = state + v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
            given.append((state * q[:, t, :, None]).sum(-1))
        return torch.stack(given, 1).flatten(2)


def _body(optimized: attngraph.Optimized) -> list[str]:
    (scan,) = [node for node in optimized.model.graph if node.op_type == "Scan"]
    return [node.op_type for node in scan.attributes["body"].as_graph()]


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_multiplies_matrices(exact: bool) -> None:
    """Two sums and two outer products, of which an exact file keeps the sums."""
    torch.manual_seed(0)
    model = TwoKeys().eval()
    dims = ({0: Dim("batch", max=8), 1: Dim("seq", max=64)},)
    optimized = attngraph.optimize(
        model, (torch.randn(2, 5, HEADS * SIZE),), dynamic_shapes=dims, exact=exact
    )
    ops = _body(optimized)
    assert ops.count("MatMul") == (2 if exact else 4)
    assert ops.count("ReduceSum") == (2 if exact else 0)
    for rows, steps in ((1, 1), (3, 2), (2, 40)):
        x = torch.randn(rows, steps, HEADS * SIZE)
        torch.testing.assert_close(optimized(x), model(x))
