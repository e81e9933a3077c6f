"""`as_strided` reads memory as the trace has it, whatever becomes of the operand's layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph.compiling.compiler import optimize
from attngraph.errors import CaptureError
from attngraph.frontend.capture import capture
from tests.capture.formula import assert_eager, states


class Overlapping(nn.Module):
    """Chunks of 2w rows, each w rows behind the one before, of a tensor (B, S, D) in any layout."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        match self.layout:
            case "transposed":
                x = x.transpose(0, 1)
            case "features first":
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            case "cut":
                x = x[:, :, :4]
        a, b, c = x.stride()
        chunks = x.shape[1] // 2 - 1
        return x.as_strided((x.shape[0], chunks, 4, x.shape[2]), (a, 2 * b, b, c), 0) * 2


LAYOUTS = ["contiguous", "transposed", "features first"]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_graph_reads_what_the_module_reads(layout: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    model, x = Overlapping(layout).eval(), states(6, 8, 6)
    shapes = ({0: 2 * Dim("half", min=3, max=9)},) if dynamic else None
    graph = capture(model, (x,), dynamic_shapes=shapes).graph
    for given in (x, states(10, 8, 6)) if dynamic else (x,):
        assert_eager(graph, model, given)
    assert optimize(model, (x,), dynamic_shapes=shapes).report.parity.passed


class Shifted(nn.Module):
    """Relative positions beside their queries, as Transformer-XL's shift is written in icefall."""

    def forward(self, x: Tensor) -> Tensor:
        queries = x[:, :, ::2]
        places = torch.arange(2 * queries.shape[2] - 1, dtype=x.dtype)
        scores = queries.sum(-1)[..., None] + places
        heads, rows, length, _ = scores.shape
        steps = scores.stride()
        return scores.as_strided(
            (heads, rows, length, length),
            (steps[0], steps[1], steps[2] - steps[3], steps[3]),
            storage_offset=steps[3] * (length - 1),
        )


def test_strides_that_are_sizes_are_read_in_the_graphs_dims() -> None:
    x = torch.randn(2, 3, 10, 4)
    shapes = ({1: Dim("rows"), 2: Dim("length", min=3, max=80)},)
    model = Shifted()
    optimized = optimize(model, (x,), dynamic_shapes=shapes)
    for rows, count in ((3, 5), (1, 3), (2, 17), (2, 40)):
        given = torch.randn(2, rows, count, 4)
        torch.testing.assert_close(optimized(given), model(given))


def test_memory_outside_of_the_tensor_is_an_error() -> None:
    with pytest.raises(CaptureError, match=r"as_strided at .* call \.contiguous\(\) first"):
        capture(Overlapping("cut").eval(), (states(6, 8, 6),))
