"""A loop's body is evaluated on its inputs, also where it reads a size that none of them has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.frontend.capture import capture
from attngraph.ir import Builder, interpret, verify
from attngraph.ir.body_sizes import give_sizes, missing_sizes
from attngraph.ir.ops import attribute
from attngraph.ir.parser import parse
from tests.parity.test_rolled_loops import Remaining

BODY = """graph @step {
  dim n = 3 in 1..64
  dim m = 2 in 1..64
  input %x : f32[m, 4]
  %y = aten.full() {size = [n, 4], fill_value = 1.0}
  %z = aten.cat(%y, %x)
  %w = aten.mul.Scalar(%z) {other = n}
  return %w
}
"""
AROUND = """graph @main {
  dim n = 3 in 1..64
  input %x : f32[n, 4]
  return %x
}
"""


def test_sizes_that_no_input_has_are_missing() -> None:
    body = parse(BODY)
    assert missing_sizes(body) == ["n"]
    (given,) = give_sizes(body, Builder(parse(AROUND)))
    assert str(given.type) == "f32[n, 0]"
    assert missing_sizes(body) == []
    verify(body)
    (result,) = interpret(body, (torch.ones(2, 4), torch.ones(3, 0)))
    assert torch.equal(result, torch.full((5, 4), 3.0))


@pytest.mark.parametrize("first", ["", "%v = aten.relu(%x)\n  "])
def test_a_number_of_blocks_says_of_no_length_how_many_they_are(first: str) -> None:
    """Nor does what is computed of them."""
    body = parse(
        BODY.replace("m = 2 in 1..64", "k = 2 in 1..64")
        .replace("[m, 4]", "[(n + 3)//4, 4]")
        .replace("%y = ", f"{first}%y = ")
    )
    assert missing_sizes(body) == ["n"]
    give_sizes(body, Builder(parse(AROUND)))
    (result,) = interpret(body, (torch.ones(2, 4), torch.ones(7, 0)))
    assert torch.equal(result, torch.full((9, 4), 7.0))


class Repeated(nn.Module):
    """Repeats its state for each row of a memory, of which a step has the number too."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            seen = state.unsqueeze(1).repeat(1, memory.shape[1], 1)
            state = torch.tanh(seen.mean(1) / memory.shape[1] + x[:, t])
            found.append(state)
        return torch.stack(found, 1)


@pytest.mark.parametrize("kind", [Remaining, Repeated])
def test_a_graph_with_such_a_loop_is_evaluated_before_and_behind_the_passes(
    kind: type[nn.Module],
) -> None:
    torch.manual_seed(0)
    module, steps, rows = kind().eval(), Dim("steps"), Dim("rows")
    given = [torch.randn(2, 20, 4), torch.randn(2, 9, 4)]
    others = [torch.randn(2, 7, 4), torch.randn(2, 13, 4)]
    count = 1 if kind is Remaining else 2
    dims = ({1: steps}, {1: rows})[:count]
    captured = capture(module, tuple(given[:count]), dynamic_shapes=dims)
    (loop,) = (node for node in captured.graph if node.op == "attn.scan")
    assert missing_sizes(attribute(loop, "body")) == []
    optimized = attngraph.optimize(module, tuple(given[:count]), dynamic_shapes=dims)
    expected = module(*others[:count])
    for graph in (captured.graph, optimized.graph):
        verify(graph)
        (found,) = interpret(graph, others[:count])
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(optimized(*others[:count]), expected)
