"""A scan stays a loop: one ONNX Scan, its body optimised, at any length."""

from __future__ import annotations

from collections import Counter
from typing import Any

import onnx_ir
import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError
from attngraph.ir import interpret, parse
from attngraph.ir.printer import format_graph

pytestmark = pytest.mark.wide

SHAPES = ({0: Dim("batch"), 1: Dim("seq", min=2, max=64)},)


class Recurrence(nn.Module):
    """h ← h / 2 + tanh(W x + U h), and what a step gives is h doubled."""

    def __init__(self, *, reverse: bool = False) -> None:
        super().__init__()
        self.input, self.state = nn.Linear(4, 6), nn.Linear(6, 6)
        self.reverse = reverse

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def step(h: torch.Tensor, x_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = h / 2 + torch.tanh(self.input(x_t) + self.state(h))
            return h, h * 2

        last, states = scan(step, x.new_zeros(x.shape[0], 6), x, dim=1, reverse=self.reverse)
        return states, last


class Decoder(nn.Module):
    """Each step attends to the whole input, with a query from its state."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keys, self.mix = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 8)
        self.register_buffer("places", torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.keys(x)

        def step(h: torch.Tensor, x_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = self.query(h)[:, None] @ keys.transpose(1, 2) / 8**0.5
            context = (scores.softmax(-1) @ x)[:, 0]
            h = torch.tanh(self.mix(torch.cat([context + x_t @ self.places, h], -1)))
            return h, h.clone()

        return scan(step, x[:, 0].contiguous(), x, dim=1)[1]


def optimize(module: nn.Module, width: int = 4) -> tuple[Any, Counter[str], Counter[str]]:
    """The result, in its error budget at three lengths, and its operators outside and inside."""
    optimized = attngraph.optimize(module, (torch.randn(3, 5, width),), dynamic_shapes=SHAPES)
    outside = Counter(node.op_type for node in optimized.model.graph)
    (loop,) = [node for node in optimized.model.graph if node.op_type == "Scan"]
    inside = Counter(node.op_type for node in loop.attributes["body"].as_graph())
    return optimized, outside, inside


@pytest.mark.parametrize("reverse", [False, True])
def test_a_recurrence_of_any_length(reverse: bool) -> None:
    _, outside, inside = optimize(Recurrence(reverse=reverse))
    assert outside["Scan"] == 1
    assert inside["Gemm"] == 1  # of the state; that of the input is one for all steps
    assert outside["Gemm"] + outside["MatMul"] == 1
    assert not {"Transpose", "Constant"} & inside.keys()


def test_the_attention_in_a_body_is_fused_and_told() -> None:
    optimized, _, inside = optimize(Decoder(), 8)
    assert inside["Attention"] == 1
    assert "Softmax" not in inside
    (site,) = optimized.report.sites
    assert site.status == "fused"


class Masked(Decoder):
    """What follows from the mask and the keys is written in the step, and the same in all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x[:, :, 0] > 0

        def step(h: torch.Tensor, x_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = (self.keys(x).tanh() @ h[:, :, None])[..., 0]
            weights = scores.masked_fill(hidden, -1e4).softmax(-1)
            h = torch.tanh(self.mix(torch.cat([(weights[:, None] @ x)[:, 0], x_t], -1)))
            return h, weights

        return scan(step, x[:, 0].contiguous(), x, dim=1)[1]


def test_a_body_holds_only_what_changes_from_step_to_step() -> None:
    optimized, outside, inside = optimize(Masked(), 8)
    (loop,) = [node for node in optimized.model.graph if node.op_type == "Scan"]
    body = loop.attributes["body"].as_graph()
    changing = {*body.inputs}
    for node in body:
        assert not changing.isdisjoint(node.inputs), node
        changing.update(node.outputs)
    assert {value.producer() is None for value in body.outputs} == {False}
    assert outside["Tanh"] == inside["Tanh"] == 1
    assert not {"Identity", "Cast", "Not"} & inside.keys()


class WritesInPlace(nn.Module):
    """A state shifted by one place and halved, written into a copy of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(h: torch.Tensor, x_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = h.clone()
            first, second = h.chunk(2, -1)
            first.copy_(second / 2)
            h[:, 3:] += x_t[:, :3]
            return h, h * 2

        return scan(step, x.new_ones(x.shape[0], 6), x, dim=1)[1]


def test_a_body_may_write_into_views_of_a_copy() -> None:
    module, x = WritesInPlace(), torch.randn(2, 7, 4)
    graph = attngraph.capture(module, (torch.randn(3, 5, 4),), dynamic_shapes=SHAPES)
    h, expected = torch.ones(2, 6), []
    for step in range(7):
        h = torch.cat([h[:, 3:] / 2, h[:, 3:] + x[:, step, :3]], -1)
        expected.append(h * 2)
    torch.testing.assert_close(interpret(graph, [x])[0], torch.stack(expected, 1))


def test_the_text_of_a_loop_parses_back_and_runs_alike() -> None:
    graph = attngraph.capture(Recurrence(), (torch.randn(3, 5, 4),), dynamic_shapes=SHAPES)
    weights = {name: value.data for name, value in graph.constants.items()}
    again = parse(format_graph(graph), weights)
    x = torch.randn(2, 7, 4)
    torch.testing.assert_close(interpret(graph, [x]), interpret(again, [x]), rtol=0, atol=0)
    torch.testing.assert_close(interpret(graph, [x]), Recurrence.forward(*_plain(graph, x)))


def _plain(graph: Any, x: torch.Tensor) -> tuple[Recurrence, torch.Tensor]:
    module = Recurrence()
    module.load_state_dict({name: value.data for name, value in graph.constants.items()})
    return module.requires_grad_(False), x


def test_the_saved_file_runs_without_us(tmp_path: Any) -> None:
    optimized, _, _ = optimize(Recurrence())
    optimized.save(tmp_path / "loop.onnx")
    model = onnx_ir.load(tmp_path / "loop.onnx")
    assert [node.op_type for node in model.graph].count("Scan") == 1


class While(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return while_loop(lambda x: x.sum() < 9, lambda x: (x.abs() + 1,), (x,))


def test_other_control_flow_is_refused_with_a_way_out() -> None:
    with pytest.raises(CaptureError, match=r"while_loop.*scan"):
        attngraph.optimize(While(), (torch.randn(3, 4),))


class Mixed(nn.Module):
    """What a step gives has other dtypes than what it carries."""

    def __init__(self, carried: torch.dtype) -> None:
        super().__init__()
        self.carried = carried

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def step(h: torch.Tensor, x_t: torch.Tensor) -> tuple[torch.Tensor, Any]:
            more = (h.float() / 2 + x_t).to(self.carried)
            return more, (more.float() * x_t, x_t > more, more.clone())

        last, results = scan(step, torch.zeros_like(x[:, 0], dtype=self.carried), x, dim=1)
        return (last, *results)


@pytest.mark.parametrize("carried", [torch.float16, torch.bfloat16, torch.bool, torch.int64])
def test_each_result_has_the_dtype_that_a_step_gives(carried: torch.dtype) -> None:
    module = Mixed(carried)
    optimized = attngraph.optimize(module, (torch.randn(2, 5, 4),), dynamic_shapes=SHAPES)
    x = torch.randn(3, 9, 4)
    for found, expected in zip(optimized(x), module(x), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)
