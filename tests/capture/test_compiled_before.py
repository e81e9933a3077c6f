"""A loop whose body Dynamo has compiled for another capture takes every size all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim

from attngraph.frontend.capture import capture
from attngraph.ir import interpret

BATCH, SEQ = Dim("batch", max=64), Dim("seq", max=64)


class Loop(nn.Module):
    """h ← tanh(W x + h) over the steps of x (S, B, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(self.linear(now) + state)
            return state, state.clone()

        states: Tensor = scan(step, x.new_zeros(x.shape[1], 4), x, dim=0)[1]
        return states


@pytest.mark.parametrize("steps", [5, 6], ids=["other size", "same size"])
def test_what_dynamo_holds_of_another_capture_narrows_no_dim(steps: int) -> None:
    """The first capture fixes 6 steps: asked for 5, Dynamo notes ≠ 6, and for 6, = 6."""
    torch._dynamo.reset()
    capture(Loop().eval(), (torch.randn(6, 3, 4),), dynamic_shapes=({1: BATCH},))
    module = Loop().eval()
    again = capture(module, (torch.randn(steps, 3, 4),), dynamic_shapes=({0: SEQ, 1: BATCH},))
    assert (again.graph.dims["seq"].low, again.graph.dims["seq"].high) == (1, 64)
    assert not again.graph.conditions
    for size in (1, 4, 6, 9):
        x = torch.randn(size, 2, 4)
        with torch.no_grad():
            torch.testing.assert_close(interpret(again.graph, [x]), (module(x),))
