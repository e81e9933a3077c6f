"""Writes into parts of a tensor become values without a second trace, and are what eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from attngraph import optimize
from attngraph.frontend.translation import functional

Code = Callable[[Tensor], Any]


class Written(nn.Module):
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor) -> Any:
        return self.code(x)


def triangular_inverse(x: Tensor) -> Tensor:
    """As chunked delta rules have it: each row is made of those above it."""
    rows = (x @ x.mT / 10).clone()
    for i in range(1, 4):
        row, above = rows[..., i, :i].clone(), rows[..., :i, :i].clone()
        rows[..., i, :i] = row + (row.unsqueeze(-1) * above).sum(-2)
    return rows


def read_through_earlier_views(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x * 1.0
    row = whole[:, 1]
    again = row.unsqueeze(1)
    whole[:, 1] = 7.0
    whole[:, :, 0] += 1
    return row + again[:, 0], whole


def read_before(x: Tensor) -> Tensor:
    whole = x * 1.0
    before = whole[:, 0] * 2
    whole[:, 0] = 1.0
    return whole[:, 0] + before


def views_of_views(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x.new_zeros(2, x.shape[1], 4)
    part = whole[:, 1:]
    part[:, 0] = x[:, 0]
    whole[:, 0] = part[:, 0] * 2
    part[:, 0] += whole[:, 0]
    return whole, part


def in_place_operators(x: Tensor) -> Tensor:
    whole = x * 1.0
    whole[:, :2].mul_(2).add_(1)
    whole[:, 2:].relu_()
    whole[:, 0].masked_fill_(x[:, 0] > 0, -1.0)
    return whole


def interleaved(x: Tensor) -> Tensor:
    turned = torch.empty_like(x)
    turned[..., ::2], turned[..., 1::2] = -x[..., 1::2], x[..., ::2]
    return turned


def other_shapes_and_dtypes(x: Tensor) -> Tensor:
    whole = torch.zeros_like(x)
    whole[:, 0] = torch.arange(4)
    whole[:, 1:3].copy_(x[:, :1].double())
    whole.transpose(1, 2)[:, 0] = 3.0
    whole.unsqueeze(0)[0, :, :, 3] = 2.0
    return whole


def a_diagonal(x: Tensor) -> Tensor:
    scores = x @ x.mT
    scores.diagonal(dim1=-2, dim2=-1).fill_(0.0)
    return scores.softmax(-1)


def narrowed(x: Tensor) -> Tensor:
    whole = torch.cat([x, x], 1)
    whole.narrow(1, 0, x.shape[1]).mul_(2)
    whole.narrow(1, 1, x.shape[1]).add_(1)
    return whole


def of_its_own_rows(x: Tensor) -> Tensor:
    whole = x * 1.0
    whole[:, 0].add_(whole[:, 1])
    whole[:, 1:] *= whole[:, :1]
    return whole


def beside_its_sorted_twin(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two results of topk share no memory."""
    values, places = x.topk(2, -1)
    values /= values.abs().sum(-1, keepdim=True)
    return values, places


def reshaped_at_the_end(x: Tensor) -> Tensor:
    whole = x * 1.0
    whole[:, 0] = 0.0
    return whole.transpose(1, 2).reshape(2, -1) + 1


ONCE = (
    *(triangular_inverse, read_through_earlier_views, read_before, views_of_views),
    *(in_place_operators, interleaved, other_shapes_and_dtypes, a_diagonal, narrowed),
    *(of_its_own_rows, beside_its_sorted_twin, reshaped_at_the_end),
)


def reshaped_before(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whether it is a view depends on strides."""
    whole = x * 1.0
    flat = whole.reshape(2, -1)
    whole[:, 0] = 0.0
    return flat, whole


def split_into_parts(x: Tensor) -> Tensor:
    whole = x * 1.0
    first, second = whole.chunk(2, -1)
    first.mul_(2)
    second[:, 0] = 1
    return whole


def seen_otherwise(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x * 1.0
    view = whole.view(2, -1, 2, 2)
    whole[:, 0] = 3.0
    first = view[:, :, 0]
    view[:, 1] = 0.0
    return whole, first


TWICE = (reshaped_before, split_into_parts, seen_otherwise)


@pytest.mark.parametrize("code", [*ONCE, *TWICE], ids=lambda code: code.__name__)
def test_what_is_written_into_a_part(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[ExportedProgram] = []
    retraced = functional._retraced

    def counted(program: ExportedProgram) -> ExportedProgram:
        traces.append(program)
        return retraced(program)

    monkeypatch.setattr(functional, "_retraced", counted)
    model, shapes = Written(code).eval(), ({1: Dim("length", min=4, max=64)},)
    optimized = optimize(model, (torch.randn(2, 5, 4),), dynamic_shapes=shapes)
    assert len(traces) == (code in TWICE)
    for length in (4, 9, 33):
        x = torch.randn(2, length, 4)
        expected = pytree.tree_leaves(model(x.clone()))
        for found, value in zip(pytree.tree_leaves(optimized(x)), expected, strict=True):
            torch.testing.assert_close(found, value, atol=1e-5, rtol=1e-5)


def test_options_of_a_write_are_not_those_of_what_replaces_the_part() -> None:
    def code(x: Tensor) -> Tensor:
        whole = x * 1.0
        whole[:, 1:].add_(x[:, :1], alpha=0.5)
        return whole

    program = torch.export.export(Written(code), (torch.randn(2, 5, 4),))
    nodes = functional.functionalize(program).graph.nodes
    options = {str(node.target): dict(node.kwargs) for node in nodes if node.kwargs}
    assert options == {"aten.add.Tensor": {"alpha": 0.5}}


def test_a_reader_that_torch_has_forgotten_is_one() -> None:
    """torch.export leaves a reader out of a node's users now and then."""

    def written(x: Tensor) -> Tensor:
        chosen = (x[x[..., 0] > 0] * 2.0).clone()
        chosen[:, 1] = chosen[:, 0]
        return chosen[:, :2]

    program = torch.export.export(Written(written), (torch.randn(2, 3, 4),))
    for node in program.graph_module.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes:
            for read in node.all_input_nodes:
                read.users.pop(node)
    found = functional.functionalize(program).graph
    assert all(node in read.users for node in found.nodes for read in node.all_input_nodes)
